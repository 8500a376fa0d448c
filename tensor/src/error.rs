//! [`Error`]: mistakes of a caller, and failures of a device.

use std::fmt;

use crate::ledger::size;
use crate::{DType, Device};

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a tensor or of an operation on tensors. A message names the operation, what came and what was
/// wanted.
#[derive(Clone, thiserror::Error)]
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
    #[error("{op}: {device} could not allocate {bytes} bytes ({}); in use there: {in_use}", size(*bytes))]
    OutOfMemory {
        /// The operation.
        op: &'static str,
        /// The device.
        device: Device,
        /// The size of the request.
        bytes: usize,
        /// What tensors held there at that moment, by category.
        in_use: String,
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
    /// Values that were on their way into the tensor have not come ([`Tensor::arriving`](crate::Tensor::arriving)).
    #[error("{op}: the tensor's values were on their way and have not come: {why}")]
    NotArrived {
        /// The operation.
        op: &'static str,
        /// Why not.
        why: String,
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

    /// An [`Error::OutOfMemory`], with what the device's ledger says.
    pub fn out_of_memory(op: &'static str, device: Device, bytes: usize) -> Error {
        let in_use = device.opened().map_or_else(|| "unknown".into(), |state| state.ledger.in_use());
        Error::OutOfMemory { op, device, bytes, in_use }
    }

    /// An [`Error::Invalid`].
    pub fn invalid(op: &'static str, why: impl Into<String>) -> Error {
        Error::Invalid { op, why: why.into() }
    }

    /// The error of a GPU. No `From`, which would keep callers' closures from inferring their error type.
    pub(crate) fn of_gpu(error: phalanx_cuda::Error) -> Error {
        use phalanx_cuda::Error as E;
        match error {
            E::Unsupported { index, why } => {
                Error::Unsupported { op: "device", device: Device::Cuda(index), why }
            }
            E::OutOfMemory { op, index, bytes } => Error::out_of_memory(op, Device::Cuda(index), bytes),
            E::Failed { op, index, what } => Error::Gpu { op, device: Device::Cuda(index), what },
            E::Fault { op, item, value, limit } => {
                Error::range(op, format!("index {value} (item {item})"), format!("an index below {limit}"))
            }
            other => Error::invalid("cuda", other.to_string()),
        }
    }

    /// An [`Error::File`].
    pub fn file(path: impl AsRef<std::path::Path>, why: impl std::fmt::Display) -> Error {
        Error::File { path: path.as_ref().display().to_string(), why: why.to_string() }
    }
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Category, Context, DType, Device, Tensor};

    #[test]
    fn debug_prints_the_message() {
        let error = Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap().narrow(0, 1, 2).unwrap_err();
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(format!("Error: {error:?}").starts_with("Error: narrow: "));
    }

    #[test]
    fn out_of_memory_says_what_was_asked_for_and_what_is_in_use() {
        let device = Device::Cpu(903);
        let _parameters = Context::with(|c| c.category = Category::Parameters);
        let _held = Tensor::zeros(&[256], DType::F32, device).unwrap();
        let error = Tensor::empty_for("matmul", &[1 << 58], DType::F32, device).unwrap_err().to_string();
        let wanted = "matmul: cpu:903 could not allocate 1152921504606846976 bytes (1048576.00 TiB); \
                      in use there: parameters 1.00 KiB";
        assert_eq!(error, wanted);
        let error = Tensor::empty(&[1 << 58], DType::F32, Device::Cpu(904)).unwrap_err().to_string();
        assert!(error.starts_with("empty: ") && error.ends_with("in use there: nothing"), "{error}");
    }
}
