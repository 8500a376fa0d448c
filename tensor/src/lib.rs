//! Storage, layouts, dtypes, devices, streams, memory ledger and random draws.
//!
//! This crate stores and views tensors; it never computes. See [`Tensor`].
//!
//! | for | items |
//! |---|---|
//! | numbers | [`Tensor`], [`DType`], [`Element`], [`Scalar`], [`struct@bf16`], [`struct@f16`] |
//! | views | [`Layout`], [`Index`], [`Dim`], [`broadcast_shapes`] |
//! | devices | [`Device`] (CPUs, CUDA, `meta`), [`Pool`] of threads, [`Stream`], [`Event`] |
//! | memory | [`Ledger`], [`Category`], [`Usage`] |
//! | what holds for a thread | [`Context`]: gradients on or off, training, random key, category |
//! | random numbers | [`RngKey`], whose page says how a draw is made |
//! | files | [`io`]: safetensors, npy, atomic writes |
//! | GPUs | [`cuda`]: libraries, kernels, graphs, numbers that are read late |
//! | elements, for kernels | [`Storage`], [`Read`], [`Write`], [`Loops`] |

mod allocator;
mod bytes;
mod context;
mod copy;
pub mod cuda;
mod device;
mod dim;
mod display;
mod dtype;
mod error;
mod index;
pub mod io;
mod layout;
mod ledger;
mod loops;
mod nest;
mod parts;
mod past;
mod pool;
mod rng;
mod storage;
mod stream;
mod sync;
mod tensor;
mod tiles;

pub use context::{Context, ContextGuard, PassGuard};
pub use device::Device;
pub use dim::{Dim, resolve_dims, resolve_shape};
pub use dtype::{DType, Element, Scalar, Value, bf16, f16};
pub use error::{Error, Result};
pub use index::{Index, Pick};
pub use layout::{Dims, Layout, broadcast_shapes, contiguous_strides};
pub use ledger::{Category, Ledger, ScratchUse, Usage};
pub use loops::Loops;
pub use pool::Pool;
pub use rng::{RngKey, Stream4, Window};
pub use storage::{Read, Storage, Write};
pub use stream::{Event, Stream, record_stream};
pub use tensor::Tensor;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
