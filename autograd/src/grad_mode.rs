//! Whether operations are recorded: guards over [`Context`]'s `grad`.

use phalanx_tensor::{Context, ContextGuard};

/// Until the guard is dropped, operations of this thread record no graph.
///
/// ```
/// use phalanx_autograd::{Var, no_grad, tensor::{Device, Tensor}};
/// let x = Var::leaf(Tensor::scalar(2f32, Device::CPU)?)?;
/// let guard = no_grad();
/// assert!(!x.mul(&x)?.requires_grad());
/// drop(guard);
/// assert!(x.mul(&x)?.requires_grad());
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn no_grad() -> ContextGuard {
    Context::with(|c| c.grad = false)
}

/// Until the guard is dropped, operations of this thread record the graph, inside [`no_grad`] too.
pub fn enable_grad() -> ContextGuard {
    Context::with(|c| c.grad = true)
}

/// Whether operations of this thread record the graph.
pub fn is_grad_enabled() -> bool {
    Context::current().grad
}
