//! `y = max(a, b)` and `y = min(a, b)`, elementwise and broadcast; NaN where either is.
//!
//! Derivative: `dy` for the element that was taken, half of it for each at a tie, summed over what was broadcast.
//! Saves both.

use phalanx_kernels as kernels;
use phalanx_tensor::Dims;

use crate::{Backward, Cx, Grads, Result, Saved, Saver, Var, grads2, record};

impl Var {
    /// The larger element, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn maximum(&self, other: &Var) -> Result<Var> {
        let y = kernels::maximum(self.tensor(), other.tensor())?;
        let backward = |s: &Saver<'_>| Extremum::new(s, [self, other], false);
        record("maximum", &[self, other], y, backward)
    }

    /// The smaller element, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn minimum(&self, other: &Var) -> Result<Var> {
        let y = kernels::minimum(self.tensor(), other.tensor())?;
        let backward = |s: &Saver<'_>| Extremum::new(s, [self, other], true);
        record("minimum", &[self, other], y, backward)
    }
}

struct Extremum {
    shapes: [Dims; 2],
    operands: [Saved; 2],
    smaller: bool,
}

impl Extremum {
    fn new(s: &Saver<'_>, operands: [&Var; 2], smaller: bool) -> Result<Extremum> {
        let shapes = operands.map(|v| Dims::from_slice(v.shape()));
        Ok(Extremum { shapes, operands: [s.input(0)?, s.input(1)?], smaller })
    }
}

impl Backward for Extremum {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let operands = [cx.get(&self.operands[0])?, cx.get(&self.operands[1])?];
        let grad = |i: usize| -> Result<Option<Var>> {
            if !cx.needs(i) {
                return Ok(None);
            }
            let (taken, left) = (&operands[i], &operands[1 - i]);
            let (high, low) = if self.smaller { (left, taken) } else { (taken, left) };
            let dy = cx.dy();
            let dx = if cx.create_graph() {
                let half = dy.mul_scalar(0.5)?.where_(&high.eq(low)?, dy)?;
                Var::full(0.0, dy)?.where_(&high.lt(low)?, &half)?
            } else {
                Var::new(kernels::maximum_backward(high.tensor(), low.tensor(), dy.tensor())?)
            };
            Ok(Some(dx.sum_to(&self.shapes[i])?))
        };
        grads2(grad(0)?, grad(1)?)
    }
}
