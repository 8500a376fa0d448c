//! `y = e^x / sum(e^x)` along a dimension.
//!
//! Derivative: `dx = y (dy - sum(y dy))`. Shapes: `y` and `dx` as `x`. Saves `y`, which the derivative is made of. The
//! largest element is subtracted first, so nothing overflows; a row of negative infinities alone gives NaN.

use phalanx_kernels as kernels;
use phalanx_tensor::Dim;

use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

impl Var {
    /// The softmax along `dim`.
    ///
    /// # Errors
    /// If there is no such dimension or the dtype is no floating-point one.
    pub fn softmax(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "softmax")?;
        let y = kernels::softmax(self.tensor(), dim)?;
        record("softmax", &[self], y, |s: &Saver<'_>| Ok(Softmax { y: s.output(0)?, dim }))
    }
}

struct Softmax {
    y: SavedVariable,
    dim: usize,
}

impl Backward for Softmax {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (y, dy) = (cx.get(&self.y)?, cx.dy());
        if !cx.create_graph() {
            return grads1(Var::new(kernels::softmax_backward(y.tensor(), dy.tensor(), self.dim)?));
        }
        let product = y.mul(dy)?;
        if y.rank() == 0 {
            return grads1(product.sub(&product)?);
        }
        let sum = y.mul(&product.sum(&[self.dim], true)?)?;
        grads1(product.sub(&sum)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        check_twice(&[&[3, 4]], |v| v[0].softmax(1));
        check_twice(&[&[2, 3, 2]], |v| v[0].softmax(-2));
        check_twice(&[&[]], |v| v[0].softmax(0));
    }
}
