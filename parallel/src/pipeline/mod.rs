//! Pipelines: models deeper than one device, as one process over several devices ([`gpipe`]) and over ranks ([`ranks`]).

pub mod balance;
pub mod deferred_batch_norm;
pub mod gpipe;
mod micro_batch;
pub mod planner;
pub mod ranks;
pub mod schedule;

pub use deferred_batch_norm::DeferredBatchNorm;
pub use micro_batch::{MicroBatch, MicroBatchGuard};
