//! Storage, layouts, dtypes, devices, streams, memory ledger and random draws.
//!
//! This crate stores and views tensors; it never computes. See [`Tensor`].
//!
//! | for | items |
//! |---|---|
//! | numbers | [`Tensor`], [`DType`], [`Element`], [`Scalar`], [`struct@bf16`], [`struct@f16`] |
//! | views | [`Layout`], [`Index`], [`Dim`], [`broadcast_shapes`] |
//! | devices | [`Device`] (CPUs, CUDA, `meta`), [`Pool`] of threads, [`Stream`], [`Event`] |
//! | memory | [`Ledger`], [`Category`], [`Usage`]; [`HostMemory`]: pinned, or in a file |
//! | state of a thread | [`Context`]: random key, ledger category, mode bits of the crates above |
//! | random numbers | [`RngKey`], whose page says how a draw is made |
//! | files | [`io`]: safetensors, npy, atomic writes |
//! | GPUs | [`cuda`]: libraries, kernels, graphs, numbers that are read late |
//! | elements, for kernels | [`Storage`], [`Read`], [`Write`], [`Loops`] |
//! | values that are on their way into a tensor | [`Tensor::arriving`], [`delivering`] |
//! | which tensors code reads and writes | [`watch_guards`] |

mod allocator;
mod context;
mod copy;
pub mod cuda;
mod device;
mod dtype;
mod error;
mod even_piece;
mod host_memory;
pub mod io;
mod layout;
mod ledger;
#[cfg(all(test, feature = "loom"))]
mod loom_models;
mod pool;
mod resources;
mod rng;
mod storage;
mod stream;
mod streaming;
mod sync;
mod tensor;
mod tiles;
mod transfer;
mod watch;

pub use context::{Context, ContextGuard, PassGuard};
pub use device::Device;
pub use dtype::{DType, Element, Scalar, Value, bf16, f16};
pub use error::{Error, Result};
pub use host_memory::HostMemory;
pub use layout::{Dims, Layout, Loops, broadcast_shapes, contiguous_strides};
pub use ledger::{Category, Ledger, ScratchUse, Usage};
pub use pool::Pool;
pub use rng::{PhiloxStream, RngKey, Window};

#[allow(missing_docs)]
#[deprecated(since = "0.1.0", note = "renamed to `PhiloxStream`")]
pub type Stream4 = PhiloxStream;
#[doc(hidden)] // for Phalanx's other crates
pub use even_piece::even_piece;
pub use storage::{Delivering, Read, Storage, Write, delivering};
pub use stream::{Event, Stream, StreamGuard, adopt, record_stream, record_use};
#[doc(hidden)] // for Phalanx's other crates
#[doc(hidden)]
pub use sync::{lock, panic_message, unpoisoned};
pub use tensor::{Dim, Index, Pick, Tensor, resolve_dims, resolve_shape};
pub use transfer::{CopyStream, PendingCopy};
pub use watch::{GuardAccess, GuardWatch, WatchedGuards, watch_guards};

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
