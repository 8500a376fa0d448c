//! [`HostMemory`]: which memory new tensors of CPU devices get. It is a part of the thread's [`Context`](crate::Context), so that kernels
//! and optimizers need no variants for it.

use crate::io::MappedFile;
use crate::{Device, Result};

/// The memory of new tensors on CPU devices.
///
/// ```
/// use phalanx_tensor::{Context, DType, Device, HostMemory, Tensor, io::MappedFile};
/// # fn main() -> phalanx_tensor::Result<()> {
/// let path = std::env::temp_dir().join(format!("phalanx-host-memory-{}", std::process::id()));
/// let file = MappedFile::create(&path)?;
/// let in_file = {
///     let _memory = Context::with(|c| c.host_memory = file.memory());
///     Tensor::zeros(&[1 << 20], DType::F32, Device::Cpu(40))?
/// };
/// let ledger = Device::Cpu(40).ledger()?;
/// assert_eq!((ledger.total().now, ledger.on_disk().now), (0, 4 << 20));
/// drop((in_file, file));
/// assert!(!path.exists());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory(pub(crate) Place);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Place {
    /// Memory that the system may move.
    #[default]
    Pageable,
    /// Memory that this CUDA device reads and writes without the driver's help.
    Pinned(u16),
    /// The mapped file of this number.
    File(u32),
}

impl HostMemory {
    /// Memory for copies to and from a device: pinned, if it is a GPU, so that a copy runs beside the host's work.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn beside(device: Device) -> Result<HostMemory> {
        let Device::Cuda(index) = device else { return Ok(HostMemory::default()) };
        device.gpu().map(|_| HostMemory(Place::Pinned(index)))
    }
}

impl MappedFile {
    /// Memory in this file.
    pub fn memory(&self) -> HostMemory {
        HostMemory(Place::File(self.number()))
    }
}
