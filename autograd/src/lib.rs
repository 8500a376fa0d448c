//! The graph: variables, nodes, the backward engine, hooks and recomputation.
//!
//! A [`Var`] is a tensor that may know how it was made. There is no tape: each result points at the node of the
//! operation that made it, a node points at the nodes of its inputs, and a node is freed with the last value that needs it.
//!
//! ```text
//!      values                          graph                       backward
//!
//!      w        x                  leaf w   leaf x              w.grad    x.grad
//!       \      /                        \   /                       ^    ^
//!        y = w x                         mul  (saves w, x)     dy x  \  /  dy w
//!           |                             |                           mul
//!      l = sum(y)                        sum  (saves the shape)        ^  dy = dl, repeated
//!                                         ^                           sum
//!                                         l                            ^  dl = 1
//! ```
//!
//! ```
//! use phalanx_autograd::{Var, tensor::{Device, Tensor}};
//! let w = Var::leaf(Tensor::from_slice(&[2f32, 3.], &[2], Device::CPU)?)?;
//! let x = Var::from_slice(&[5f32, 7.], &[2], Device::CPU)?;
//! let loss = w.mul(&x)?.sum_all()?;
//! loss.backward()?;
//! assert_eq!(w.grad().unwrap().to_vec::<f32>()?, [5., 7.]);
//! # Ok::<(), phalanx_autograd::Error>(())
//! ```
//!
//! What holds:
//! - A backward pass runs nodes in reverse order of recording. The gradients of one value are summed in that order, so
//!   the bits depend on the graph alone: not on threads, devices, recomputation, or whether the pass is split in two.
//! - A node's saved values are freed when it has run, unless the graph is retained. No chain of operations is too long
//!   for the stack, in backward or when it is dropped.
//! - A leaf is saved by its handle, everything else by its tensor and version: a value modified in place after it was
//!   saved is an error that names it. Results of norms, gelu and silu are not saved: backward computes them again
//!   ([`Rematerialized`]).
//! - Backward functions are made of differentiable operations, so derivatives have derivatives
//!   ([`Options::create_graph`]).
//! - A panic in a backward function or hook is an error of the pass.
//!
//! | for | items |
//! |---|---|
//! | values and operations | [`Var`], whose methods are all operations; [`ops`] lists them by name |
//! | passes | [`Var::backward`], [`backward()`], [`grad()`], [`backward_inputs`], [`Options`] |
//! | derivatives of functions | [`vjp`], [`jvp`], [`jacobian`], [`hvp`], [`hessian`] |
//! | guards | [`no_grad`], [`inference`], [`eval`], [`enable_grad`], [`ContextMode`], [`detect_anomaly`] |
//! | operations of your own | [`Function`], [`record()`], [`Backward`], [`gradcheck()`] |
//! | where gradients go | [`Leaf`], [`Slot`], [`HookHandle`] |
//! | saved values | [`SavedVariable`], [`saved_hooks`], [`save_on_cpu`], [`Rematerialized`] |
//! | constants in 8 bits | [`Int8Blocks`] |
//! | recomputation | [`checkpoint()`], [`Recompute`] |
//! | order between parts of the graph | [`fork`], [`join`] |
//! | draws | [`manual_seed`], [`Generator`] |
//! | where the time goes | [`Profiler`] |
#![forbid(unsafe_code)]

mod anomaly;
mod backward;
mod checkpoint;
mod dependency;
mod engine;
mod error;
mod function;
mod functional;
mod gradcheck;
mod graph;
mod int8_blocks;
mod leaf;
mod mode;
pub mod ops;
mod profile;
mod record;
mod var;

pub use anomaly::{AnomalyGuard, detect_anomaly, is_detecting_anomaly};
pub use backward::{Backward, Cx, grads1, grads2};
pub use checkpoint::{HearingGuard, Recompute, checkpoint, checkpoint_apart, hear_recomputations, repeated};
pub use dependency::{fork, join, phony};
pub use engine::{Options, WeightWork, backward, backward_inputs, grad};
pub use error::{Error, Result};
pub use function::{Function, Outputs};
pub use functional::{hessian, hvp, jacobian, jvp, vjp};
pub use gradcheck::{GradCheck, gradcheck, gradgradcheck};
pub use graph::hooks::HookHandle;
pub use graph::node::Grads;
pub use graph::rematerialized::Rematerialized;
pub use graph::save_on_cpu::{SaveOnCpu, save_on_cpu};
pub use graph::saved_variable::{SavedHooks, SavedHooksGuard, SavedVariable, saved_hooks};
pub use int8_blocks::Int8Blocks;
pub use leaf::{Leaf, Slot, Stash};
pub use mode::{
    ContextMode, enable_grad, eval, inference, is_checkpointing, is_grad_enabled, is_recomputing, no_grad,
    with_grad, with_train,
};
pub use ops::*;
pub use phalanx_kernels as kernels;
pub use phalanx_kernels::{Conv1dOptions, ConvOptions, Gelu, PoolOptions};
pub use phalanx_tensor as tensor;
pub use profile::{OperationTime, Pass, Profiler, begins, waiting};
pub use record::{SaveContext, is_recording, record, record_many, record_none};
pub use var::Var;

/// [`Rematerialized`] by its earlier name.
#[deprecated(since = "0.1.0", note = "renamed to `Rematerialized`")]
pub type Remade = Rematerialized;

/// [`SavedVariable`] by its earlier name.
#[deprecated(since = "0.1.0", note = "renamed to `SavedVariable`")]
pub type Saved = SavedVariable;

/// [`SaveContext`] by its earlier name.
#[deprecated(since = "0.1.0", note = "renamed to `SaveContext`")]
pub type Saver<'a> = SaveContext<'a>;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
