//! `y[i] = x[0] x[1] .. x[i]` along a dimension, and linear recurrences `y[i] = a[i] y[i - 1] + b[i]`, which its derivative is
//! made of.
//!
//! Derivative of the products: `dx[i] = x[0] .. x[i - 1] s[i]` with `s[i] = dy[i] + x[i + 1] s[i + 1]`, a recurrence from the
//! end. Nothing is divided, so that zeros do no harm. Saves `x`.
//!
//! Derivative of a recurrence: `db[i] = dy[i] + a[i + 1] db[i + 1]`, the same from the other end, and
//! `da[i] = db[i] y[i - 1]`. Saves `a` and `b`.

use phalanx_kernels as kernels;
use phalanx_tensor::Dim;

use super::composed::wide;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, grads2, record};

impl Var {
    /// The running product along `dim`. Integers and bools are multiplied in i64.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cumprod(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "cumprod")?;
        let y = kernels::cumprod(self.tensor(), dim)?;
        record("cumprod", &[self], y, |s: &Saver<'_>| Ok(Products { dim, x: s.input(0)? }))
    }

    /// `y[i] = a[i] y[i - 1] + b[i]` along `dim`, which exists, beginning with `y[0] = b[0]`; from the end if `reversed`.
    pub(super) fn recurrence(&self, b: &Var, dim: usize, reversed: bool) -> Result<Var> {
        begins();
        let y = kernels::recurrence(self.tensor(), b.tensor(), dim, reversed)?;
        record("recurrence", &[self, b], y, |s: &Saver<'_>| {
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

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{GradCheck, gradcheck, gradgradcheck};

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
}
