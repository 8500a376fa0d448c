//! The differentiable operations: what each computes, what it saves for backward and why, and its derivative.
//!
//! An operation is a method of [`crate::Var`]. Its backward is written with these operations too, so that it can be
//! differentiated again; where a fused kernel is faster it is used unless a graph of the gradients is asked for.

mod abs;
mod add;
mod broadcast;
mod cat;
mod clamp;
mod compare;
mod cos;
mod cross_entropy;
mod div;
mod elementwise;
mod elu;
mod embedding;
mod erf;
mod exp;
mod exp_m1;
mod flip;
mod gather;
mod gelu;
mod index_select;
mod layer_norm;
mod leaky_relu;
mod linear;
mod linear_map;
mod ln_1p;
mod log;
mod log_softmax;
mod matmul;
mod maximum;
mod mul;
mod neg;
mod one_hot;
mod pad;
mod permute;
mod pow;
mod reciprocal;
mod relu;
mod reshape;
mod rms_norm;
mod roll;
mod rope;
mod rsqrt;
mod scaled_dot_product_attention;
mod sigmoid;
mod silu;
mod sin;
mod softmax;
mod softplus;
mod split;
mod sqrt;
mod square;
mod sub;
mod subset;
mod sum;
mod tanh;
#[cfg(test)]
mod testing;
mod to;
mod to_device;
mod tril;
mod where_;

pub use cross_entropy::{CrossEntropy, Reduction};
pub use rope::Rope;
pub use scaled_dot_product_attention::Attention;
