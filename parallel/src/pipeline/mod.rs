//! Pipelines: models deeper than one device, as one process over several devices ([`gpipe`]) and over ranks ([`ranks`]).
//!
//! ```text
//! schedule ──> ranks        data, and the executor of any schedule, one rank each
//! gpipe                     clock cycles, a thread for each device
//! micro_batch               a micro-batch of a mini-batch, and at a stage: for all of these, and for deferred_batch_norm
//! deferred_batch_norm ──> moments    statistics of a mini-batch, micro-batch by micro-batch, on its device
//! ```

use std::sync::Arc;

pub mod deferred_batch_norm;
pub mod gpipe;
mod micro_batch;
mod moments;
pub mod ranks;
pub mod schedule;

pub use deferred_batch_norm::DeferredBatchNorm;
pub use micro_batch::{Cell, MicroBatch, MicroBatchGuard};

/// A function that is called with each event of a pipeline, on the thread that ended it. It must be quick and not panic.
pub type Observer<E> = Arc<dyn Fn(E) + Send + Sync>;

/// The former place of [`crate::planning`]'s balance.
#[deprecated(since = "0.1.0", note = "moved to `planning`")]
pub mod balance {
    pub use crate::planning::{SizeConfig, balance_by_size, balance_by_time, block_partition};
}

/// The former place of [`crate::planning`]'s partition.
#[deprecated(since = "0.1.0", note = "moved to `planning`")]
pub mod planner {
    pub use crate::planning::{LayerProfile as Layer, Level, Plan, PlannedStage as Stage, plan};
}
