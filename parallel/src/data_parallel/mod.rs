//! Data parallelism: every rank holds the model, computes on its sub-batch (its rows of the batch), and adds up the gradients of all ranks.
//!
//! ```text
//! gradients of backward, the last layer's first      b3 b2 │ w3 │ w2 b1 │ w1
//!                                                     ▼      ▼     ▼      ▼
//! buckets: one buffer each, views as gradients       [bucket 0][bucket 1][bucket 2]
//!                                                      │ full     │ full    │ waits for w1
//! started strictly in this order ────────────────►   all-reduce all-reduce          while backward goes on
//!
//! Ddp ──► reducer (gradients that arrived) ──► scheduler (a bucket's work, on an engine) ──► hook (adds over the ranks)
//!  │         ├──► arrivals (when a leaf has all its gradients)
//!  │         └──► buckets (which gradients, which buffer)                    power_sgd: a hook that sends thin factors
//!  ├──► join          ranks with unlike numbers of batches
//!  ├──► consistency   the same model on all ranks, and the one that was wrapped
//!  └──► wrapper       `DataParallel`: what a training loop calls; `Ddp`, `Zero` and a single device implement it
//! sampler: the samples that a rank draws    sync_batch_norm ──► moments: batch statistics of all ranks, on their device
//! ```

mod arrivals;
mod buckets;
mod config;
pub(crate) mod consistency;
mod ddp;
mod hook;
mod join;
mod moments;
mod power_sgd;
mod reducer;
mod sampler;
mod scheduler;
mod sync_batch_norm;
mod wrapper;

pub use buckets::{BucketTracker, Buckets, GradSize};
pub use config::{Average, DdpConfig};
pub use ddp::Ddp;
pub use hook::{AllReduce, Bucket, BucketHook, Compress, PendingBucket};
pub use join::{Divisor, JoinConfig};
pub use power_sgd::{PowerSgd, PowerSgdConfig};
pub use sampler::{DistributedSampler, SampleSplit};
pub use sync_batch_norm::SyncBatchNorm;
pub(crate) use wrapper::Synchronise;
pub use wrapper::{DataParallel, Entries, Gathered, NoSync, SingleDevice};

/// The former name of [`SingleDevice`].
#[deprecated(since = "0.1.0", note = "renamed to `SingleDevice`")]
pub type Alone = SingleDevice;

/// The former name of [`SampleSplit`].
#[deprecated(since = "0.1.0", note = "renamed to `SampleSplit`")]
pub type Share = SampleSplit;

/// The former name of [`JoinConfig`].
#[deprecated(since = "0.1.0", note = "renamed to `JoinConfig`")]
pub type Uneven = JoinConfig;

/// The former name of [`BucketTracker`].
#[deprecated(since = "0.1.0", note = "renamed to `BucketTracker`")]
pub type Launcher = BucketTracker;

/// The former name of [`PendingBucket`].
#[deprecated(since = "0.1.0", note = "renamed to `PendingBucket`")]
pub type Rest = PendingBucket;
