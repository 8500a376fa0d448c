//! The pipeline over ranks: a small executor of schedules.
//!
//! ```text
//!   schedule of rank 1    RECV_F  F  SEND_F   ...   RECV_B  I  SEND_B   ...   W
//!                            |    |    |               |    |    |            |
//!   what its cell keeps   input   |    |      output's |    | input's         |
//!                            `--> |    |      gradient `--> | gradient        |
//!                            output -->'                    | --'             |
//!                            graph -----------------------> | weights ------> |
//! ```
//! A rank walks down its list of actions. Of each micro-batch at each of its stages it has a cell, in which every thing waits
//! for the one action that uses it; what is used is gone. So a rank holds what its schedule makes it hold, and nothing
//! else: of an output that is sent only its place in the graph stays.
//!
//! Sends are started and go on beside what follows; receives wait. Between stages of one rank tensors are handed over.
//! Each stage adds micro-batches' gradients in ascending order, so every schedule gives the bits of one device.
//!
//! [`Pipeline`] runs a schedule; [`Stages`] is the work, which the caller brings, as a type or as a function of the batch
//! ([`Work`]); [`place`] lays a model's blocks over stages, and [`Chunks`] are those of a rank; [`TiedTable`] is a table that the
//! first stage and the last both have. [`AsynchronousPipeline`] runs schedules without flushes, in which updates are actions.
//!
//! Data parallelism, over the ranks with the same stages of other pipelines, goes around it:
//!
//! ```text
//! share.begin()
//! pipeline.train(..)      gradients only accumulate (Stages::no_sync) but in each stage's last B or W, from where they are sent
//! tied.exchange()         where a table is tied
//! share.finish()
//! ```

mod chunks;
mod executor;
mod pipeline;
mod tied;
mod transfer;
mod versions;
mod work;

pub use chunks::{Chunks, place};
pub use executor::{Executed, Observer};
pub use pipeline::{AsynchronousPipeline, Pipeline};
pub use tied::TiedTable;
pub use versions::Weights;
pub use work::{OnBatch, Spec, Stages, Turn, Work};
