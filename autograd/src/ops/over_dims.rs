//! Reductions whose derivative depends on the values.
//!
//! Saves `x` and `y`. The gradient is written once, of differentiable operations. The halves' is computed in f32, from
//! a `y` that is computed anew there, since `y` rounded to a half may be too coarse for it.

use phalanx_tensor::{DType, Dims, Tensor};

use super::sum::reduced;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

/// A reduction over some dimensions.
pub(super) trait OverDims: Send + Sync + Sized + 'static {
    /// The operation's name.
    const NAME: &'static str;

    /// `y`, the reduced dimensions kept with size 1.
    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor>;

    /// `dx`; `y` and `dy` have the reduced dimensions, with size 1.
    fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var>;
}

/// Computes and records a reduction over `dims`, which stay with size 1 if `keepdim`.
pub(super) fn reduce<R: OverDims>(x: &Var, dims: Dims, keepdim: bool, reduction: R) -> Result<Var> {
    begins();
    let y = reduction.forward(x.tensor(), &dims)?;
    let kept = |d: &usize| keepdim || !dims.contains(d);
    let shape: Dims = (0..x.rank()).filter(kept).map(|d| y.shape()[d]).collect();
    record(R::NAME, &[x], y.with_shape(&shape)?, |s: &Saver<'_>| {
        Ok(Node { x: s.input(0)?, y: s.output(0)?, dims, reduction })
    })
}

struct Node<R> {
    x: SavedVariable,
    y: SavedVariable,
    dims: Dims,
    reduction: R,
}

impl<R: OverDims> Backward for Node<R> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dims, dtype) = (cx.get(&self.x)?, &self.dims, cx.dy().dtype());
        let kept = reduced(x.shape(), dims);
        let dy = cx.dy().reshape_to(&kept)?;
        if matches!(dtype, DType::F64 | DType::F32) {
            let y = cx.get(&self.y)?.reshape_to(&kept)?;
            return grads1(self.reduction.gradient(&x, &y, &dy, dims)?);
        }
        // Differentiated again, `y` must be the node's own output; it is as precise as the half then.
        let (x, dy) = (x.to(DType::F32)?, dy.to(DType::F32)?);
        let y = match cx.create_graph() {
            true => cx.get(&self.y)?.reshape_to(&kept)?.to(DType::F32)?,
            false => Var::new(self.reduction.forward(x.tensor(), dims)?),
        };
        grads1(self.reduction.gradient(&x, &y, &dy, dims)?.to(dtype)?)
    }
}
