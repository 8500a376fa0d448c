//! Parallel training: engine, communicators, data, tensor and pipeline parallelism.
//!
//! A *rank* is one of several workers that train a model together: a thread or a process, with a device of its own.
//!
//! | for | items |
//! |---|---|
//! | making ranks | [`launch::threads`], [`launch::environment`] (under `torchrun`, `mpirun`, `srun`), [`launch::Rank`] |
//! | collectives | [`comm::Communicator`], [`comm::Comm`], [`comm::Reduction`], [`comm::meta()`] which counts bytes only |
//! | data parallelism | [`data_parallel::Ddp`], [`data_parallel::DistributedSampler`], [`data_parallel::SyncBatchNorm`] |
//! | ZeRO, FSDP | [`sharded::Zero`], [`sharded::ZeroConfig`], [`sharded::Stage`] |
//! | tensor and sequence parallelism | [`tensor_parallel::TensorParallel`], [`tensor_parallel::ColumnParallelLinear`], [`tensor_parallel::RowParallelLinear`] |
//! | pipelines over ranks | [`pipeline::ranks::Pipeline`], [`pipeline::ranks::Work`], [`pipeline::schedule`] |
//! | a pipeline in one process | [`pipeline::gpipe::GPipe`], [`pipeline::DeferredBatchNorm`] |
//! | all axes at once | [`mesh::Mesh`], [`mesh::Groups`], [`hybrid::Layout`], [`hybrid::OnMesh`] |
//! | checkpoints | [`checkpoint::Saver`], [`checkpoint::Checkpoint`] |
//! | operations that run beside each other | [`engine::Engine`], [`engine::Op`], [`engine::Variable`] |
//! | costs and cuts of a model | [`planning::balance_by_time`], [`planning::profile()`], [`planning::plan()`], [`planning::Transformer`] |
//!
//! Unsafe code is denied but for `comm/wire/mpi.rs` and `comm/nccl/`, which call MPI and NCCL.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod comm;
pub mod data_parallel;
pub mod engine;
mod error;
pub mod hybrid;
pub mod launch;
pub mod mesh;
mod objects;
mod panics;
pub mod part;
pub mod pipeline;
pub mod planning;
pub mod sharded;
pub mod tensor_parallel;

/// The former place of [`planning::Transformer`].
#[deprecated(since = "0.1.0", note = "moved to `planning`")]
pub mod estimate {
    pub use crate::planning::{Degrees as Layout, RecomputeGranularity as Recompute, Transformer};
}

pub use error::{Error, Result};
#[allow(deprecated)] // the old name stays importable
pub use objects::{all_gather_object, tell};
pub use phalanx_nn as nn;
pub use phalanx_nn::autograd;
pub use phalanx_tensor as tensor;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
