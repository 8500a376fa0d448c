//! Softmax along a dimension, and its logarithm.

use phalanx_kernels as kernels;
use phalanx_tensor::Dim;

use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, record};

/// `y = e^x / sum(e^x)` along a dimension.
///
/// Derivative: `dx = y (dy - sum(y dy))`. Shapes: `y` and `dx` as `x`. Saves `y`, which the derivative is made of. The
/// largest element is subtracted first, so nothing overflows; a row of negative infinities alone gives NaN.
impl Var {
    /// The softmax along `dim`.
    ///
    /// # Errors
    /// If there is no such dimension or the dtype is no floating-point one.
    pub fn softmax(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "softmax")?;
        let y = kernels::softmax(self.tensor(), dim)?;
        record("softmax", &[self], y, |s: &SaveContext<'_>| Ok(Softmax { y: s.output(0)?, dim }))
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

/// `y = x - log(sum(e^x))` along a dimension.
///
/// Derivative: `dx = dy - e^y sum(dy)`. Shapes: `y` and `dx` as `x`. Saves `y`: the exponentials come from it, and
/// `softmax(y)` is them where the gradient is differentiated again. The largest element is subtracted before the
/// exponentials and the logarithm after, so that large logits lose nothing.
impl Var {
    /// The logarithm of the softmax along `dim`.
    ///
    /// # Errors
    /// If there is no such dimension or the dtype is no floating-point one.
    pub fn log_softmax(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "log_softmax")?;
        let y = kernels::log_softmax(self.tensor(), dim)?;
        record("log_softmax", &[self], y, |s: &SaveContext<'_>| Ok(LogSoftmax { y: s.output(0)?, dim }))
    }
}

struct LogSoftmax {
    y: SavedVariable,
    dim: usize,
}

impl Backward for LogSoftmax {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (y, dy) = (cx.get(&self.y)?, cx.dy());
        if !cx.create_graph() {
            return grads1(Var::new(kernels::log_softmax_backward(y.tensor(), dy.tensor(), self.dim)?));
        }
        let sum = if y.rank() == 0 { dy.clone() } else { dy.sum(&[self.dim], true)? };
        let spread = y.softmax(self.dim)?.mul(&sum)?;
        grads1(dy.sub(&spread)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_of_softmax_hold() {
        check_twice(&[&[3, 4]], |v| v[0].softmax(1));
        check_twice(&[&[2, 3, 2]], |v| v[0].softmax(-2));
        check_twice(&[&[]], |v| v[0].softmax(0));
    }

    #[test]
    fn first_and_second_derivatives_of_log_softmax_hold() {
        check_twice(&[&[3, 4]], |v| v[0].log_softmax(1));
        check_twice(&[&[2, 3, 2]], |v| v[0].log_softmax(-2));
        check_twice(&[&[]], |v| v[0].log_softmax(0));
    }
}
