//! Activation functions as modules.

use phalanx_autograd::Var;

use crate::{Entry, GeluKind, Init, Module, Parameter, Parameters, Result, Scope, parameters};

/// A settings' struct; a unit one if there are no settings, so that `Relu` alone is a module.
macro_rules! settings {
    ($(#[$doc:meta])* $name:ident {}) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name;
    };
    ($(#[$doc:meta])* $name:ident { $($fields:tt)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name { $($fields)+ }
    };
}

macro_rules! activations {
    ($($(#[$doc:meta])* $name:ident, |$self:ident, $x:ident| $forward:expr, { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr),* };)*) => {$(
        settings! { $(#[$doc])* $name { $($(#[$field_doc])* pub $field: $type,)* } }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default),* }
            }
        }

        impl Parameters for $name {
            fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
        }

        impl Module for $name {
            fn forward(&$self, $x: &Var) -> Result<Var> {
                Ok($forward?)
            }
        }
    )*};
}

activations! {
    /// `max(x, 0)`
    Relu, |self, x| x.relu(), {};
    /// `x P(X <= x)`, or GPT-2's form of it by tanh.
    Gelu, |self, x| x.gelu(self.kind), {
        /// Exact or by tanh.
        kind: phalanx_kernels::Gelu = phalanx_kernels::Gelu::Exact
    };
    /// `x sigmoid(x)`
    Silu, |self, x| x.silu(), {};
    /// The hyperbolic tangent.
    Tanh, |self, x| x.tanh(), {};
    /// `1 / (1 + e^-x)`
    Sigmoid, |self, x| x.sigmoid(), {};
    /// `ln(1 + e^(beta x)) / beta`
    Softplus, |self, x| x.softplus(self.beta, self.threshold), {
        /// How sharp the bend is.
        beta: f64 = 1.0,
        /// The identity where `beta x` is above it.
        threshold: f64 = 20.0
    };
    /// `x` above 0, `slope x` below.
    LeakyRelu, |self, x| x.leaky_relu(self.slope), {
        /// The slope below 0.
        slope: f64 = 0.01
    };
    /// `x` above 0, `alpha (e^x - 1)` below.
    Elu, |self, x| x.elu(self.alpha), {
        /// The size below 0.
        alpha: f64 = 1.0
    };
    /// `x` kept between two numbers.
    Hardtanh, |self, x| x.hardtanh(self.min, self.max), {
        /// The lower one.
        min: f64 = -1.0,
        /// The upper one.
        max: f64 = 1.0
    };
    /// `x` kept between 0 and 6.
    Relu6, |self, x| x.relu6(), {};
    /// `(x + 3) / 6`, kept between 0 and 1.
    Hardsigmoid, |self, x| x.hardsigmoid(), {};
    /// `x` times [`Hardsigmoid`] of it.
    Hardswish, |self, x| x.hardswish(), {};
    /// `x tanh(ln(1 + e^x))`
    Mish, |self, x| x.mish(), {};
    /// An [`Elu`] scaled so that mean and variance of activations stay where they are.
    Selu, |self, x| x.selu(), {};
    /// `x` above 0, `alpha (e^(x / alpha) - 1)` below.
    Celu, |self, x| x.celu(self.alpha), {
        /// The size below 0.
        alpha: f64 = 1.0
    };
    /// `ln(sigmoid(x))`
    LogSigmoid, |self, x| x.logsigmoid(), {};
    /// `x / (1 + |x|)`
    Softsign, |self, x| x.softsign(), {};
    /// `x - tanh(x)`
    Tanhshrink, |self, x| x.tanhshrink(), {};
    /// One half of a dimension times the sigmoid of the other.
    Glu, |self, x| x.glu(self.dim), {
        /// The dimension, of even size.
        dim: isize = -1
    };
    /// The softmax over a dimension.
    Softmax, |self, x| x.softmax(self.dim), {
        /// The dimension.
        dim: isize = -1
    };
    /// The logarithm of the softmax over a dimension.
    LogSoftmax, |self, x| x.log_softmax(self.dim), {
        /// The dimension.
        dim: isize = -1
    };
    /// Dimensions from `start` to `end` joined.
    Flatten, |self, x| x.flatten(self.start, self.end), {
        /// The first.
        start: isize = 1,
        /// The last.
        end: isize = -1
    };
}

/// `x` above 0, `weight x` elsewhere, the weight being learned: one number, or one a channel (dimension 1).
pub struct Prelu {
    /// `[1]` or `[channels]`.
    pub weight: Parameter,
}

parameters!(Prelu { weight });

/// How a [`Prelu`] is made.
#[derive(Clone, Debug)]
pub struct PreluConfig {
    channels: usize,
    initial: f64,
}

impl Default for PreluConfig {
    /// One weight for all channels.
    fn default() -> PreluConfig {
        PreluConfig::new(1)
    }
}

impl PreluConfig {
    /// One weight a channel, or one for all if this is 1; at first 0.25.
    pub fn new(channels: usize) -> PreluConfig {
        PreluConfig { channels, initial: 0.25 }
    }

    /// With this number in every weight at first.
    #[must_use]
    pub fn with_initial(self, initial: f64) -> PreluConfig {
        PreluConfig { initial, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<Prelu> {
        let weight = scope.parameter("weight", &[self.channels], Init::Constant(self.initial))?;
        Ok(Prelu { weight })
    }
}

impl Module for Prelu {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.prelu(&self.weight.var())?)
    }
}

/// The activation function of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GPT-2's gelu, by tanh.
    GeluTanh,
    /// The exact gelu.
    Gelu,
    /// relu.
    Relu,
    /// silu.
    Silu,
    /// x sigmoid(1.702 x), as CLIP has it.
    QuickGelu,
    /// The square of relu, as Primer and Nemotron have it.
    SquaredRelu,
    /// tanh.
    Tanh,
    /// sigmoid.
    Sigmoid,
    /// relu with a slope of 0.01 below 0.
    LeakyRelu,
    /// relu, 6 at most.
    Relu6,
    /// mish.
    Mish,
    /// hardswish, as MobileNetV3 has it.
    HardSwish,
    /// The exact gelu between -10 and 10.
    ClippedGelu,
    /// x itself.
    Identity,
}

impl Activation {
    pub(crate) fn apply(self, x: &Var) -> Result<Var> {
        Ok(match self {
            Activation::GeluTanh => x.gelu(GeluKind::Tanh),
            Activation::Gelu => x.gelu(GeluKind::Exact),
            Activation::Relu => x.relu(),
            Activation::Silu => x.silu(),
            Activation::QuickGelu => x.mul(&x.mul_scalar(1.702)?.sigmoid()?),
            Activation::SquaredRelu => x.relu()?.square(),
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => x.sigmoid(),
            Activation::LeakyRelu => x.leaky_relu(0.01),
            Activation::Relu6 => x.relu6(),
            Activation::Mish => x.mish(),
            Activation::HardSwish => x.hardswish(),
            Activation::ClippedGelu => x.gelu(GeluKind::Exact)?.hardtanh(-10.0, 10.0),
            Activation::Identity => Ok(x.clone()),
        }?)
    }

    /// Of one value, times another: the inner features of a gated perceptron.
    pub(crate) fn gated(self, gate: &Var, x: &Var) -> Result<Var> {
        match self {
            Activation::Silu => Ok(gate.silu_mul(x)?),
            _ => Ok(self.apply(gate)?.mul(x)?),
        }
    }
}
