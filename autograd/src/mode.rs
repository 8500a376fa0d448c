//! The modes of a thread: whether operations are recorded, layers train, and a checkpoint runs or is recomputed.

use phalanx_kernels::AttentionDropout;
use phalanx_tensor::{Context, ContextGuard, Device};

// Autograd's bits of `Context::flags`. A thread starts with none of them.
const NO_GRAD: u32 = 1 << 1;
const EVALUATION: u32 = AttentionDropout::OFF;
const CHECKPOINTING: u32 = 1 << 2;
const RECOMPUTING: u32 = 1 << 3;
const REMATERIALIZE: u32 = 1 << 4;
const KEEP_RESULTS: u32 = 1 << 5;

/// Until the guard is dropped, operations of this thread record no graph. Dropout and batch norm are not affected, as
/// by PyTorch's `no_grad`; for inference use [`inference`], which is [`eval`] and `no_grad` together.
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
    with_grad(false)
}

/// Until the guard is dropped, operations of this thread record the graph, inside [`no_grad`] too.
pub fn enable_grad() -> ContextGuard {
    with_grad(true)
}

/// Evaluation: until the guard is dropped, layers of this thread behave as in evaluation, and gradients are recorded as
/// before. Dropout is the identity, batch norm uses its running statistics and leaves them as they are.
pub fn eval() -> ContextGuard {
    with_train(false)
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
    Context::with_flags(NO_GRAD | EVALUATION, NO_GRAD | EVALUATION)
}

/// Until the guard is dropped, operations record the graph or do not, whatever was set before.
pub fn with_grad(on: bool) -> ContextGuard {
    Context::with_flags(NO_GRAD, if on { 0 } else { NO_GRAD })
}

/// Until the guard is dropped, layers behave as in training or as in evaluation, whatever was set before.
pub fn with_train(on: bool) -> ContextGuard {
    Context::with_flags(EVALUATION, if on { 0 } else { EVALUATION })
}

/// Whether operations of this thread record the graph.
pub fn is_grad_enabled() -> bool {
    Context::current().grad()
}

/// Whether this is the forward pass of a [`checkpoint`](crate::checkpoint()), whose values are not kept.
pub fn is_checkpointing() -> bool {
    Context::current().checkpointing()
}

/// Whether this is the second forward pass of a checkpoint. Side effects (running statistics, counters) must be skipped
/// in it.
pub fn is_recomputing() -> bool {
    Context::current().recomputing()
}

/// Autograd's modes in a thread's [`Context`]. They travel with it to threads that work for this one, and
/// [`Context::with`] undoes each alone.
///
/// ```
/// use phalanx_autograd::{ContextMode, tensor::Context};
/// let guard = Context::with(|c| c.set_train(false));
/// assert!(!Context::current().train() && Context::current().grad());
/// drop(guard);
/// assert!(Context::current().train());
/// ```
pub trait ContextMode {
    /// Whether operations record the graph.
    fn grad(&self) -> bool;
    /// Whether layers such as dropout and batch norm behave as in training.
    fn train(&self) -> bool;
    /// Inside the forward pass of a checkpoint, whose graph is not kept.
    fn checkpointing(&self) -> bool;
    /// Inside a forward pass that repeats an earlier one for the sake of its saved values.
    fn recomputing(&self) -> bool;
    /// Whether results of norms and activations on that device are computed again in backward instead of being saved for the operations
    /// behind them. Unless set: yes, except on GPUs, which have the memory and lack the time.
    fn rematerializes(&self, device: Device) -> bool;
    /// Sets [`ContextMode::rematerializes`] for all devices; `None` undoes it. With `Some(false)` a meta device counts what a GPU keeps.
    fn set_rematerialize(&mut self, on: Option<bool>);
    /// Sets [`ContextMode::grad`].
    fn set_grad(&mut self, on: bool);
    /// Sets [`ContextMode::train`].
    fn set_train(&mut self, on: bool);
    /// Sets [`ContextMode::checkpointing`].
    fn set_checkpointing(&mut self, on: bool);
    /// Sets [`ContextMode::recomputing`].
    fn set_recomputing(&mut self, on: bool);
}

impl ContextMode for Context {
    fn grad(&self) -> bool {
        self.flags & NO_GRAD == 0
    }

    fn train(&self) -> bool {
        self.flags & EVALUATION == 0
    }

    fn checkpointing(&self) -> bool {
        self.flags & CHECKPOINTING != 0
    }

    fn recomputing(&self) -> bool {
        self.flags & RECOMPUTING != 0
    }

    fn rematerializes(&self, device: Device) -> bool {
        match self.flags & (REMATERIALIZE | KEEP_RESULTS) {
            0 => !device.is_cuda(),
            flags => flags & REMATERIALIZE != 0,
        }
    }

    fn set_rematerialize(&mut self, on: Option<bool>) {
        set(&mut self.flags, REMATERIALIZE, on == Some(true));
        set(&mut self.flags, KEEP_RESULTS, on == Some(false));
    }

    fn set_grad(&mut self, on: bool) {
        set(&mut self.flags, NO_GRAD, !on);
    }

    fn set_train(&mut self, on: bool) {
        set(&mut self.flags, EVALUATION, !on);
    }

    fn set_checkpointing(&mut self, on: bool) {
        set(&mut self.flags, CHECKPOINTING, on);
    }

    fn set_recomputing(&mut self, on: bool) {
        set(&mut self.flags, RECOMPUTING, on);
    }
}

fn set(flags: &mut u32, bit: u32, on: bool) {
    *flags = if on { *flags | bit } else { *flags & !bit };
}
