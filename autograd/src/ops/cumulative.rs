//! Products over dimensions, and what accumulates along one: sums, products, extrema, logarithms of sums of exponentials.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Dims, Result as TensorResult, Tensor};

use super::frame::{record_linear, wide};
use super::reduce::{OverDims, reduce};
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, grads2, record};

/// `y = x[0] x[1] ..` over a dimension, or over all.
///
/// Derivative: `dx[i] = dy p[i]`, with `p[i]` the product of the others: of those before and of those after, so that
/// zeros do no harm.
///
/// Derivative of `p`, with `b[i]` the product before and `a[i]` the one after:
/// `dx[i] = b[i] s[i] + a[i] t[i]`, `s[i] = dp[i + 1] a[i + 1] + x[i + 1] s[i + 1]`, a recurrence from the end, and
/// `t[i] = dp[i - 1] b[i - 1] + x[i - 1] t[i - 1]`. Saves `x`.
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
        record("prod_of_others", &[x], y, |s: &SaveContext<'_>| Ok(Others { dim, x: s.input(0)? }))?.mul(dy)
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

/// `y[i] = x[0] x[1] .. x[i]` along a dimension, and linear recurrences `y[i] = a[i] y[i - 1] + b[i]`, which its
/// derivative is made of.
///
/// Derivative of the products: `dx[i] = x[0] .. x[i - 1] s[i]` with `s[i] = dy[i] + x[i + 1] s[i + 1]`, a recurrence
/// from the end. Nothing is divided, so that zeros do no harm. Saves `x`.
///
/// Derivative of a recurrence: `db[i] = dy[i] + a[i + 1] db[i + 1]`, the same from the other end, and
/// `da[i] = db[i] y[i - 1]`. Saves `a` and `b`.
impl Var {
    /// The running product along `dim`. Integers and bools are multiplied in i64.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cumprod(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "cumprod")?;
        let y = kernels::cumprod(self.tensor(), dim)?;
        record("cumprod", &[self], y, |s: &SaveContext<'_>| Ok(Products { dim, x: s.input(0)? }))
    }

    /// `y[i] = a[i] y[i - 1] + b[i]` along `dim`, which exists, beginning with `y[0] = b[0]`; from the end if `reversed`.
    pub(super) fn recurrence(&self, b: &Var, dim: usize, reversed: bool) -> Result<Var> {
        begins();
        let y = kernels::recurrence(self.tensor(), b.tensor(), dim, reversed)?;
        record("recurrence", &[self, b], y, |s: &SaveContext<'_>| {
            Ok(Recurrence { dim, reversed, a: s.input(0)?, b: s.input(1)? })
        })
    }

    /// Every element in the place of the next along `dim`, or before it if `back`; `fill` comes in.
    pub(super) fn shifted(&self, dim: usize, back: bool, fill: f64) -> Result<Var> {
        let Some(behind) = (self.rank() - 1).checked_sub(dim).filter(|_| self.numel() > 0) else {
            return Ok(self.clone());
        };
        let by = if back { -1 } else { 1 };
        let mut margins = [(0, 0)].repeat(behind);
        margins.push((by, -by));
        self.pad(&margins, fill)
    }
}

struct Products {
    dim: usize,
    x: SavedVariable,
}

impl Backward for Products {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let dy = cx.dy();
        if dy.rank() == 0 {
            return grads1(dy.clone());
        }
        let (x, dim) = (wide(&cx.get(&self.x)?)?, self.dim);
        let sums = x.shifted(dim, true, 0.0)?.recurrence(&wide(dy)?, dim, true)?;
        let before = x.cumprod(dim)?.shifted(dim, false, 1.0)?;
        grads1(before.mul(&sums)?.to(dy.dtype())?)
    }
}

struct Recurrence {
    dim: usize,
    reversed: bool,
    a: SavedVariable,
    b: SavedVariable,
}

impl Backward for Recurrence {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (a, b, dim, reversed) = (cx.get(&self.a)?, cx.get(&self.b)?, self.dim, self.reversed);
        let db = a.shifted(dim, !reversed, 0.0)?.recurrence(cx.dy(), dim, !reversed)?;
        let before = || a.recurrence(&b, dim, reversed)?.shifted(dim, reversed, 0.0);
        let da = cx.needs(0).then(|| db.mul(&before()?)).transpose()?;
        grads2(da, Some(db))
    }
}

