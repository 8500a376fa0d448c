//! Parallel training: engine, communicators, data, tensor and pipeline parallelism.
//!
//! Unsafe code is denied but for `comm/wire/mpi.rs`, which calls MPI.
#![deny(unsafe_code)]

pub mod comm;
pub mod data_parallel;
pub mod engine;
mod error;
pub mod launch;
pub mod mesh;
pub mod sharded;

pub use error::{Error, Result};
