//! The kernels: all code that reads or computes the elements of tensors, forward and backward.
//!
//! Kernels keep no state and know no graph. One that writes takes its destination as `&mut`, bumps its version and
//! says so in its name. See [`ops`].
//!
//! | for | items |
//! |---|---|
//! | products | [`matmul`], [`linear`], [`conv2d`], [`conv3d`], [`scaled_dot_product_attention`] |
//! | elements | [`add`], [`mul`], [`exp`], [`gelu`], [`where_`], [`cast`], .. |
//! | along dimensions | [`sum`], [`mean`], [`softmax`], [`logsumexp`], [`sort`], [`topk`], [`cumsum`], .. |
//! | norms and losses | [`layer_norm`], [`rms_norm`], [`batch_norm`], [`cross_entropy`], [`nll_loss`] |
//! | by index | [`index_select`], [`gather`], [`scatter_add`], [`cat`], [`pad`] |
//! | ranks | [`combine`]: the arithmetic of an all-reduce |
//! | optimizers, draws | [`ops::optim`], [`ops::random`] |
//! | speed | [`flops()`] counts the arithmetic of a thread, [`peak_flops`], [`sustained_flops`] and [`peak_bandwidth`] measure a device |
//! | the processor | [`isa`] tells the instruction set in use, [`available_isas`] what there is |
//! | GPUs | [`cuda`] |

mod block_reader;
mod check;
mod classes;
pub mod combine;
pub mod cuda;
mod data_movement;
mod dispatch;
mod flops;
mod gemm;
pub mod ops;
mod pointwise;
mod real;
mod reduce;
mod rows;
mod scratch;
mod simd;
#[cfg(test)]
mod testing;

pub use classes::Reduction;
pub use flops::flops;
pub use gemm::{peak_bandwidth, peak_flops, sustained_flops};
pub use ops::*;
pub use simd::{IsaName, available_isas, checked_isa, isa};

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
