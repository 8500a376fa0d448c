//! Random zeroing of activations in training.

use phalanx_autograd::Var;
use phalanx_tensor::{Context, Window};

use crate::{Entry, Error, Module, Parameters, Result, Scope};

/// In training, each element is 0 with probability `p`, else multiplied by `1 / (1 - p)`; the identity otherwise.
///
/// The draw is a function of the run's seed, the step, this module's path and the element's place in the global
/// batch ([`Context::rng`], [`Context::batch_offset`]), so a recomputation or another layout repeats it.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    p: f64,
    site: u64,
}

impl Dropout {
    /// A dropout at this place.
    ///
    /// # Errors
    /// If `p` is no probability.
    pub fn new(p: f64, scope: &Scope) -> Result<Dropout> {
        if !(0.0..=1.0).contains(&p) {
            let why = format!("got a dropout of {p}, wanted a probability");
            return Err(Error::invalid(scope.path(), why));
        }
        Ok(Dropout { p, site: scope.site() })
    }

    /// Whether it changes anything now.
    pub fn is_active(&self) -> bool {
        self.p > 0.0 && Context::current().train
    }

    /// The output, of activations that lie at `window` in the global ones.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn forward_in(&self, x: &Var, window: &Window) -> Result<Var> {
        Ok(x.dropout(self.p, self.site, Some(window))?)
    }
}

impl Parameters for Dropout {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl Module for Dropout {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.dropout(self.p, self.site, None)?)
    }
}
