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
//! | expert parallelism | [`expert_parallel::ExpertParallel`], [`expert_parallel::all_to_all`] |
//! | pipelines over ranks | [`pipeline::ranks::Pipeline`], [`pipeline::ranks::Work`], [`pipeline::schedule`] |
//! | a pipeline in one process | [`pipeline::gpipe::GPipe`], [`pipeline::DeferredBatchNorm`] |
//! | all axes at once | [`mesh::Mesh`], [`mesh::Groups`], [`hybrid::Layout`], [`hybrid::MeshParallel`] |
//! | texts by ranks that have a model in parts | [`hybrid::generate_rows`] |
//! | checkpoints | [`checkpoint::Saver`], [`checkpoint::Checkpoint`] |
//! | the last operations of each rank, when a run hangs | [`flight::FlightRecorder`], [`flight::Dumps`] |
//! | comparing ranks and runs bit for bit | [`digest::whole_digests`] |
//! | operations that run beside each other | [`engine::Engine`], [`engine::Op`], [`engine::Variable`], [`engine::scope()`] |
//! | costs and stages of a model | [`planning::balance_by_time`], [`planning::profile()`], [`planning::plan()`], [`planning::Transformer`] |
//!
//! | word | meaning |
//! |---|---|
//! | part | one rank's elements of a tensor, under any layout: [`sharded_tensor::ShardedTensor`] |
//! | shard | a box of a tensor (tensor parallelism, [`nn::Shard`]) or a range of a flat buffer (ZeRO) |
//! | piece | ZeRO: what a rank's shard has of one parameter; checkpoints: a range of a tensor that one rank writes |
//! | chunk | the part of a collective's tensor that belongs to one rank ([`comm::Call`]); a stage, where a rank has several ([`pipeline::ranks::Chunks`]) |
//! | sub-batch | the rows of a batch that one replica computes on; it is split into micro-batches |
//! | cut | to divide into ranges, and the place where one range ends and the next begins |
//! | site | a use of a parameter in a model, with a gradient of its own; a tied table has two, an expert one for each replica whose tokens it takes |
//! | unit | the parameters of a wrapped module, which ZeRO-3 gathers and frees together |
//! | lane | some threads of an engine, with a queue of their own ([`engine::Lane`]) |
//! | replica | a copy of the model, or of its part, that computes on other rows of the batch |
//! | wrapper | [`data_parallel::Ddp`] or [`sharded::Zero`] of a model, or another [`data_parallel::DataParallel`] |
//!
//! Unsafe code is denied but for `comm/wire/mpi.rs` and `comm/nccl/`, which call MPI and NCCL.
#![deny(unsafe_code)]

mod agreement;
mod all_gather;
mod catch_panic;
pub mod checkpoint;
pub mod comm;
pub mod data_parallel;
pub mod digest;
pub mod engine;
mod error;
pub mod expert_parallel;
pub mod flight;
pub mod hybrid;
pub mod launch;
pub mod mesh;
pub mod pipeline;
pub mod planning;
pub mod sharded;
pub mod sharded_tensor;
pub mod tensor_parallel;
mod whole_parameters;

/// The former place of [`planning::Transformer`].
#[deprecated(since = "0.1.0", note = "moved to `planning`")]
pub mod estimate {
    pub use crate::planning::{Degrees as Layout, RecomputeGranularity as Recompute, Transformer};
}

/// The former place of [`sharded_tensor::ShardedTensor`].
#[deprecated(since = "0.1.0", note = "is `sharded_tensor::ShardedTensor`")]
pub mod part {
    pub use crate::sharded_tensor::ShardedTensor as Part;
}

pub use agreement::{Content, Facts, agree, digest_of, same_contents};
#[allow(deprecated)] // the old name stays importable
pub use all_gather::{all_gather_object, tell};
pub use error::{Error, Result};
pub use phalanx_nn as nn;
pub use phalanx_nn::autograd;
pub use phalanx_tensor as tensor;
pub use whole_parameters::WholeParameters;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
