//! [`DdpConfig`]: the settings of a [`Ddp`](super::Ddp): the sizes of buckets, sum or mean, the hook that adds a bucket.

use std::sync::Arc;

use phalanx_tensor::DType;

use super::Buckets;
use super::hook::{AllReduce, BucketHook};
use crate::engine::Engine;

/// How the ranks' gradients are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Average {
    /// Their sum.
    #[default]
    Sum,
    /// Their mean: each is divided by the number of ranks, then they are added (PyTorch's).
    Mean,
}

/// The settings of a [`Ddp`](super::Ddp).
#[derive(Clone, Debug)]
pub struct DdpConfig {
    /// The first bucket's size in bytes.
    pub first_bucket_bytes: usize,
    /// A later bucket's.
    pub bucket_bytes: usize,
    /// Sum or mean.
    pub average: Average,
    /// Whether parameters may get no gradient. Those that got one on another rank count as zero here; those that got
    /// none anywhere keep none. Without it, a missing gradient is an error. [`Ddp::backward`](super::Ddp::backward) finds
    /// them in the graph of the loss before backward begins, so that no bucket waits for them.
    pub find_unused: bool,
    /// Whether every pass gives each parameter as many gradients as the first one (torch's `static_graph`). The first pass
    /// finds out how many, none included, and starts its buckets at its end. Later ones need no `find_unused`, nor the
    /// exchange that this costs, and a parameter may get several gradients between [`begin`](super::Ddp::begin) and
    /// [`finish`](super::Ddp::finish). A pass that differs is an error that names the parameter.
    pub static_graph: bool,
    /// The gradients' dtype; `None`: each parameter's own.
    pub grad_dtype: Option<DType>,
    /// How a bucket is added over the ranks.
    pub hook: Arc<dyn BucketHook>,
    /// Whether all ranks take rank 0's buffers (running statistics) at the end of each pass that synchronises, so that
    /// the next forward pass, an evaluation or a checkpoint finds the same ones everywhere.
    pub broadcast_buffers: bool,
    /// The engine that runs the buckets' work. `None`: the thread that runs backward starts a bucket, the communicator carries
    /// it out at the same time, and the rest of a hook's work is done at the end. With an engine of this rank's own, with a
    /// [priority lane](crate::engine::Lane::Priority), all of a bucket's work is an operation there: better where hooks
    /// compute much and there is a core for them. Nothing else may then use the communicator during a pass.
    pub engine: Option<Arc<Engine>>,
}

impl Default for DdpConfig {
    fn default() -> DdpConfig {
        DdpConfig {
            first_bucket_bytes: Buckets::FIRST_BYTES,
            bucket_bytes: Buckets::BYTES,
            average: Average::Sum,
            find_unused: false,
            static_graph: false,
            grad_dtype: None,
            hook: Arc::new(AllReduce),
            broadcast_buffers: true,
            engine: None,
        }
    }
}

impl DdpConfig {
    /// The settings that must be equal on all ranks, as text.
    pub(super) fn shared_settings(&self) -> String {
        let DdpConfig { first_bucket_bytes, bucket_bytes, average, find_unused, static_graph, .. } = self;
        let buckets = [first_bucket_bytes, bucket_bytes];
        let rest = (find_unused, static_graph, self.grad_dtype, &self.hook, self.broadcast_buffers);
        format!(
            "Ddp, {average:?}, buckets {buckets:?}, find_unused, static_graph, grad_dtype, hook, broadcast_buffers {rest:?}"
        )
    }
}
