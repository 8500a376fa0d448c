//! Moments of a batch by channel: the mean and the sum of squared deviations of parts of a batch, merged to those of the whole.
//! [`Moments`] has them on the host, [`DeviceMoments`] on the batch's device, where the host waits for none of them.
//!
//! Source: Chan, Golub, LeVeque: Updating formulae (1979).

use phalanx_kernels as kernels;
use phalanx_kernels::cuda::PRELUDE;
use phalanx_nn::BatchNorm;
use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program};
use phalanx_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::comm::Comm;

/// Of [N, C, ...], in f64.
#[derive(Clone, Debug, PartialEq)]
struct Moments {
    /// Elements of a channel.
    count: f64,
    /// Of each channel.
    mean: Vec<f64>,
    /// Of each channel the sum of the squares of the distances from its mean.
    squares: Vec<f64>,
}

impl Moments {
    /// The moments of both parts together, by Chan, Golub and LeVeque's formula; never a difference of large squares.
    fn with(mut self, part: Moments) -> Moments {
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

    fn of_numbers(numbers: &[f64]) -> Moments {
        let channels = numbers.len() / 2;
        let (mean, squares) = (numbers[1..=channels].to_vec(), numbers[1 + channels..].to_vec());
        Moments { count: numbers[0], mean, squares }
    }
}

/// [`Moments`] on a device, as one tensor: the count, the means, the sums of squares.
pub(super) struct DeviceMoments {
    /// f64 [1 + 2 C].
    numbers: Tensor,
    channels: usize,
}

impl DeviceMoments {
    /// The moments of this rank's batch [N, C, ...], which may have no rows.
    pub(super) fn of(x: &Tensor) -> Result<DeviceMoments> {
        let channels = x.shape()[1];
        let numbers = Tensor::zeros(&[1 + 2 * channels], DType::F64, x.device())?;
        if x.numel() > 0 {
            let count = (x.numel() / channels) as f64;
            let wide = kernels::cast(x, DType::F64)?;
            let dims: Vec<usize> = (0..x.rank()).filter(|&dim| dim != 1).collect();
            let mean = kernels::mean(&wide, &dims, false)?;
            let squares = kernels::mul_scalar(&kernels::var(&wide, &dims, 0.0, false)?, count.into())?;
            kernels::fill_(&mut numbers.narrow(0, 0, 1)?, count)?;
            kernels::copy_(&mut numbers.narrow(0, 1, channels)?, &mean)?;
            kernels::copy_(&mut numbers.narrow(0, 1 + channels, channels)?, &squares)?;
        }
        Ok(DeviceMoments { numbers, channels })
    }

    fn from_host(moments: &Moments, device: Device) -> Result<DeviceMoments> {
        let Moments { count, mean, squares } = moments;
        let numbers: Vec<f64> = [count].into_iter().chain(mean).chain(squares).copied().collect();
        let numbers = Tensor::from_slice(&numbers, &[numbers.len()], device)?;
        Ok(DeviceMoments { numbers, channels: mean.len() })
    }

    /// The moments of all ranks' batches together, in order of the ranks; the same bits on all of them, and on every device.
    pub(super) fn merged(&self, comm: &Comm) -> Result<DeviceMoments> {
        let device = self.numbers.device();
        let mut all = Tensor::empty(&[self.numbers.numel() * comm.size()], DType::F64, device)?;
        if device.is_cuda() {
            // Loaded before the exchange: no program is loaded while a collective is under way.
            let merge = merge_kernel(device.gpu()?)?;
            comm.all_gather(&mut all, &self.numbers)?;
            let numbers = merge_on_gpu(&merge, &all, comm.size(), self.channels)?;
            return Ok(DeviceMoments { numbers, channels: self.channels });
        }
        comm.all_gather(&mut all, &self.numbers)?;
        let all = all.to_vec::<f64>()?;
        let parts = all.chunks_exact(self.numbers.numel()).map(Moments::of_numbers);
        let nothing =
            Moments { count: 0.0, mean: vec![0.0; self.channels], squares: vec![0.0; self.channels] };
        DeviceMoments::from_host(&parts.fold(nothing, Moments::with), device)
    }

    /// Elements of a channel: [1].
    pub(super) fn count(&self) -> Result<Tensor> {
        Ok(self.numbers.narrow(0, 0, 1)?)
    }

    /// Of each channel: [C].
    pub(super) fn mean(&self) -> Result<Tensor> {
        Ok(self.numbers.narrow(0, 1, self.channels)?)
    }

    fn squares(&self) -> Result<Tensor> {
        Ok(self.numbers.narrow(0, 1 + self.channels, self.channels)?)
    }

    /// The biased variance of each channel, by which a batch is normalised: [C].
    pub(super) fn variance(&self) -> Result<Tensor> {
        Ok(kernels::div(&self.squares()?, &self.count()?)?)
    }

    /// Moves a layer's running statistics towards these, the variance unbiased, and counts a batch.
    pub(super) fn commit(&self, norm: &BatchNorm) -> Result<()> {
        let unbiased = kernels::div(&self.squares()?, &kernels::sub_scalar(&self.count()?, 1.0.into())?)?;
        norm.track(&self.mean()?, &unbiased)?;
        Ok(())
    }
}

const FILES: &[(&str, &str)] = &[PRELUDE, ("moments.cu", include_str!("moments.cu"))];

fn merge_kernel(gpu: &'static Gpu) -> phalanx_tensor::Result<Kernel> {
    let program = Program { name: "moments.cu", files: FILES, defines: &[] };
    gpu.kernel("merge_moments", &program, "merge_moments")
}

/// The moments of `count` parts, which lie one after the other.
fn merge_on_gpu(
    merge: &Kernel,
    parts: &Tensor,
    count: usize,
    channels: usize,
) -> phalanx_tensor::Result<Tensor> {
    let gpu = parts.device().gpu()?;
    let mut merged = Tensor::empty(&[1 + 2 * channels], DType::F64, parts.device())?;
    let args = Args::new("merge_moments", gpu).write(&mut merged)?.read(parts)?;
    let args = args.value(count as u64).value(channels as u64);
    merge.launch(Grid::over(gpu, channels.max(1), 256), args)?;
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_merge_to_the_whole_and_small_deviations_of_large_means_stay() {
        let values: Vec<f64> = (0..12).map(|i| 1e6 + 1e-3 * f64::from(i * i % 7)).collect();
        let of = |values: &[f64]| {
            let x = Tensor::from_slice(values, &[values.len(), 1], Device::CPU).unwrap();
            Moments::of_numbers(&DeviceMoments::of(&x).unwrap().numbers.to_vec().unwrap())
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
