//! The vendor's libraries, and what calls of the driver return: [`Library`], [`DeviceProperties`], [`Failure`]. They are
//! the same with and without the feature `cuda`.

/// A library that CUDA programs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: devices, memory, launches. It comes with the GPU's driver.
    Driver,
    /// `libnvrtc`: the compiler of kernels.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libnccl`: communication between GPUs.
    Nccl,
}

/// The version of a library: major, minor and patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u32; 3]);

impl Version {
    /// `major.minor`.
    pub fn short(self) -> String {
        format!("{}.{}", self.0[0], self.0[1])
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.0;
        match patch {
            0 => write!(f, "{major}.{minor}"),
            _ => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

/// The properties of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct DeviceProperties {
    pub(crate) name: String,
    /// The compute capability: major and minor.
    pub(crate) capability: (u32, u32),
    /// Streaming multiprocessors.
    pub(crate) processors: u32,
    /// Shared memory that a block may ask for, in bytes.
    pub(crate) shared_bytes_max: u32,
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;

/// A failed call: the driver's code and text.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u32,
    pub(crate) text: String,
}

impl Failure {
    /// The device has no memory left.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    /// Of an event: its work has not run yet.
    pub(crate) fn is_not_ready(&self) -> bool {
        self.code == NOT_READY
    }
}

/// The result of a call of the driver.
pub(crate) type Called<T = ()> = Result<T, Failure>;
