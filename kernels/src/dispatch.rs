//! [`Kernels`]: an operation's kernels for a CPU and for a GPU, and the choice between them by the device of its tensors.
//!
//! An operation registers both in one place. Its entry point checks the arguments, allocates the outputs on any device,
//! and runs the kernel of that device:
//!
//! ```text
//! const FORWARD: Kernels<fn(&Tensor, &mut Tensor) -> Result<()>> = Kernels { cpu: forward_on_cpu, cuda: cuda::forward };
//!
//! FORWARD.run(x.device(), |forward| forward(x, &mut y))?;
//! ```
//!
//! Operations of a family (pointwise functions, rows, optimizers) share a frame that is generic in the function; the
//! frame calls [`by_device`] for all of them. [`crate::simd`] picks the CPU's instruction set.

use phalanx_tensor::{DType, Device, Result, Tensor};

/// An operation's kernels, which take the same arguments.
pub(crate) struct Kernels<F> {
    pub(crate) cpu: F,
    pub(crate) cuda: F,
}

impl<F> Kernels<F> {
    /// Calls the device's kernel; on a meta device, which computes nothing, none.
    #[inline(always)]
    pub(crate) fn run(self, device: Device, call: impl FnOnce(F) -> Result<()>) -> Result<()> {
        match device {
            Device::Cpu(_) => call(self.cpu),
            Device::Cuda(_) => call(self.cuda),
            Device::Meta(_) => Ok(()),
        }
    }

    /// The device's kernel, for kernels that make their own results. A meta device has the CPU's, which allocates there what it
    /// allocates on a CPU, and reads no elements.
    #[inline(always)]
    pub(crate) fn on(self, device: Device) -> F {
        if matches!(device, Device::Cuda(_)) { self.cuda } else { self.cpu }
    }
}

/// Whether kernels that join a branch with a residual stream take these dtypes of the two. Only a GPU's cast on the way: from and to 16
/// bits beside f32. Elsewhere casts of their own give the same bits.
pub(crate) fn has_branch_kernel(device: Device, stream: DType, branch: DType) -> bool {
    let narrower = stream == DType::F32 && matches!(branch, DType::BF16 | DType::F16);
    stream == branch || (device.is_cuda() && narrower)
}

/// Computes into `out` by the function for its device. On a meta device the tensor counts as written, and neither runs.
#[inline(always)]
pub(crate) fn by_device(
    out: &mut Tensor,
    cpu: impl FnOnce(&mut Tensor) -> Result<()>,
    cuda: impl FnOnce(&mut Tensor) -> Result<()>,
) -> Result<()> {
    match out.device() {
        Device::Cpu(_) => cpu(out),
        Device::Cuda(_) => cuda(out),
        Device::Meta(_) => {
            out.bump_version();
            Ok(())
        }
    }
}
