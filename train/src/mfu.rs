//! The peak that a run's speed is a share of: what the machine can compute at most.

use phalanx_kernels::peak_flops;
use phalanx_tensor::Device;

use crate::inspect::is_one_process;
use crate::place::Place;
use crate::{Config, Result};

/// Floating-point operations a second that all ranks together can do at most in the run's dtype: each measures its own at the same time. On
/// a CPU that is the instruction that products are made of, between registers. Ranks of one process that have more threads than there are cores
/// take turns, and have a share of what they measure each. All ranks call it.
pub(crate) fn peak(place: &Place, config: &Config) -> Result<f64> {
    let one_process = is_one_process(place)?;
    let all = place.sum(peak_flops(config.dtype, place.device)?)?;
    let Device::Cpu(_) = place.device else { return Ok(all) };
    let threads = place.sum(place.device.pool()?.threads() as f64)?;
    let cores = std::thread::available_parallelism().map_or(threads, |cores| cores.get() as f64);
    Ok(if one_process { all * (cores / threads).min(1.0) } else { all })
}
