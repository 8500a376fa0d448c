//! Elements by their order along a dimension: the largest, sorted, the first k, medians and quantiles.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error, Tensor};
use smallvec::smallvec;

use super::frame::composed;
use super::gather::gathered_from;
use super::reduce::{all_dims, reduced, share};
use crate::{
    Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, record, record_many,
};

/// Values picked along a dimension: `max`, `min`, `sort`, `topk`, each with the indices of what was picked; and
/// `argmax` and `argmin`, the indices alone.
///
/// Derivative: `dy` added where the values were picked (`scatter_add`). Saves the indices. They have no gradient.
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
    let mut outputs = record_many(name, &[x], smallvec![values, indices], |s: &SaveContext<'_>| {
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

/// What stands at a place in the order of the elements along a dimension: medians, the k-th smallest, quantiles.
///
/// Derivative: `dy` where the values were picked; between two, by their weights. Composed of `sort` and `gather`.
impl Var {
    /// The median along `dim`, which stays with size 1 if `keepdim`, and its index (i64): of an even number of elements the
    /// lower one of the two in the middle. NaN if there is one.
    ///
    /// # Errors
    /// If there is no such dimension, or it has no elements.
    pub fn median(&self, dim: impl Dim, keepdim: bool) -> Result<(Var, Var)> {
        let line = Line::of("median", self, dim)?;
        let nans = line.x.isnan()?.sum(&[line.dim], true)?;
        let middle = Var::full(((line.size - 1) / 2) as f64, &nans)?;
        // NaNs come last: the first of them, if there is one.
        let place = nans.rsub_scalar(line.size as i64)?.where_(&nans.gt_scalar(0)?, &middle)?;
        line.at(&place, keepdim)
    }

    /// The median of all elements, without dimensions: the lower one of the two in the middle; NaN if there is one, or no
    /// element. The derivative is shared evenly by the elements that equal it.
    ///
    /// # Errors
    /// If the dtype is an integer one and there are no elements.
    pub fn median_all(&self) -> Result<Var> {
        let flat = self.detach().reshape_to(&[self.numel()])?;
        let y = match self.numel() {
            0 if self.dtype().is_float() => Var::full(f64::NAN, &flat.sum_all()?)?,
            _ => flat.median(0, false)?.0,
        };
        record("median", &[self], y.into_tensor(), |s: &SaveContext<'_>| {
            Ok(Shared { x: s.input(0)?, y: s.output(0)? })
        })
    }

    /// The `k`-th smallest element along `dim` (from 1), which stays with size 1 if `keepdim`, and its index (i64). A NaN
    /// counts as larger than any number.
    ///
    /// # Errors
    /// If there is no such dimension, or `k` is 0 or above its size.
    pub fn kthvalue(&self, k: usize, dim: impl Dim, keepdim: bool) -> Result<(Var, Var)> {
        let line = Line::of("kthvalue", self, dim)?;
        if !(1..=line.size).contains(&k) {
            let wanted = format!("1 to {}, the size of dimension {}", line.size, line.dim);
            return Err(Error::range("kthvalue", format!("k = {k}"), wanted).into());
        }
        let count = line.x.isnan()?.sum(&[line.dim], true)?;
        line.at(&Var::full((k - 1) as f64, &count)?, keepdim)
    }

    /// The `q`-quantile along `dim`, or of all elements, on a line between the two that it lies between; `dim` (or every
    /// dimension) stays with size 1 if `keepdim`. NaN if there is one.
    ///
    /// # Errors
    /// If `q` is not between 0 and 1, the dtype is no floating-point one, there is no such dimension, or there are no
    /// elements.
    pub fn quantile(&self, q: f64, dim: Option<isize>, keepdim: bool) -> Result<Var> {
        let quantiles = self.quantiles(&[q], dim, keepdim)?;
        let shape = Dims::from_slice(&quantiles.shape()[1..]);
        quantiles.reshape_to(&shape)
    }

    /// [`Var::quantile`] for several `q` at once: they become the first dimension.
    ///
    /// # Errors
    /// As [`Var::quantile`].
    pub fn quantiles(&self, q: &[f64], dim: Option<isize>, keepdim: bool) -> Result<Var> {
        const NAME: &str = "quantile";
        if let Some(wrong) = q.iter().find(|q| !(0.0..=1.0).contains(*q)) {
            return Err(Error::range(NAME, format!("q = {wrong}"), "0 to 1").into());
        }
        if q.is_empty() {
            return Err(Error::invalid(NAME, "got no q, wanted one at least").into());
        }
        let kept = match dim {
            None => Dims::from_elem(1, if keepdim { self.rank() } else { 0 }),
            Some(dim) => without(self, dim.resolve(self.rank().max(1), NAME)?, keepdim),
        };
        let shape: Dims = std::iter::once(q.len()).chain(kept).collect();
        composed(NAME, &[self], |v| {
            let x = if dim.is_none() { v[0].reshape_to(&[v[0].numel()])? } else { v[0].clone() };
            let line = Line::of(NAME, &x, dim.unwrap_or(0))?;
            let (sorted, _) = line.x.sort(line.dim, false)?;
            let nans = line.x.isnan()?.sum(&[line.dim], true)?;
            let found = q.iter().map(|&q| line.between(&sorted, &nans, q)).collect::<Result<Vec<_>>>()?;
            Var::stack(&found, 0)?.reshape_to(&shape)
        })
    }
}

