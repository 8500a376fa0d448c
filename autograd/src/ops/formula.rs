//! The frame of functions whose derivative is a formula of their inputs: `y = f(a, b, ..)`, elementwise and broadcast.
//!
//! Derivative: given with the function, of differentiable operations, and summed over what was broadcast. The inputs are
//! saved and nothing else, whatever the function is made of. bf16 and f16 are computed in f32, there and back, and rounded
//! once at the end. Functions are plain pointers, so one frame is compiled for all.

use phalanx_tensor::DType;
use smallvec::SmallVec;

use super::composed::{floats, named, wide};
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, record};

/// Such a function.
pub(super) struct Formula {
    /// What the user called.
    pub(super) name: &'static str,
    /// `y` of constants.
    pub(super) forward: fn(&[Var]) -> Result<Var>,
    pub(super) gradient: Gradient,
}

/// The gradient of input `i`, of `y`'s shape or one that `y` was broadcast from, given the inputs and `dy`.
type Gradient = fn(usize, &[Var], &Var) -> Result<Var>;

impl Formula {
    /// The function of floating-point inputs of one dtype.
    pub(super) fn of(&self, inputs: &[&Var]) -> Result<Var> {
        begins();
        let dtype = floats(self.name, inputs)?;
        let constants: SmallVec<[Var; 3]> =
            inputs.iter().map(|x| wide(&x.detach())).collect::<Result<_>>()?;
        let y = (self.forward)(&constants).and_then(|y| y.to(dtype));
        let y = named(self.name, y)?.into_tensor();
        let gradient = self.gradient;
        record(self.name, inputs, y, |s: &Saver<'_>| {
            let saved = (0..inputs.len()).map(|i| s.input(i)).collect::<Result<_>>()?;
            Ok(Node { saved, gradient, dtype })
        })
    }
}

struct Node {
    saved: SmallVec<[SavedVariable; 3]>,
    gradient: Gradient,
    dtype: DType,
}

impl Backward for Node {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x: SmallVec<[Var; 3]> = self.saved.iter().map(|s| wide(&cx.get(s)?)).collect::<Result<_>>()?;
        let dy = wide(cx.dy())?;
        let grad = |i: usize| -> Result<Option<Var>> {
            if !cx.needs(i) {
                return Ok(None);
            }
            let dx = (self.gradient)(i, &x, &dy)?;
            Ok(Some(dx.sum_to(x[i].shape())?.to(self.dtype)?))
        };
        (0..x.len()).map(grad).collect()
    }
}
