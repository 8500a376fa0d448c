//! Pipelines: models deeper than one device, as one process over several devices ([`gpipe`]) and over ranks ([`ranks`]).

pub mod gpipe;
mod micro_batch;
pub mod ranks;
pub mod schedule;

pub use micro_batch::{MicroBatch, MicroBatchGuard};
