//! Scaling by the root mean square over the last dimensions.

use phalanx_autograd::Var;

use crate::error::{at, from_zero};
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// `x / sqrt(mean(x²) + eps) * weight`, the mean over the last dimensions.
/// Source: Zhang and Sennrich: Root mean square layer normalization (2019).
pub struct RmsNorm {
    /// The normalized shape; absent without scaling.
    pub weight: Option<Parameter>,
    shape: Vec<usize>,
    eps: f64,
}

parameters!(RmsNorm { weight });

/// How an [`RmsNorm`] is made.
#[derive(Clone, Debug)]
pub struct RmsNormConfig {
    shape: Vec<usize>,
    eps: f64,
    affine: bool,
}

impl RmsNormConfig {
    /// Over the last dimensions, of this shape.
    pub fn new(shape: &[usize]) -> RmsNormConfig {
        RmsNormConfig { shape: shape.into(), eps: 1e-5, affine: true }
    }

    /// With this added to the mean square.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> RmsNormConfig {
        RmsNormConfig { eps, ..self }
    }

    /// With a weight or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> RmsNormConfig {
        RmsNormConfig { affine, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the shape has no dimensions, `eps` is negative or no number, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<RmsNorm> {
        let RmsNormConfig { shape, eps, affine } = self;
        let what = at("RmsNorm", scope.path());
        from_zero(&what, "an eps of", eps)?;
        if shape.is_empty() {
            return Err(Error::invalid(what, "got a shape of no dimensions, wanted those to normalise over"));
        }
        let weight = affine.then(|| scope.parameter("weight", &shape, Init::ONES)).transpose()?;
        Ok(RmsNorm { weight, shape, eps })
    }
}

impl RmsNorm {
    /// `x + residual` and its norm, in one pass: the values of the sum and [`Module::forward`] of it.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn add_forward(&self, x: &Var, residual: &Var) -> Result<(Var, Var)> {
        let weight = self.weight.as_ref().map(Parameter::var);
        Ok(x.add_rms_norm(residual, &self.shape, weight.as_ref(), self.eps)?)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.rms_norm(&self.shape, self.weight.as_ref().map(Parameter::var).as_ref(), self.eps)?)
    }
}
