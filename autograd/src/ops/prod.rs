//! `y = x[0] x[1] ..` over a dimension, or over all.
//!
//! Derivative: `dx[i] = dy p[i]`, with `p[i]` the product of the others: of those before and of those after, so that zeros do no
//! harm.
//!
//! Derivative of `p`, with `b[i]` the product before and `a[i]` the one after:
//! `dx[i] = b[i] s[i] + a[i] t[i]`, `s[i] = dp[i + 1] a[i + 1] + x[i + 1] s[i + 1]`, a recurrence from the end, and
//! `t[i] = dp[i - 1] b[i - 1] + x[i - 1] t[i - 1]`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Tensor};

use super::over_dims::{OverDims, reduce};
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

impl Var {
    /// The product over `dim`, which stays with size 1 if `keepdim`. Integers and bools are multiplied in i64.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn prod(&self, dim: impl Dim, keepdim: bool) -> Result<Var> {
        let dim = dim.resolve(self.rank().max(1), "prod")?;
        let dims: Dims = [dim].into_iter().filter(|&d| d < self.rank()).collect();
        reduce(self, dims, keepdim, Product)
    }

    /// The product of all elements, without dimensions.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn prod_all(&self) -> Result<Var> {
        reduce(self, (0..self.rank()).collect(), false, Product)
    }
}

struct Product;

impl OverDims for Product {
    const NAME: &'static str = "prod";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::prod(x, dims, true)
    }

    fn gradient(&self, x: &Var, _: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        let shape = x.shape();
        let &[dim] = dims else {
            // All, or none.
            let (x, dy) = (x.reshape_to(&[x.numel()])?, dy.reshape_to(&[1])?);
            return self.gradient(&x, &dy, &dy, &[0])?.reshape_to(shape);
        };
        if x.tensor().device().is_cuda() {
            let [before, after] = beside(x, dim)?;
            return before.mul(&after)?.mul(dy);
        }
        begins();
        let y = kernels::prod_of_others(x.tensor(), dim)?;
        record("prod_of_others", &[x], y, |s: &Saver<'_>| Ok(Others { dim, x: s.input(0)? }))?.mul(dy)
    }
}

struct Others {
    dim: usize,
    x: SavedVariable,
}

impl Backward for Others {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dim, dy) = (cx.get(&self.x)?, self.dim, cx.dy());
        let [before, after] = beside(&x, dim)?;
        let side = |of: &Var, back: bool| {
            let factors = x.shifted(dim, back, 0.0)?;
            factors.recurrence(&of.mul(dy)?.shifted(dim, back, 0.0)?, dim, back)
        };
        let (s, t) = (side(&after, true)?, side(&before, false)?);
        grads1(before.mul(&s)?.add(&after.mul(&t)?)?)
    }
}

/// The products of the elements before each one, and of those after it.
fn beside(x: &Var, dim: usize) -> Result<[Var; 2]> {
    let none = Var::new(Tensor::zeros(x.shape(), x.tensor().dtype(), x.tensor().device())?);
    let product =
        |back: bool| x.shifted(dim, back, 1.0)?.recurrence(&none.shifted(dim, back, 1.0)?, dim, back);
    Ok([product(false)?, product(true)?])
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{GradCheck, gradcheck, gradgradcheck};

    #[test]
    fn products_have_their_derivatives_through_zeros_too() {
        for n in [1, 2, 3, 5, 8] {
            check_twice(&[&[2, n]], |v| v[0].prod(1, false)?.tanh());
            check_twice(&[&[n, 2]], |v| v[0].prod(0, true)?.tanh());
        }
        for values in [[2.0, 0.0, 3.0, 4.0], [2.0, 0.0, 3.0, 0.0]] {
            let x = Tensor::from_slice(&values, &[4], Device::CPU).unwrap();
            gradcheck(|v| v[0].prod_all(), std::slice::from_ref(&x), GradCheck::default()).unwrap();
            gradgradcheck(|v| v[0].prod_all(), &[x], GradCheck::default()).unwrap();
        }
    }
}
