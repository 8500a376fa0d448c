//! Data parallelism: every rank holds the model, each computes on its share of the batch, gradients are added.
//!
//! ```text
//! wrapper   what a training loop needs of any of the ways to train over ranks
//! sampler   which samples of a data set a rank draws
//! buckets   which parameters' gradients travel together, and when
//! ddp       the wrapper around a model     reducer   what has come to the buckets, and when they go
//! join      ranks that run out of batches  store     their buffers
//! hook      how a bucket is added          courier   a bucket's work as an operation of an engine
//! no_sync   passes that only accumulate
//! same      whether all hold one model     carry     gradients that an earlier pass has left
//! hands     what others may do with a model that is wrapped, and whether it is still what it was
//! power_sgd           buckets in few numbers, what they leave out added to the next
//! sync_batch_norm     normalisation over the batch of all ranks
//! ```

mod buckets;
mod carry;
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
pub use wrapper::NoSync;
pub(crate) use wrapper::Synchronise;
pub use wrapper::{Alone, DataParallel, Entries, Gathered};
