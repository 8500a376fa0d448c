//! [`Linear`]: an affine map.

use phalanx_autograd::Var;

use crate::{Init, Module, Parameter, Result, Scope, parameters};

/// `x Wᵀ + b`, for `x` of shape `[.., in]` and `W` `[out, in]`.
pub struct Linear {
    /// `[out, in]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
}

parameters!(Linear { weight, bias });

/// How a [`Linear`] is made.
#[derive(Clone, Copy, Debug)]
pub struct LinearConfig {
    inputs: usize,
    outputs: usize,
    bias: bool,
    init: Option<Init>,
}

impl LinearConfig {
    /// From `inputs` features to `outputs`, with a bias.
    pub fn new(inputs: usize, outputs: usize) -> LinearConfig {
        LinearConfig { inputs, outputs, bias: true, init: None }
    }

    /// With a bias or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> LinearConfig {
        LinearConfig { bias, ..self }
    }

    /// With these initial weights, and a bias of 0. Otherwise both are uniform within `1 / sqrt(in)`.
    #[must_use]
    pub fn with_init(self, init: Init) -> LinearConfig {
        LinearConfig { init: Some(init), ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<Linear> {
        let LinearConfig { inputs, outputs, bias, init } = self;
        let weights = init.unwrap_or(Init::layer(inputs));
        let biases = init.map_or(Init::layer(inputs), |_| Init::ZEROS);
        let weight = scope.parameter("weight", &[outputs, inputs], weights)?.as_weight();
        let bias = bias.then(|| scope.parameter("bias", &[outputs], biases)).transpose()?;
        Ok(Linear { weight, bias })
    }
}

impl Module for Linear {
    fn forward(&self, x: &Var) -> Result<Var> {
        let bias = self.bias.as_ref().map(Parameter::var);
        Ok(x.linear(&self.weight.var(), bias.as_ref())?)
    }
}
