//! Storage, layouts, dtypes, devices, streams, memory ledger and random draws.
//!
//! This crate stores and views tensors; it never computes. See [`Tensor`].

mod allocator;
mod context;
mod copy;
mod device;
mod dim;
mod dtype;
mod error;
mod layout;
mod ledger;
mod pool;
mod rng;
mod storage;
mod tensor;

pub use context::{Context, ContextGuard};
pub use device::Device;
pub use dim::{Dim, resolve_dims, resolve_shape};
pub use dtype::{DType, Element, Scalar, Value, bf16, f16};
pub use error::{Error, Result};
pub use layout::{Dims, Layout, Loops, broadcast_shapes, contiguous_strides};
pub use ledger::{Category, Ledger, ScratchUse, Usage};
pub use pool::Pool;
pub use rng::{RngKey, Stream4, Window};
pub use storage::{Read, Storage, Write};
pub use tensor::Tensor;
