//! [`Moments`]: count, means and squared deviations of the channels, and how those of several parts become one.

use phalanx_kernels as kernels;
use phalanx_nn::BatchNorm;
use phalanx_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::comm::Comm;

/// Of [N, C, ...], in f64.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moments {
    /// Elements of a channel.
    pub(crate) count: f64,
    /// Of each channel.
    pub(crate) mean: Vec<f64>,
    /// Of each channel the sum of the squares of the distances from its mean.
    pub(crate) squares: Vec<f64>,
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
        let nothing = Moments { count: 0.0, mean: vec![0.0; channels], squares: vec![0.0; channels] };
        Ok(all.chunks_exact(numbers.len()).map(of).fold(nothing, Moments::with))
    }

    /// Of both parts together, by Chan, Golub and LeVeque's formula; never a difference of large squares.
    pub(crate) fn with(mut self, part: Moments) -> Moments {
        if self.count == 0.0 || part.count == 0.0 {
            return if self.count == 0.0 { part } else { self };
        }
        let count = self.count + part.count;
        for channel in 0..self.mean.len() {
            let apart = part.mean[channel] - self.mean[channel];
            self.mean[channel] += apart * (part.count / count);
            self.squares[channel] +=
                part.squares[channel] + apart * apart * (self.count * part.count / count);
        }
        self.count = count;
        self
    }

    /// Biased: what a batch is normalised by.
    pub(super) fn variance(&self) -> Vec<f64> {
        self.squares.iter().map(|m2| m2 / self.count).collect()
    }

    /// Moves a layer's running statistics towards these, the variance unbiased, and counts a batch.
    pub(crate) fn commit(&self, norm: &BatchNorm) -> Result<()> {
        let momentum = norm.count()?;
        let unbiased: Vec<f64> = self.squares.iter().map(|m2| m2 / (self.count - 1.0)).collect();
        let BatchNorm { running_mean, running_var, .. } = norm;
        for (buffer, new) in [(running_mean, &self.mean), (running_var, &unbiased)] {
            let Some(buffer) = buffer else { continue };
            let held = buffer.tensor();
            let wide = kernels::cast(&held, DType::F64)?;
            let old = if held.device().is_meta() { vec![0.0; held.numel()] } else { wide.to_vec::<f64>()? };
            let moved = |(old, new): (f64, &f64)| (1.0 - momentum) * old + momentum * new;
            let moved: Vec<f64> = old.into_iter().zip(new).map(moved).collect();
            let moved = Tensor::from_slice(&moved, held.shape(), held.device())?;
            buffer.load(&moved)?;
        }
        Ok(())
    }
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
            let merged = parts.reduce(Moments::with).unwrap();
            assert_eq!(merged.count, 12.0);
            assert!((merged.mean[0] - whole.mean[0]).abs() < 1e-9);
            assert!((merged.squares[0] / whole.squares[0] - 1.0).abs() < 1e-6, "{merged:?}, {whole:?}");
        }
    }
}
