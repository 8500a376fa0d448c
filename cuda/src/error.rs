//! What a GPU, its driver or its compiler refuses.

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a GPU. A message names the operation that the caller gave and the logical device.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device cannot be opened.
    #[error("device: not possible on cuda:{index}: {why}")]
    Unsupported {
        /// The device.
        index: u16,
        /// The reason, such as the files that were looked for.
        why: String,
    },
    /// The device, or pinned memory of the host, has no room left.
    #[error("{op}: cuda:{index} could not allocate {bytes} bytes")]
    OutOfMemory {
        /// The operation.
        op: &'static str,
        /// The device.
        index: u16,
        /// The size of the request; 0 where it is not known.
        bytes: usize,
    },
    /// The GPU, its driver or its compiler reported a failure.
    #[error("{op}: cuda:{index}: {what}")]
    Failed {
        /// The operation. Of work that runs asynchronously, the operation that found out.
        op: &'static str,
        /// The device.
        index: u16,
        /// What was reported.
        what: String,
    },
    /// A kernel met an index beyond its limit.
    #[error("{op}: index {value} (item {item}) is out of range, wanted an index below {limit}")]
    Fault {
        /// The operation that launched the kernel.
        op: &'static str,
        /// Which of the kernel's items it was.
        item: i64,
        /// The index.
        value: i64,
        /// The first index that is too large.
        limit: i64,
    },
}
