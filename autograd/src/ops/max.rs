//! Values picked along a dimension: `max`, `min`, `sort`, `topk`, each with the indices of what was picked; and
//! `argmax` and `argmin`, the indices alone.
//!
//! Derivative: `dy` added where the values were picked (`scatter_add`). Saves the indices. They have no gradient.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Tensor};
use smallvec::smallvec;

use super::gather::gathered_from;
use super::sum::reduced;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record_many};

impl Var {
    /// The largest elements along `dim`, and their indices (i64): the first of equal ones, or of NaNs.
    ///
    /// # Errors
    /// If there is no such dimension, or it has no elements.
    pub fn max(&self, dim: impl Dim, keepdim: bool) -> Result<(Var, Var)> {
        begins();
        picked("max", self, dim, kernels::max(self.tensor(), dim, keepdim)?, true)
    }

    /// The smallest elements along `dim`, and their indices (i64): the first of equal ones, or of NaNs.
    ///
    /// # Errors
    /// If there is no such dimension, or it has no elements.
    pub fn min(&self, dim: impl Dim, keepdim: bool) -> Result<(Var, Var)> {
        begins();
        picked("min", self, dim, kernels::min(self.tensor(), dim, keepdim)?, true)
    }

    /// The elements along `dim` in ascending (or descending) order, and where each was (i64). Stable; a NaN counts
    /// as larger than any number.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn sort(&self, dim: impl Dim, descending: bool) -> Result<(Var, Var)> {
        begins();
        picked("sort", self, dim, kernels::sort(self.tensor(), dim, descending)?, false)
    }

    /// The `k` largest (or smallest) elements along `dim`, best first, and where each was (i64).
    ///
    /// # Errors
    /// If there is no such dimension, or it has fewer than `k` elements.
    pub fn topk(&self, k: usize, dim: impl Dim, largest: bool) -> Result<(Var, Var)> {
        begins();
        picked("topk", self, dim, kernels::topk(self.tensor(), k, dim, largest)?, false)
    }

    /// The index of the largest element along `dim`, or of all in row-major order: the first of equal ones, or of
    /// NaNs; i64.
    ///
    /// # Errors
    /// If there is no such dimension, or there are no elements to choose from.
    pub fn argmax(&self, dim: Option<isize>, keepdim: bool) -> Result<Var> {
        Ok(Var::new(kernels::argmax(self.tensor(), dim, keepdim)?))
    }

    /// [`Var::argmax`] for the smallest element.
    ///
    /// # Errors
    /// As [`Var::argmax`].
    pub fn argmin(&self, dim: Option<isize>, keepdim: bool) -> Result<Var> {
        Ok(Var::new(kernels::argmin(self.tensor(), dim, keepdim)?))
    }
}

/// Records values and indices; `one` says that each line gave one.
fn picked(
    name: &'static str,
    x: &Var,
    dim: impl Dim,
    (values, indices): (Tensor, Tensor),
    one: bool,
) -> Result<(Var, Var)> {
    let dim = dim.resolve(x.rank().max(1), name)?;
    let from = Dims::from_slice(x.shape());
    let kept = if one { reduced(&from, &[dim]) } else { Dims::from_slice(values.shape()) };
    let mut outputs = record_many(name, &[x], smallvec![values, indices], |s: &Saver<'_>| {
        Ok(Picked { dim, from, kept, indices: s.output(1)? })
    })?
    .into_iter();
    match (outputs.next(), outputs.next()) {
        (Some(values), Some(indices)) => Ok((values, indices)),
        _ => unreachable!("two outputs were given"),
    }
}

struct Picked {
    dim: usize,
    from: Dims,
    kept: Dims,
    indices: SavedVariable,
}

impl Backward for Picked {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let indices = cx.get(&self.indices)?.detach().reshape_to(&self.kept)?;
        let dy = cx.dy().reshape_to(&self.kept)?;
        grads1(gathered_from(cx, &dy, self.dim, &indices, &self.from)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn what_is_picked_has_its_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].max(1, false)?.0.tanh());
        check_twice(&[&[3, 4]], |v| v[0].min(-2, true)?.0.tanh());
        check_twice(&[&[3, 4]], |v| v[0].sort(0, true)?.0.tanh()?.mul(&v[0]));
        check_twice(&[&[3, 4]], |v| v[0].topk(2, 1, true)?.0.tanh());
    }
}
