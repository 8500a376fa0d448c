//! Data parallelism: every rank holds the model, computes on its share of the batch, and adds up the gradients of all ranks.
//!
//! ```text
//! gradients of backward, the last layer's first      b3 b2 │ w3 │ w2 b1 │ w1
//!                                                     ▼      ▼     ▼      ▼
//! buckets: one buffer each, views as gradients       [bucket 0][bucket 1][bucket 2]
//!                                                      │ full     │ full    │ waits for w1
//! started strictly in this order ────────────────►   all-reduce all-reduce          while backward goes on
//!
//! Ddp ──► reducer (gradients that arrived) ──► scheduler (a bucket's work, on an engine) ──► hook (adds over the ranks)
//!  │         └──► buckets (which gradients, which buffer)                    power_sgd: a hook that sends thin factors
//!  ├──► join          ranks with unlike numbers of batches
//!  ├──► consistency   the same model on all ranks, and the one that was wrapped
//!  └──► wrapper       `DataParallel`: what a training loop calls; `Ddp`, `Zero` and a single device implement it
//! sampler: the samples that a rank draws              sync_batch_norm: batch statistics of all ranks
//! ```

mod buckets;
mod config;
pub(crate) mod consistency;
mod ddp;
mod hook;
mod join;
mod power_sgd;
mod reducer;
mod sampler;
mod scheduler;
mod sync_batch_norm;
mod wrapper;

pub use buckets::{Buckets, GradSize, Launcher};
pub use config::{Average, DdpConfig};
pub use ddp::Ddp;
pub use hook::{AllReduce, Bucket, BucketHook, Compress, Rest};
pub use join::{Divisor, Uneven};
pub use power_sgd::{PowerSgd, PowerSgdConfig};
pub use sampler::{DistributedSampler, Share};
pub(crate) use sync_batch_norm::Moments;
pub use sync_batch_norm::SyncBatchNorm;
pub(crate) use wrapper::Synchronise;
pub use wrapper::{Alone, DataParallel, Entries, Gathered, NoSync};
