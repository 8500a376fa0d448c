//! [`Function`]: custom differentiable operations, as PyTorch's `autograd.Function`. [`Outputs`]: what functions
//! passed to this crate return.

use phalanx_tensor::Tensor;
use smallvec::SmallVec;

use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, no_grad, record_many};

/// An operation with a derivative of its own: how to compute it, what to keep, how to differentiate it.
///
/// ```
/// use phalanx_autograd::tensor::{Device, Tensor};
/// use phalanx_autograd::{Cx, Function, Grads, Result, SavedVariable, SaveContext, Var, grads1};
/// use phalanx_kernels as kernels;
///
/// /// `y = x³`; `dx = 3 x² dy`.
/// struct Cube;
///
/// impl Function for Cube {
///     fn name(&self) -> &'static str {
///         "cube"
///     }
///
///     fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
///         Ok(vec![kernels::mul(&kernels::mul(inputs[0], inputs[0])?, inputs[0])?])
///     }
///
///     fn save(&self, ctx: &SaveContext<'_>) -> Result<Vec<SavedVariable>> {
///         Ok(vec![ctx.input(0)?])
///     }
///
///     fn backward(&self, cx: &Cx<'_>, saved: &[SavedVariable]) -> Result<Grads> {
///         let x = cx.get(&saved[0])?;
///         grads1(cx.dy().mul(&x)?.mul(&x)?.mul_scalar(3.0)?)
///     }
/// }
///
/// let x = Var::leaf(Tensor::scalar(2f64, Device::CPU)?)?;
/// Cube.apply(&[&x])?[0].backward()?;
/// assert_eq!(x.grad().unwrap().item::<f64>()?, 12.0);
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub trait Function: Send + Sync + Sized + 'static {
    /// The operation's name in error messages.
    fn name(&self) -> &'static str;

    /// The outputs. Runs without recording; those of integer or bool dtype get no gradient.
    ///
    /// # Errors
    /// Whatever the operation refuses.
    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>>;

    /// What [`Function::backward`] will need. Called only if the operation is recorded.
    ///
    /// # Errors
    /// If a saved-value hook refuses.
    fn save(&self, ctx: &SaveContext<'_>) -> Result<Vec<SavedVariable>> {
        let _ = ctx;
        Ok(Vec::new())
    }

    /// The gradients of the inputs; see [`Backward::backward`]. `saved` is what [`Function::save`] returned, to be
    /// read with [`Cx::get`].
    ///
    /// # Errors
    /// Whatever its operations refuse.
    fn backward(&self, cx: &Cx<'_>, saved: &[SavedVariable]) -> Result<Grads>;

    /// Computes the outputs and records the operation.
    ///
    /// # Errors
    /// As [`Function::forward`] and [`Function::save`].
    fn apply(self, inputs: &[&Var]) -> Result<Vec<Var>> {
        begins();
        let tensors: SmallVec<[&Tensor; 4]> = inputs.iter().map(|v| v.tensor()).collect();
        let plain = no_grad();
        let outputs = self.forward(&tensors)?;
        drop(plain);
        let name = self.name();
        let save = |s: &SaveContext<'_>| Ok(Applied { saved: self.save(s)?, function: self });
        Ok(record_many(name, inputs, outputs.into(), save)?.into_vec())
    }
}

struct Applied<F> {
    function: F,
    saved: Vec<SavedVariable>,
}

impl<F: Function> Backward for Applied<F> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        self.function.backward(cx, &self.saved)
    }
}

/// The results of a function passed to this crate: one [`Var`] or several.
pub trait Outputs: Sized {
    /// As a list.
    fn into_vars(self) -> Vec<Var>;
    /// The reverse of [`Outputs::into_vars`]; `None` if it does not give as many.
    fn from_vars(vars: Vec<Var>) -> Option<Self>;
}

impl Outputs for Var {
    fn into_vars(self) -> Vec<Var> {
        vec![self]
    }

    fn from_vars(vars: Vec<Var>) -> Option<Var> {
        <[Var; 1]>::from_vars(vars).map(|[x]| x)
    }
}

impl Outputs for Vec<Var> {
    fn into_vars(self) -> Vec<Var> {
        self
    }

    fn from_vars(vars: Vec<Var>) -> Option<Vec<Var>> {
        Some(vars)
    }
}

impl<const N: usize> Outputs for [Var; N] {
    fn into_vars(self) -> Vec<Var> {
        self.into()
    }

    fn from_vars(vars: Vec<Var>) -> Option<[Var; N]> {
        vars.try_into().ok()
    }
}

impl<const N: usize> Outputs for SmallVec<[Var; N]>
where
    [Var; N]: smallvec::Array<Item = Var>,
{
    fn into_vars(self) -> Vec<Var> {
        self.into_vec()
    }

    fn from_vars(vars: Vec<Var>) -> Option<Self> {
        Some(SmallVec::from_vec(vars))
    }
}

impl Outputs for (Var, Var) {
    fn into_vars(self) -> Vec<Var> {
        vec![self.0, self.1]
    }

    fn from_vars(vars: Vec<Var>) -> Option<Self> {
        <[Var; 2]>::from_vars(vars).map(|[a, b]| (a, b))
    }
}

impl Outputs for (Var, Var, Var) {
    fn into_vars(self) -> Vec<Var> {
        vec![self.0, self.1, self.2]
    }

    fn from_vars(vars: Vec<Var>) -> Option<Self> {
        <[Var; 3]>::from_vars(vars).map(|[a, b, c]| (a, b, c))
    }
}

/// Values that [`Outputs::into_vars`] has taken apart, put together again.
pub(crate) fn reassemble<O: Outputs>(vars: Vec<Var>) -> O {
    O::from_vars(vars).unwrap_or_else(|| unreachable!("as many values as `into_vars` gave"))
}
