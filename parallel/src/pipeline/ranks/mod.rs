//! The pipeline over ranks: an executor of schedules.
//!
//! ```text
//!   schedule of rank 1    RECV_F  F  SEND_F   ...   RECV_B  I  SEND_B   ...   W
//!                            |    |    |               |    |    |            |
//!   kept in flight        input   |    |      output's |    | input's         |
//!                            `--> |    |      gradient `--> | gradient        |
//!                            output -->'                    | --'             |
//!                            graph -----------------------> | weights ------> |
//! ```
//! A rank carries out its list of actions in order. For each cell (a micro-batch at a stage) it keeps each tensor until the one
//! action that uses it. So the schedule alone decides how much a rank holds. Of an output that was sent it keeps only the node
//! in the graph.
//!
//! Sends are asynchronous; receives block. Between stages of one rank tensors are passed on without a copy. Each stage adds
//! micro-batches' gradients in ascending order, so every schedule gives the bits of one device.
//!
//! | for | items |
//! |---|---|
//! | running a schedule | [`Pipeline`]; without flushes, where updates are actions, [`AsynchronousPipeline`] |
//! | the computation of the stages, which the caller brings | [`Stages`] as a type, [`StageFn`] as a function of the batch |
//! | dividing a model's blocks among stages | [`split_blocks`]; [`Chunks`] are the stages of one rank |
//! | layers in a row of a program's own, with skips | [`StagedSequence`]; [`SkipRoute`] is a skip between stages |
//! | a table that the first and the last stage share | [`TiedTable`] |
//!
//! Data parallelism over the ranks with the same stages of other pipelines goes around it:
//!
//! ```text
//! replicas.begin()
//! pipeline.train(..)      gradients only accumulate (Stages::no_sync), except in each stage's last B or W, which sends them
//! tied.exchange()         where a table is tied
//! replicas.finish()
//!
//! pipeline ──> executor <──> transfer ──> parts    chunks    tied
//!     └──────────> ├──> versions <──> tied_versions    stages ──> skips <── sequence ──> chunks
//!                  └──> replicas
//! ```

mod chunks;
mod executor;
mod parts;
mod pipeline;
mod replicas;
mod sequence;
mod skips;
mod stages;
mod tied;
mod tied_versions;
mod transfer;
mod versions;

#[expect(deprecated, reason = "the old name of `split_blocks`")]
pub use chunks::place;
pub use chunks::{Chunks, split_blocks};
pub use executor::{Executed, Observer};
pub use pipeline::{AsynchronousPipeline, Pipeline};
pub use sequence::StagedSequence;
pub use skips::SkipRoute;
pub use stages::{Spec, StageArgs, StageFn, Stages, StagesOnBatch};
pub use tied::TiedTable;
pub use versions::Weights;

/// The former name of [`StageArgs`].
#[deprecated(since = "0.1.0", note = "renamed to `StageArgs`")]
pub type Turn<'a, B> = StageArgs<'a, B>;

/// The former name of [`StageFn`].
#[deprecated(since = "0.1.0", note = "renamed to `StageFn`")]
pub type Work<B> = StageFn<B>;

/// The former name of [`StagesOnBatch`].
#[deprecated(since = "0.1.0", note = "renamed to `StagesOnBatch`")]
pub type OnBatch<B> = StagesOnBatch<B>;
