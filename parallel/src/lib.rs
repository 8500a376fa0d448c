//! Parallel training: engine, communicators, data, tensor and pipeline parallelism.
//!
//! Unsafe code is denied but for `comm/wire/mpi.rs` and `comm/nccl/`, which call MPI and NCCL.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod comm;
pub mod data_parallel;
pub mod engine;
mod error;
pub mod estimate;
pub mod hybrid;
pub mod launch;
pub mod mesh;
pub mod part;
pub mod pipeline;
pub mod sharded;
mod sums;
mod tell;
pub mod tensor_parallel;

pub use error::{Error, Result};
pub use phalanx_nn as nn;
pub use phalanx_nn::autograd;
pub use phalanx_tensor as tensor;
pub use tell::tell;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
