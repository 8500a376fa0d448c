//! The differentiable operations: what each computes, what it saves for backward and why, and its derivative.
//!
//! An operation is a method of [`crate::Var`]. Its backward is written with these operations too, so that it can be
//! differentiated again; where a fused kernel is faster it is used unless a graph of the gradients is asked for.

mod arithmetic;
mod attention;
mod broadcast;
mod channel_norms;
mod classification_losses;
mod conv2d;
mod conv3d;
mod convolution;
mod counting;
mod creation;
mod cumulative;
mod diagonal;
mod dropout;
mod einsum;
mod elementwise;
mod embedding;
mod frame;
mod functions;
mod functions_of_two;
mod gather;
mod image;
mod index;
mod interpolate;
mod layer_norm;
#[cfg(test)]
mod layout_tests;
mod linear;
mod linear_cross_entropy;
mod logic;
mod lstm;
mod margin_losses;
mod matmul;
mod padding;
mod pool;
mod reduce;
mod regression_losses;
mod shape;
mod slicing;
mod softmax;
mod sorting;
#[cfg(test)]
pub(crate) mod testing;
mod to;
mod unary;

pub use arithmetic::Operand;
pub use attention::{Attention, AttentionDropout, Rope, RopeFrequencies};
pub use channel_norms::BatchNorm;
pub use classification_losses::{CrossEntropy, KlReduction, KlTarget, NllLoss, Reduction};
pub use creation::{Generator, MeshIndexing, manual_seed};
pub use embedding::{BagMode, EmbeddingBagOptions};
pub use image::FoldOptions;
pub use interpolate::{Interpolate, InterpolateMode};
pub use linear::linear_weight_grad;
pub use linear_cross_entropy::{linear_grads, linear_loss_grads, logit_rows};
pub use margin_losses::TripletMargin;
pub use padding::PadMode;
pub use pool::{Pool1dOptions, Pool3dOptions};
pub use regression_losses::{GaussianNll, PoissonNll};
