//! Normalisation over the last dimensions.

use phalanx_autograd::Var;

use crate::error::{at, from_zero};
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// `(x - mean) / sqrt(var + eps) * weight + bias`, mean and variance over the last dimensions.
pub struct LayerNorm {
    /// The normalized shape; absent without affine map.
    pub weight: Option<Parameter>,
    /// The normalized shape; absent without affine map.
    pub bias: Option<Parameter>,
    shape: Vec<usize>,
    eps: f64,
}

parameters!(LayerNorm { weight, bias });

/// How a [`LayerNorm`] is made.
#[derive(Clone, Debug)]
pub struct LayerNormConfig {
    shape: Vec<usize>,
    eps: f64,
    affine: bool,
    bias: bool,
}

impl LayerNormConfig {
    /// Over the last dimensions, of this shape.
    pub fn new(shape: &[usize]) -> LayerNormConfig {
        LayerNormConfig { shape: shape.into(), eps: 1e-5, affine: true, bias: true }
    }

    /// With this added to the variance.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> LayerNormConfig {
        LayerNormConfig { eps, ..self }
    }

    /// With weight and bias or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> LayerNormConfig {
        LayerNormConfig { affine, ..self }
    }

    /// With a bias beside the weight or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> LayerNormConfig {
        LayerNormConfig { bias, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the shape has no dimensions, `eps` is negative or no number, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<LayerNorm> {
        let LayerNormConfig { shape, eps, affine, bias } = self;
        let what = at("LayerNorm", scope.path());
        from_zero(&what, "an eps of", eps)?;
        if shape.is_empty() {
            return Err(Error::invalid(what, "got a shape of no dimensions, wanted those to normalise over"));
        }
        let weight = affine.then(|| scope.parameter("weight", &shape, Init::ONES)).transpose()?;
        let bias = (affine && bias).then(|| scope.parameter("bias", &shape, Init::ZEROS)).transpose()?;
        Ok(LayerNorm { weight, bias, shape, eps })
    }
}

impl LayerNorm {
    /// `x + residual` and its norm, in one pass: the values of the sum and [`Module::forward`] of it.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn add_forward(&self, x: &Var, residual: &Var) -> Result<(Var, Var)> {
        let [weight, bias] = self.affine();
        Ok(x.add_layer_norm(residual, &self.shape, weight.as_ref(), bias.as_ref(), self.eps)?)
    }

    fn affine(&self) -> [Option<Var>; 2] {
        [&self.weight, &self.bias].map(|p| p.as_ref().map(Parameter::var))
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        let [weight, bias] = self.affine();
        Ok(x.layer_norm(&self.shape, weight.as_ref(), bias.as_ref(), self.eps)?)
    }
}