/// The shape of `x` with `dim` of size 1, or without it.
fn without(x: &Var, dim: usize, keepdim: bool) -> Dims {
    let kept = reduced(x.shape(), &[dim]);
    kept.iter().enumerate().filter(|(d, _)| keepdim || *d != dim).map(|(_, &n)| n).collect()
}

/// A dimension to look along, which has elements.
struct Line {
    /// With a dimension at least.
    x: Var,
    dim: usize,
    size: usize,
    /// The shape that was given.
    given: Dims,
}

impl Line {
    fn of(name: &'static str, x: &Var, dim: impl Dim) -> Result<Line> {
        let dim = dim.resolve(x.rank().max(1), name)?;
        let given = Dims::from_slice(x.shape());
        let x = if x.rank() == 0 { x.reshape_to(&[1])? } else { x.clone() };
        let size = x.shape()[dim];
        if size == 0 {
            let got = format!("{:?}, whose dimension {dim} has no elements", x.shape());
            return Err(Error::shape(name, got, "at least one element to choose from").into());
        }
        Ok(Line { x, dim, size, given })
    }

    /// What stands at this place of each line's order, and where it was.
    fn at(&self, place: &Var, keepdim: bool) -> Result<(Var, Var)> {
        let order = self.x.detach().sort(self.dim, false)?.1;
        let indices = order.gather(self.dim, place)?;
        let values = self.x.gather(self.dim, &indices)?;
        let shape = match self.given.is_empty() {
            true => Dims::new(),
            false => without(&self.x, self.dim, keepdim),
        };
        Ok((values.reshape_to(&shape)?, indices.reshape_to(&shape)?))
    }

    /// The quantile of sorted lines, which have so many NaNs at the end.
    fn between(&self, sorted: &Var, nans: &Var, q: f64) -> Result<Var> {
        let (last, any) = ((self.size - 1) as f64, nans.gt_scalar(0)?);
        let place = q * last;
        let at = |place: f64| -> Result<Var> {
            sorted.gather(self.dim, &Var::full(last, nans)?.where_(&any, &Var::full(place, nans)?)?)
        };
        at(place.floor())?.lerp_scalar(&at(place.ceil())?, place.fract())
    }
}

/// The derivative of a value that may stand at several places.
struct Shared {
    x: SavedVariable,
    y: SavedVariable,
}

impl Backward for Shared {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, y) = (cx.get(&self.x)?, cx.get(&self.y)?);
        grads1(share(&x, &y, &all_dims(&x))?.mul(cx.dy())?)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn what_is_picked_has_its_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].max(1, false)?.0.tanh());
        check_twice(&[&[3, 4]], |v| v[0].min(-2, true)?.0.tanh());
        check_twice(&[&[3, 4]], |v| v[0].sort(0, true)?.0.tanh()?.mul(&v[0]));
        check_twice(&[&[3, 4]], |v| v[0].topk(2, 1, true)?.0.tanh());
    }

    #[test]
    fn a_place_that_does_not_exist_is_refused_by_name() {
        let x = Var::from_slice(&[1.0, 2.0], &[2], Device::CPU).unwrap();
        for (error, name) in [
            (x.kthvalue(3, 0, false).map(|_| ()), "kthvalue"),
            (x.kthvalue(0, 0, false).map(|_| ()), "kthvalue"),
            (x.quantile(1.5, None, false).map(|_| ()), "quantile"),
            (x.quantile(f64::NAN, None, false).map(|_| ()), "quantile"),
            (x.narrow(0, 0, 0).unwrap().median(0, false).map(|_| ()), "median"),
        ] {
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with(name), "{text}");
        }
    }

    #[test]
    fn the_median_of_no_floats_is_nan_and_quantiles_stack() {
        let none = Var::from_slice::<f64>(&[], &[0], Device::CPU).unwrap();
        assert!(none.median_all().unwrap().item::<f64>().unwrap().is_nan());
        let x = Var::from_slice(&[3.0, 1.0, 2.0, 5.0], &[4], Device::CPU).unwrap();
        let q = x.quantiles(&[0.0, 0.5, 1.0], Some(0), true).unwrap();
        assert_eq!((q.shape(), q.to_vec::<f64>().unwrap()), (&[3, 1][..], vec![1.0, 2.5, 5.0]));
    }
}
