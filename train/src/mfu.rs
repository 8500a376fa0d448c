//! The peak that a run's speed is a share of: what the machine can compute at most.

use phalanx_kernels::peak_flops;

use crate::place::Place;
use crate::{Config, Result};

/// Floating-point operations a second that all ranks together can do at most in the run's dtype: each measures its own at the same time. On
/// a CPU that is the instruction that products are made of, between registers. All ranks call it.
pub(crate) fn peak(place: &Place, config: &Config) -> Result<f64> {
    // They begin together.
    place.sum(0.0)?;
    place.sum(peak_flops(config.dtype, place.device)?)
}
