//! What stands at a place in the order of the elements along a dimension: medians, the k-th smallest, quantiles.
//!
//! Derivative: `dy` where the values were picked; between two, by their weights. Composed of `sort` and `gather`.

use phalanx_tensor::{Dim, Dims, Error};

use super::amax::share;
use super::composed::composed;
use super::sum::{all_dims, reduced};
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, grads1, record};

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
        record("median", &[self], y.into_tensor(), |s: &Saver<'_>| {
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
