//! Nonlinearities as modules.

use phalanx_autograd::Var;

use crate::{Entry, Module, Parameters, Result};

macro_rules! activations {
    ($($(#[$doc:meta])* $name:ident, |$self:ident, $x:ident| $forward:expr, { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr),* };)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

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
        /// Which of the two.
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
