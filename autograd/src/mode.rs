//! Whether operations are recorded and layers train: guards over [`Context`]'s `grad` and `train`.

use phalanx_tensor::{Context, ContextGuard};

/// Until the guard is dropped, operations of this thread record no graph. Layers go on as in training: for a model's answers
/// take [`inference`], as dropout and batch norm must know too.
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
    Context::with_grad(false)
}

/// Until the guard is dropped, operations of this thread record the graph, inside [`no_grad`] too.
pub fn enable_grad() -> ContextGuard {
    Context::with_grad(true)
}

/// Evaluation: until the guard is dropped, layers of this thread behave as in evaluation, and gradients are recorded as before.
/// Dropout is the identity, batch norm uses its running statistics and leaves them as they are.
pub fn eval() -> ContextGuard {
    Context::with_train(false)
}

/// Inference: [`eval`] and [`no_grad`] in one guard.
///
/// ```
/// use phalanx_autograd::{Var, inference, tensor::{Device, Tensor}};
/// let x = Var::leaf(Tensor::scalar(2f32, Device::CPU)?)?;
/// {
///     let _inference = inference();
///     let y = x.dropout(0.5, 0, None)?.mul(&x)?;
///     assert_eq!((y.item::<f32>()?, y.requires_grad()), (4.0, false));
/// }
/// assert!(x.mul(&x)?.requires_grad());
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn inference() -> ContextGuard {
    Context::with_inference()
}

/// Whether operations of this thread record the graph.
pub fn is_grad_enabled() -> bool {
    Context::current().grad
}

/// Whether this is the forward pass of a [`checkpoint`](crate::checkpoint()), whose values are not kept.
pub fn is_checkpointing() -> bool {
    Context::current().checkpointing
}

/// Whether this repeats an earlier forward pass: what that has done to the outside (statistics, counters) is not to
/// be done again.
pub fn is_recomputing() -> bool {
    Context::current().recomputing
}
