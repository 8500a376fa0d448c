//! Data parallelism: every rank holds the model, each computes on its share of the batch, gradients are added.
//!
//! ```text
//! sampler   which samples of a data set a rank draws
//! buckets   which parameters' gradients travel together, and when
//! ```

mod buckets;
mod sampler;

pub use buckets::{Buckets, GradSize, Launcher};
pub use sampler::{DistributedSampler, Share};
