//! What stands for the CUDA libraries where this crate was built without the feature `cuda`.

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

/// Whether `PHALANX_CUDA=emulator` asks for the stand-in libraries: not here.
pub fn emulated() -> bool {
    false
}

/// Nothing is loaded.
///
/// # Errors
/// Always.
pub fn require(_: Library) -> Result<&'static str, String> {
    Err("this program was built without the feature `cuda`".into())
}

/// There is no driver.
///
/// # Errors
/// Always.
pub fn driver_name() -> Result<&'static str, String> {
    require(Library::Driver)
}
