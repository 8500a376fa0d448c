//! What a caller can get wrong or a device can refuse.

use crate::{DType, Device};

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a tensor or of an operation on tensors. A message names the operation, what came and what was
/// wanted.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shapes do not fit the operation.
    #[error("{op}: got {got}, wanted {wanted}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The shapes that came.
        got: String,
        /// The shapes that fit.
        wanted: String,
    },
    /// A dimension, index or count is out of range.
    #[error("{op}: {got} is out of range, wanted {wanted}")]
    Range {
        /// The operation.
        op: &'static str,
        /// What came.
        got: String,
        /// The range.
        wanted: String,
    },
    /// A dtype does not fit the operation.
    #[error("{op}: got dtype {got}, wanted {wanted}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The dtype that came.
        got: DType,
        /// The dtypes that fit.
        wanted: String,
    },
    /// The tensors of one operation sit on different devices: a copy is missing.
    #[error("{op}: the tensors are on different devices, {left} and {right}; copy one with `to_device`")]
    Device {
        /// The operation.
        op: &'static str,
        /// One device.
        left: Device,
        /// Another.
        right: Device,
    },
    /// The device holds no elements to read (`meta`), or cannot do this.
    #[error("{op}: not possible on {device}: {why}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The device.
        device: Device,
        /// The reason.
        why: String,
    },
    /// The device has no memory left for this.
    #[error("{op}: {device} could not allocate {bytes} bytes")]
    OutOfMemory {
        /// The operation.
        op: &'static str,
        /// The device.
        device: Device,
        /// The size of the request.
        bytes: usize,
    },
    /// A GPU, its driver or its compiler reported a failure.
    #[error("{op}: {device}: {what}")]
    Gpu {
        /// The operation; of work that runs on its own time, the one that found out.
        op: &'static str,
        /// The device.
        device: Device,
        /// What was reported.
        what: String,
    },
    /// Two operations use one storage at the same time and at least one of them writes.
    #[error("{op}: the tensor's storage is in use by {by}; a write needs it alone")]
    Busy {
        /// The operation.
        op: &'static str,
        /// What holds it.
        by: &'static str,
    },
    /// An argument makes no sense.
    #[error("{op}: {why}")]
    Invalid {
        /// The operation.
        op: &'static str,
        /// What came and what was wanted.
        why: String,
    },
    /// Work done on the caller's behalf panicked.
    #[error("{op}: the work panicked: {message}")]
    Panic {
        /// The operation.
        op: &'static str,
        /// The panic's message.
        message: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// The reason.
        why: String,
    },
}

impl Error {
    /// An [`Error::Shape`].
    pub fn shape(op: &'static str, got: impl Into<String>, wanted: impl Into<String>) -> Error {
        Error::Shape { op, got: got.into(), wanted: wanted.into() }
    }

    /// An [`Error::Range`].
    pub fn range(op: &'static str, got: impl std::fmt::Display, wanted: impl Into<String>) -> Error {
        Error::Range { op, got: got.to_string(), wanted: wanted.into() }
    }

    /// An [`Error::DType`].
    pub fn dtype(op: &'static str, got: DType, wanted: impl Into<String>) -> Error {
        Error::DType { op, got, wanted: wanted.into() }
    }

    /// An [`Error::Invalid`].
    pub fn invalid(op: &'static str, why: impl Into<String>) -> Error {
        Error::Invalid { op, why: why.into() }
    }

    /// An [`Error::File`].
    pub fn file(path: impl AsRef<std::path::Path>, why: impl std::fmt::Display) -> Error {
        Error::File { path: path.as_ref().display().to_string(), why: why.to_string() }
    }
}
