//! `y[i] = ln(e^x[0] + .. + e^x[i])` along a dimension.
//!
//! Derivative: `dx[i] = e^(x[i] - y[i]) s[i]` with `s[i] = dy[i] + e^(y[i] - y[i + 1]) s[i + 1]`, a recurrence from the end
//! whose factors are at most 1, so that nothing overflows. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::Dim;

use super::composed::wide;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

impl Var {
    /// The logarithm of the running sum of exponentials along `dim`; safe for large values.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or there is no such dimension.
    pub fn logcumsumexp(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "logcumsumexp")?;
        let y = kernels::logcumsumexp(self.tensor(), dim)?;
        record("logcumsumexp", &[self], y, |s: &Saver<'_>| Ok(Node { dim, x: s.input(0)? }))
    }
}

struct Node {
    dim: usize,
    x: SavedVariable,
}

impl Backward for Node {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let dy = cx.dy();
        if dy.rank() == 0 {
            return grads1(dy.clone());
        }
        let (x, dim) = (wide(&cx.get(&self.x)?)?, self.dim);
        let y = x.logcumsumexp(dim)?;
        // Of two infinities the difference would be no number.
        let step = y.sub(&y.shifted(dim, true, 0.0)?)?.masked_fill(&y.isinf()?, 0.0)?;
        let sums = step.exp()?.recurrence(&wide(dy)?, dim, true)?;
        grads1(x.sub(&y)?.exp()?.mul(&sums)?.to(dy.dtype())?)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn running_logarithms_have_their_derivatives() {
        for dim in [0, 1, -1] {
            check_twice(&[&[3, 4, 2]], |v| v[0].logcumsumexp(dim)?.tanh());
        }
        check_twice(&[&[2, 0]], |v| v[0].logcumsumexp(1));
    }
}
