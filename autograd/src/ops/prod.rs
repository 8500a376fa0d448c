//! `y = x[0] x[1] ..` over a dimension, or over all.
//!
//! Derivative: `dx[i] = dy` times the product of the others, which is made of the products of those before and of
//! those after, so that zeros do no harm. These come by doubling the distance: log n products of shifted tensors.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Tensor};

use super::over_dims::{OverDims, reduce};
use crate::{Result, Var};

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
        self.reshape_to(&[self.numel()])?.prod(0, false)
    }
}

struct Product;

impl OverDims for Product {
    const NAME: &'static str = "prod";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::prod(x, dims, true)
    }

    fn gradient(&self, x: &Var, _: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        let &[dim] = dims else { return Ok(dy.clone()) };
        let others = beside(x, dim, 1)?.mul(&beside(x, dim, -1)?)?;
        others.mul(dy)
    }
}

/// The product of the elements before each one, or with `side` -1 of those after it.
fn beside(x: &Var, dim: usize, side: isize) -> Result<Var> {
    // Moved by `by` along `dim`, ones moving in.
    let moved = |x: &Var, by: isize| {
        let mut margins = [(0, 0)].repeat(x.rank() - 1 - dim);
        margins.push((by, -by));
        x.pad(&margins, 1)
    };
    let n = x.shape()[dim] as isize;
    if n == 0 {
        return Ok(x.clone());
    }
    let (mut product, mut distance) = (moved(x, side)?, 1);
    while distance < n - 1 {
        product = product.mul(&moved(&product, side * distance)?)?;
        distance *= 2;
    }
    Ok(product)
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
