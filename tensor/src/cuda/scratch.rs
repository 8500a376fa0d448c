//! [`Scratch`]: memory that kernels use for themselves, between the launches of one operation.

use super::gather::gather_into;
use super::memory::DeviceBlock;
use super::{Args, Gpu};
use crate::{Result, ScratchUse, Tensor};

/// Device memory that is no tensor: the ledger counts it as scratch, so that a `meta` device need not know of it. Freed
/// in the order of the stream, so it may be dropped as soon as the last kernel that uses it was launched.
pub struct Scratch {
    block: DeviceBlock,
    _use: ScratchUse<'static>,
}

impl Scratch {
    /// The elements of a tensor on a GPU in row-major order, for kernels that need them together.
    ///
    /// # Errors
    /// If the device has no more memory, or the tensor more than eight dimensions that do not lie together.
    pub fn of(op: &'static str, tensor: &Tensor) -> Result<Scratch> {
        let scratch = tensor.device().gpu()?.scratch(op, tensor.numel() * tensor.dtype().size())?;
        gather_into(op, &scratch, tensor)?;
        Ok(scratch)
    }
}

impl Gpu {
    /// `bytes` of memory, whatever it holds.
    ///
    /// # Errors
    /// If the device has no more.
    pub fn scratch(&'static self, op: &'static str, bytes: usize) -> Result<Scratch> {
        let block = self.allocate(op, bytes.max(1))?;
        Ok(Scratch { block, _use: self.device().ledger()?.scratch_of(bytes) })
    }
}

impl Args<'_> {
    /// A pointer to scratch memory. The kernel may read and write it.
    pub fn scratch(self, scratch: &Scratch) -> Self {
        self.value(scratch.block.address())
    }
}