/// `y[i] = x[0] + .. + x[i]` along a dimension.
///
/// Derivative: `dx[i] = dy[i] + .. + dy[n - 1]`, the running sum from the end.
impl Var {
    /// The running sum along `dim`. Integers and bools are summed in i64.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cumsum(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "cumsum")?;
        let y = kernels::cumsum(self.tensor(), dim)?;
        record_linear("cumsum", self, y, move |dy| dy.cumsum_reversed(dim))
    }

    fn cumsum_reversed(&self, dim: usize) -> Result<Var> {
        begins();
        let y = kernels::cumsum_reversed(self.tensor(), dim)?;
        record_linear("cumsum_reversed", self, y, move |dy| dy.cumsum(dim))
    }
}

/// The largest and the smallest element so far along a dimension, and where it was.
///
/// Derivative: `dy` added where the values were picked. Saves the indices.
impl Var {
    /// The largest element so far along `dim`, and its index (i64): the last of equal ones. NaN from the first NaN on.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cummax(&self, dim: impl Dim) -> Result<(Var, Var)> {
        begins();
        picked("cummax", self, dim, kernels::cummax)
    }

    /// The smallest element so far along `dim`, and its index (i64): the last of equal ones. NaN from the first NaN on.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cummin(&self, dim: impl Dim) -> Result<(Var, Var)> {
        begins();
        picked("cummin", self, dim, kernels::cummin)
    }
}

fn picked(
    name: &'static str,
    x: &Var,
    dim: impl Dim,
    running: fn(&Tensor, usize) -> TensorResult<Tensor>,
) -> Result<(Var, Var)> {
    let dim = dim.resolve(x.rank().max(1), name)?;
    if x.rank() == 0 {
        return Ok((x.clone(), Var::new(Tensor::zeros(&[], DType::I64, x.device())?)));
    }
    // An element that equals the best so far is the last that does.
    let best = running(x.tensor(), dim)?;
    let is_best = kernels::eq(&kernels::cast(x.tensor(), best.dtype())?, &best)?;
    let is_nan = kernels::ne(x.tensor(), x.tensor())?;
    let is_new = kernels::bitwise_or(&is_best, &is_nan)?;
    let size = x.shape()[dim];
    let mut along = vec![1; x.rank()];
    along[dim] = size;
    let places = kernels::arange(0, size as i64, 1, DType::I64, x.device())?.with_shape(&along)?;
    let is_old = kernels::eq_scalar(&is_new, 0.into())?;
    let places = kernels::masked_fill(&places.broadcast_to(x.shape())?, &is_old, 0.into())?;
    let indices = Var::new(kernels::cummax(&places, dim)?);
    Ok((x.gather(dim, &indices)?, indices))
}

/// `y[i] = ln(e^x[0] + .. + e^x[i])` along a dimension.
///
/// Derivative: `dx[i] = e^(x[i] - y[i]) s[i]` with `s[i] = dy[i] + e^(y[i] - y[i + 1]) s[i + 1]`, a recurrence from the end
/// whose factors are at most 1, so that nothing overflows. Saves `x`.
impl Var {
    /// The logarithm of the running sum of exponentials along `dim`; safe for large values.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or there is no such dimension.
    pub fn logcumsumexp(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "logcumsumexp")?;
        let y = kernels::logcumsumexp(self.tensor(), dim)?;
        record("logcumsumexp", &[self], y, |s: &SaveContext<'_>| Ok(Node { dim, x: s.input(0)? }))
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

    #[test]
    fn running_products_have_their_derivatives_through_zeros_too() {
        for dim in [0, 1, -1] {
            check_twice(&[&[3, 4, 2]], |v| v[0].cumprod(dim)?.tanh());
        }
        check_twice(&[&[0, 3]], |v| v[0].cumprod(0));
        for values in [[2.0, 0.0, 3.0, 4.0, 0.5], [0.0, 2.0, 0.0, 0.0, 3.0]] {
            let x = Tensor::from_slice(&values, &[5], Device::CPU).unwrap();
            gradcheck(|v| v[0].cumprod(0), std::slice::from_ref(&x), GradCheck::default()).unwrap();
            gradgradcheck(|v| v[0].cumprod(0), &[x], GradCheck::default()).unwrap();
        }
    }

    #[test]
    fn recurrences_have_their_derivatives() {
        for reversed in [false, true] {
            check_twice(&[&[2, 5, 3], &[2, 5, 3]], |v| v[0].recurrence(&v[1], 1, reversed));
        }
    }

    #[test]
    fn running_sums_have_their_derivatives() {
        for dim in [0, 1, -1] {
            check_twice(&[&[3, 4, 2]], |v| v[0].cumsum(dim)?.tanh());
        }
    }

    #[test]
    fn running_logarithms_have_their_derivatives() {
        for dim in [0, 1, -1] {
            check_twice(&[&[3, 4, 2]], |v| v[0].logcumsumexp(dim)?.tanh());
        }
        check_twice(&[&[2, 0]], |v| v[0].logcumsumexp(1));
    }
}
