//! [`Moments`]: count, means and squared deviations of the channels, and how those of several ranks become one.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::comm::Comm;

/// Of [N, C, ...], in f64.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moments {
    /// Elements of a channel.
    pub(super) count: f64,
    /// Of each channel.
    pub(super) mean: Vec<f64>,
    /// Of each channel the sum of the squares of the distances from its mean.
    pub(super) squares: Vec<f64>,
}

impl Moments {
    /// Of this rank's batch, perhaps of no rows.
    pub(super) fn of(x: &Tensor) -> Result<Moments> {
        let channels = x.shape()[1];
        let count = x.numel().checked_div(channels).unwrap_or(0) as f64;
        if x.numel() == 0 {
            return Ok(Moments { count: 0.0, mean: vec![0.0; channels], squares: vec![0.0; channels] });
        }
        let wide = kernels::cast(x, DType::F64)?;
        let dims: Vec<usize> = (0..x.rank()).filter(|&dim| dim != 1).collect();
        let mean = kernels::mean(&wide, &dims, false)?.to_vec()?;
        let variance: Vec<f64> = kernels::var(&wide, &dims, 0.0, false)?.to_vec()?;
        Ok(Moments { count, mean, squares: variance.into_iter().map(|v| v * count).collect() })
    }

    /// Of all ranks' batches; the same bits on all.
    pub(super) fn merged(&self, comm: &Comm) -> Result<Moments> {
        let numbers: Vec<f64> = [self.count].iter().chain(&self.mean).chain(&self.squares).copied().collect();
        let own = Tensor::from_slice(&numbers, &[numbers.len()], Device::CPU)?;
        let mut all = Tensor::zeros(&[numbers.len() * comm.size()], DType::F64, Device::CPU)?;
        comm.all_gather(&mut all, &own)?;
        let all = all.to_vec::<f64>()?;
        let channels = self.mean.len();
        let of = |numbers: &[f64]| Moments {
            count: numbers[0],
            mean: numbers[1..=channels].to_vec(),
            squares: numbers[1 + channels..].to_vec(),
        };
        Ok(merge(all.chunks_exact(numbers.len()).map(of), channels))
    }

    /// Biased: what a batch is normalised by.
    pub(super) fn variance(&self) -> Vec<f64> {
        self.squares.iter().map(|m2| m2 / self.count).collect()
    }
}

/// Chan, Golub and LeVeque's formula, one after the other; never a difference of large squares.
fn merge(parts: impl Iterator<Item = Moments>, channels: usize) -> Moments {
    let nothing = Moments { count: 0.0, mean: vec![0.0; channels], squares: vec![0.0; channels] };
    parts.filter(|part| part.count > 0.0).fold(nothing, |mut sum, part| {
        if sum.count == 0.0 {
            return part;
        }
        let count = sum.count + part.count;
        for channel in 0..channels {
            let apart = part.mean[channel] - sum.mean[channel];
            sum.mean[channel] += apart * (part.count / count);
            sum.squares[channel] += part.squares[channel] + apart * apart * (sum.count * part.count / count);
        }
        sum.count = count;
        sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_merge_to_the_whole_and_small_deviations_of_large_means_stay() {
        let values: Vec<f64> = (0..12).map(|i| 1e6 + 1e-3 * f64::from(i * i % 7)).collect();
        let of = |values: &[f64]| {
            Moments::of(&Tensor::from_slice(values, &[values.len(), 1], Device::CPU).unwrap()).unwrap()
        };
        let whole = of(&values);
        for cuts in [vec![0, 12, 12], vec![0, 0, 5, 12], vec![0, 1, 2, 9, 9, 12]] {
            let parts = cuts.windows(2).map(|cut| of(&values[cut[0]..cut[1]]));
            let merged = merge(parts, 1);
            assert_eq!(merged.count, 12.0);
            assert!((merged.mean[0] - whole.mean[0]).abs() < 1e-9);
            assert!((merged.squares[0] / whole.squares[0] - 1.0).abs() < 1e-6, "{merged:?}, {whole:?}");
        }
    }
}
