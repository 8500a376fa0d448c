//! Optimizer updates: one pass over parameters, their gradients and their state, in place.
//!
//! An optimizer is a `Rule`, the update of a vector of elements, in `rules.rs`. `update` widens halves, applies the
//! gradient's scale (from clipping or loss scaling), keeps the master copy of a half-precision parameter, and splits the work over the device: on the CPU
//! over the threads of its pool, by the instruction set; on a GPU many tensors in one launch. State is kept in the type
//! that is computed in: f64 for f64 parameters, else f32.

mod cpu;
mod cuda;
mod rules;

use phalanx_tensor::{DType, Error, Result, Tensor};

pub use rules::{
    Adadelta, Adagrad, Adam, Lion, Rmsprop, Sgd, adadelta_, adagrad_, adam_, adamax_, adamw_,
    lamb_direction_, lion_, rmsprop_, sgd_,
};

use crate::real::for_real;
use crate::simd::{Float, Vector};
use crate::{check, ops::cast::cast};

/// What an update works on: any part of a parameter, as long as all tensors have its shape.
pub struct Slice<'a> {
    /// The parameter, contiguous; perhaps a view into a flat buffer.
    pub param: &'a mut Tensor,
    /// Its f32 copy, if the parameter is bf16 or f16 and keeps one: then this is updated, and the parameter gets it
    /// rounded.
    pub master: Option<&'a mut Tensor>,
    /// The gradient, in any floating-point dtype.
    pub grad: &'a Tensor,
    /// What the gradient is multiplied with first.
    pub scale: f64,
}

/// A slice and the state that a rule keeps for it.
pub struct Item<'a> {
    /// The slice.
    pub slice: Slice<'a>,
    /// The state's tensors, in the rule's order.
    pub state: &'a mut [Tensor],
}

/// One step by one rule's numbers: many items, so that a GPU updates them together.
pub struct Step<'a> {
    /// The items to update.
    pub items: Vec<Item<'a>>,
    /// One element, f32 or f64, on the items' device: multiplies all gradients. So clipping needs not wait for the norm. If
    /// it is not finite, the step changes nothing.
    pub factor: Option<&'a Tensor>,
    /// Where the rule's numbers are.
    pub numbers: Numbers<'a>,
}

/// Where a rule's numbers are. A captured step runs again with the arguments that it was captured with; what changes from
/// step to step, such as the learning rate, has to be in memory then.
#[derive(Debug, Default)]
pub enum Numbers<'a> {
    /// In the rule.
    #[default]
    Given,
    /// In a contiguous f64 tensor on the items' GPU, as [`Numbers::Ask`] tells them. The rule's own only say by their
    /// zeros what is left out, such as weight decay.
    OnDevice(&'a Tensor),
    /// Nothing is updated: what [`Numbers::OnDevice`] is to hold for this step goes here.
    Ask(&'a mut Vec<f64>),
}

impl<'a> Step<'a> {
    /// Of these items, by the rule's own numbers.
    pub fn new(items: Vec<Item<'a>>) -> Step<'a> {
        Step { items, factor: None, numbers: Numbers::Given }
    }
}

/// The dtype of the state that belongs to a parameter of `dtype`, and of its master copy.
pub fn optim_state_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// An optimizer's formula, with `N` values of state to an element.
trait Rule<const N: usize>: Copy + Sync {
    /// The new element and state. To be marked `#[inline(always)]`.
    fn eval<V: Vector>(self, p: V, g: V, state: [V; N]) -> (V, [V; N]);
}

/// `x` in every lane.
#[inline(always)]
fn splat<V: Vector>(x: f64) -> V {
    V::splat(V::Elem::from_f64(x))
}

/// `g + decay * p`: weight decay as part of the gradient.
#[inline(always)]
fn decayed<V: Vector>(g: V, p: V, decay: f64) -> V {
    if decay == 0.0 { g } else { p.mul_add(splat(decay), g) }
}

/// An item that fits, its gradient in the parameter's dtype or in that of the state, and contiguous.
struct Ready<'a, const N: usize> {
    param: &'a mut Tensor,
    master: Option<&'a mut Tensor>,
    grad: Tensor,
    scale: f64,
    state: [&'a mut Tensor; N],
}

/// Runs `rule` over a step's items, in place. Nothing is changed unless all fit.
fn update<const N: usize>(op: &'static str, rule: impl Rule<N>, step: Step<'_>) -> Result<()> {
    let Step { items, factor, numbers } = step;
    if let Numbers::Ask(numbers) = numbers {
        *numbers = cuda::numbers(rule, items.first().map_or(1.0, |item| item.slice.scale));
        return Ok(());
    }
    let ready = items.into_iter().map(|item| fitting(op, item)).collect::<Result<Vec<Ready<'_, N>>>>()?;
    // A GPU updates all of its tensors in one launch, a CPU one after the other.
    let (on_gpu, here): (Vec<_>, Vec<_>) = ready.into_iter().partition(|r| r.param.device().is_cuda());
    cuda::run(op, rule, on_gpu, factor, &numbers)?;
    if here.is_empty() {
        return Ok(());
    }
    if let Numbers::OnDevice(_) = numbers {
        return Err(Error::invalid(op, "numbers in memory for tensors that are not on a GPU"));
    }
    let factor = factor.map_or(Ok(1.0), |factor| cast(factor, DType::F64)?.item::<f64>());
    for Ready { param, mut master, grad, scale, mut state } in here {
        if param.device().is_meta() {
            param.bump_version();
            state.iter_mut().for_each(|s| s.bump_version());
            master.iter_mut().for_each(|m| m.bump_version());
            continue;
        }
        let scale = scale * factor.clone()?;
        if !scale.is_finite() {
            continue;
        }
        for_real!(op, param.dtype(), T => cpu::run::<T, _, N>(op, rule, param, master, &grad, scale, state))?;
    }
    Ok(())
}

/// The item, if everything fits together.
fn fitting<'a, const N: usize>(op: &'static str, item: Item<'a>) -> Result<Ready<'a, N>> {
    let Item { slice: Slice { param, master, grad, scale }, state } = item;
    let count = state.len();
    let Ok(state) = <&mut [Tensor; N]>::try_from(state) else {
        return Err(Error::invalid(op, format!("got {count} state tensors, wanted {N}")));
    };
    let wide = optim_state_dtype(param.dtype());
    check::float(op, param)?;
    check::float(op, grad)?;
    check::same_device(op, &[param, grad])?;
    check::shape(op, "a gradient", grad, param.shape())?;
    check_layout(op, param)?;
    for own in state.iter().chain(master.as_deref()) {
        check::dtype(op, own, wide)?;
        check::same_device(op, &[param, own])?;
        check::shape(op, "state", own, param.shape())?;
        check_layout(op, own)?;
    }
    let grad = if grad.dtype() == param.dtype() { grad.clone() } else { cast(grad, wide)? }.contiguous()?;
    Ok(Ready { param, master, grad, scale, state: state.each_mut() })
}

fn check_layout(op: &'static str, written: &Tensor) -> Result<()> {
    if written.is_contiguous() {
        return Ok(());
    }
    let got = format!("strides {:?} for shape {:?}", written.strides(), written.shape());
    Err(Error::shape(op, got, "contiguous parameters and state"))
}

#[cfg(test)]
mod tests;
