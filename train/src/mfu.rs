//! How fast this machine multiplies matrices, which a run's speed is a share of.

use std::time::{Duration, Instant};

use phalanx_kernels as kernels;
use phalanx_tensor::{Device, Tensor};

use crate::Result;
use crate::place::Place;

/// Rows and columns of the matrices.
const SIZE: usize = 512;
/// How long products are tried.
const TRIED_FOR: Duration = Duration::from_millis(60);

/// Floating-point operations a second of the fastest matrix product, of all ranks together: each tries at the same time. A product of
/// matrices that fit the caches runs near the processor's peak of fused multiply-adds. All ranks call it.
pub(crate) fn peak(place: &Place) -> Result<f64> {
    place.sum(peak_of(place.device)?)
}

fn peak_of(device: Device) -> Result<f64> {
    if !matches!(device, Device::Cpu(_)) {
        return Ok(0.0);
    }
    let values: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 7) as f32).collect();
    let a = Tensor::from_slice(&values, &[SIZE, SIZE], device)?;
    let mut c = kernels::matmul(&a, &a)?;
    let (begin, mut fastest) = (Instant::now(), f64::INFINITY);
    while begin.elapsed() < TRIED_FOR {
        let start = Instant::now();
        kernels::matmul_into(&mut c, &a, &a)?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (SIZE as f64).powi(3) / fastest)
}
