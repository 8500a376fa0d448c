//! The frame of functions of one value, elementwise: `y = f(x)`, `dx = dy f'(x)`.
//!
//! The derivative is made of the input or of the output, which is saved; in one pass by a fused kernel, or of
//! differentiable operations if it is to be differentiated again.

use phalanx_tensor::{Result as TensorResult, Tensor};

use crate::{Backward, Cx, Grads, Result, Saved, Saver, Var, grads1, record};

/// Such a function's derivative.
pub(crate) trait Elementwise: Send + Sync + 'static {
    /// The operation's name.
    const NAME: &'static str;
    /// Whether the derivative is made of the output; else it is of the input.
    const OF_OUTPUT: bool;

    /// `dx` from the saved value and `dy`, by a kernel.
    fn fused(&self, saved: &Tensor, dy: &Tensor) -> TensorResult<Tensor>;

    /// The same of differentiable operations.
    fn composed(&self, saved: &Var, dy: &Var) -> Result<Var>;
}

/// Makes `y` the function's recorded result.
pub(crate) fn elementwise<F: Elementwise>(x: &Var, y: Tensor, function: F) -> Result<Var> {
    record(F::NAME, &[x], y, |s: &Saver<'_>| {
        let saved = if F::OF_OUTPUT { s.output(0)? } else { s.input(0)? };
        Ok(Node { saved, function })
    })
}

struct Node<F> {
    saved: Saved,
    function: F,
}

impl<F: Elementwise> Backward for Node<F> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (saved, dy) = (cx.get(&self.saved)?, cx.dy());
        if cx.create_graph() {
            return grads1(self.function.composed(&saved, dy)?);
        }
        grads1(Var::new(self.function.fused(saved.tensor(), dy.tensor())?))
    }
}
