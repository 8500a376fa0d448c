//! Dynamic loss scaling, for gradients in f16, whose range is small.

use crate::{Error, Result};

/// Multiplies the loss so that small gradients do not underflow. The factor is halved when gradients overflow, and doubled when they
/// have not overflowed for some steps. It is a power of two, so scaling rounds nothing.
/// Source: Micikevicius et al.: Mixed precision training (2018).
///
/// ```
/// # use phalanx_nn::LossScaler;
/// let mut scaler = LossScaler::default();
/// // scaler.scale() times the loss is run backward; norm is the norm of the scaled gradients.
/// let norm = f64::INFINITY;
/// assert!(!scaler.update(norm.is_finite()), "the step is to be left out");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    scale: f64,
    interval: u64,
    since: u64,
}

impl Default for LossScaler {
    fn default() -> LossScaler {
        LossScaler { scale: 65536.0, interval: 2000, since: 0 }
    }
}

impl LossScaler {
    /// A scaler that begins with `scale` and doubles it after `interval` good steps.
    ///
    /// # Errors
    /// If the factor is not a finite number from 1 up, or there are no steps between two doublings.
    pub fn new(scale: f64, interval: u64) -> Result<LossScaler> {
        if !(scale.is_finite() && scale >= 1.0) {
            return Err(Error::invalid(
                "LossScaler",
                format!("got a factor of {scale}, wanted a finite one of at least 1"),
            ));
        }
        if interval == 0 {
            return Err(Error::invalid("LossScaler", "got an interval of 0 steps, wanted at least 1"));
        }
        Ok(LossScaler { scale, interval, since: 0 })
    }

    /// The factor of the loss now. Its inverse is the optimizer's gradient scale.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Good steps since the factor last changed, to be saved with the factor.
    pub fn steps_since_change(&self) -> u64 {
        self.since
    }

    /// A saved state restored.
    ///
    /// # Errors
    /// Those of [`LossScaler::new`].
    pub fn restored(self, scale: f64, since: u64) -> Result<LossScaler> {
        Ok(LossScaler { since, ..LossScaler::new(scale, self.interval)? })
    }

    /// Updates the factor by whether the step's gradients were finite, and returns whether the update is to be made.
    pub fn update(&mut self, finite: bool) -> bool {
        if !finite {
            (self.scale, self.since) = ((self.scale / 2.0).max(1.0), 0);
            return false;
        }
        self.since += 1;
        if self.since >= self.interval {
            (self.scale, self.since) = (self.scale * 2.0, 0);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_halves_on_overflow_and_doubles_after_the_interval() -> Result<()> {
        let mut scaler = LossScaler::new(8.0, 2)?;
        assert!(!scaler.update(false));
        assert_eq!(scaler.scale(), 4.0);
        assert!(scaler.update(true) && scaler.update(true));
        assert_eq!(scaler.scale(), 8.0);
        let saved = LossScaler::new(1.0, 2)?.restored(scaler.scale(), scaler.steps_since_change())?;
        assert_eq!(saved, scaler);
        Ok(())
    }

    #[test]
    fn a_factor_that_would_leave_out_every_step_is_refused() {
        for (scale, interval) in [(f64::INFINITY, 1), (f64::NAN, 1), (0.0, 1), (-2.0, 1), (8.0, 0)] {
            let refused = LossScaler::new(scale, interval).err().unwrap().to_string();
            assert!(refused.contains("LossScaler: got a"), "{refused}");
        }
    }
}
