//! Operations whose output shape depends on values (`nonzero`, `masked_select`, `unique`, `bincount`), and `histc` and
//! `searchsorted`.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Dims, Error, Scalar, Tensor, broadcast_shapes};

use super::frame::{named, same};
use crate::{Result, Var, record_none};

/// What is not zero: its places (`nonzero`, `where_indices`) and the elements there (`masked_select`).
///
/// The values decide the result's size, so the host waits for the device and reads the mask; a `meta` tensor has no
/// values and is refused. `masked_select` then is `index_select` of the flattened input, whose derivative adds `dy` at
/// those places.
impl Var {
    /// The indices of the elements that are not 0 (NaN is not), in row-major order: `[count, rank]` of i64.
    ///
    /// The host waits for the device, since the values decide the size.
    ///
    /// # Errors
    /// On a `meta` device, which has no values.
    pub fn nonzero(&self) -> Result<Var> {
        let places = places("nonzero", self.tensor())?;
        let mut indices = vec![0; places.len() * self.rank()];
        let strides = phalanx_tensor::contiguous_strides(self.shape());
        for (row, &place) in indices.chunks_mut(self.rank().max(1)).zip(&places) {
            let mut left = place as usize;
            for (to, &stride) in row.iter_mut().zip(&strides) {
                *to = (left / stride.max(1)) as i64;
                left %= stride.max(1);
            }
        }
        Var::from_slice(&indices, &[places.len(), self.rank()], self.device())
    }

    /// [`Var::nonzero`] as an index tensor a dimension, as [`Var::index`] takes them: PyTorch's `torch.where(condition)`.
    /// A tensor without dimensions counts as one of one element.
    ///
    /// # Errors
    /// As [`Var::nonzero`].
    pub fn where_indices(&self) -> Result<Vec<Var>> {
        let indices = if self.rank() == 0 { self.reshape_to(&[1])? } else { self.clone() };
        let indices = named("where_indices", indices.nonzero())?;
        indices.unbind(1)?.iter().map(|index| Ok(Var::new(index.tensor().contiguous()?))).collect()
    }

    /// The elements where `mask` (a bool) is true, in row-major order, without other dimensions; input and mask broadcast.
    ///
    /// The host waits for the device, since the mask decides the size.
    ///
    /// # Errors
    /// If the shapes do not broadcast, the mask is no bool or on another device, or on a `meta` device, which has no
    /// values.
    ///
    /// ```
    /// use phalanx_autograd::{Var, tensor::Device};
    /// let x = Var::from_slice(&[1.0, -2.0, 3.0, -4.0], &[2, 2], Device::CPU)?;
    /// assert_eq!(x.masked_select(&x.gt_scalar(0.0)?)?.to_vec::<f64>()?, [1.0, 3.0]);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn masked_select(&self, mask: &Var) -> Result<Var> {
        const OP: &str = "masked_select";
        if mask.dtype() != DType::Bool {
            return Err(Error::dtype(OP, mask.dtype(), "bool for the mask").into());
        }
        if mask.device() != self.device() {
            return Err(Error::Device { op: OP, left: self.device(), right: mask.device() }.into());
        }
        let shape = broadcast_shapes(OP, self.shape(), mask.shape())?;
        let places = positions(OP, &mask.tensor().broadcast_to(&shape)?)?;
        let all = self.broadcast_to(&shape)?;
        named(OP, all.reshape_to(&[all.numel()])?.index_select(0, &Var::new(places)))
    }
}

/// The places of what is not 0 in the flattened tensor, on its device.
pub(super) fn positions(op: &'static str, x: &Tensor) -> Result<Tensor> {
    let places = places(op, x)?;
    Ok(Tensor::from_slice(&places, &[places.len()], x.device())?)
}

/// The places of what is not 0 in the flattened tensor, ascending.
fn places(op: &'static str, x: &Tensor) -> Result<Vec<i64>> {
    if x.device().is_meta() {
        let why = "the values decide the result's size, and a meta tensor has none".into();
        return Err(Error::Unsupported { op, device: x.device(), why }.into());
    }
    let mask = if x.dtype() == DType::Bool { x.clone() } else { kernels::ne_scalar(x, 0.into())? };
    let truths = mask.to_vec::<bool>()?;
    Ok((0..).zip(truths).filter_map(|(place, holds)| holds.then_some(place)).collect())
}

/// Counts and places: histograms, unique values, places in a sorted sequence. None has a derivative.
///
/// All are composed of `sort`, running sums and `scatter_add`. Where the elements decide on the result's shape (`unique`,
/// `bincount`) the host waits for the device, and a `meta` device refuses.
impl Var {
    /// How many elements lie in each of `bins` equal parts of `min` to `max` (which belongs to the last), in this dtype;
    /// what lies outside and NaNs are left out. With equal bounds those of the elements are taken, for which the host
    /// waits on a GPU.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, there are no bins, or a bound is not finite or `min` above `max`.
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Result<Var> {
        const NAME: &str = "histc";
        super::frame::floats(NAME, &[self])?;
        if bins == 0 {
            return Err(Error::invalid(NAME, "got 0 bins, wanted 1 at least").into());
        }
        let x = self.detach().to(DType::F64)?.reshape_to(&[self.numel()])?;
        let (mut low, mut high) = (min, max);
        if min == max && x.numel() > 0 && !matches!(x.device(), Device::Meta(_)) {
            (low, high) = (x.min_all()?.item()?, x.max_all()?.item()?);
        }
        if !(low.is_finite() && high.is_finite() && low <= high) {
            let why = format!("the range from {low} to {high} is not finite, or ends before it begins");
            return Err(Error::invalid(NAME, why).into());
        }
        if low == high {
            (low, high) = (low - 1.0, high + 1.0);
        }
        let inside = x.ge_scalar(low)?.logical_and(&x.le_scalar(high)?)?;
        let bin = x.sub_scalar(low)?.mul_scalar(bins as f64)?.div_scalar(high - low)?.floor()?;
        let last = Scalar::Float((bins - 1) as f64);
        let bin = bin.clamp(None, Some(last))?.masked_fill(&inside.logical_not()?, bins as f64)?;
        let counts = added(&bin.to(DType::I64)?, bins + 1, &Var::full(1.0, &x)?)?;
        record_none(NAME, &[self], counts.narrow(0, 0, bins)?.to(self.dtype())?.into_tensor())
    }

    /// How often each of the numbers 0, 1, .. occurs, as i64: up to the largest, and `minlength` of them at least. The host
    /// waits for the device.
    ///
    /// # Errors
    /// If this has other than one dimension, is no integer tensor, has a negative element, or is on a `meta` device.
    pub fn bincount(&self, minlength: usize) -> Result<Var> {
        let size = self.bins(minlength)?;
        added(self, size, &ones(self)?)
    }

    /// The sum of the weights of each of the numbers 0, 1, .., in f32 if they are, else in f64; otherwise as
    /// [`Var::bincount`].
    ///
    /// # Errors
    /// As [`Var::bincount`], or if the weights have another shape or require a gradient.
    pub fn bincount_weighted(&self, weights: &Var, minlength: usize) -> Result<Var> {
        const NAME: &str = "bincount";
        if weights.shape() != self.shape() {
            let got = format!("weights of shape {:?}", weights.shape());
            return Err(Error::shape(NAME, got, format!("{:?}, one an element", self.shape())).into());
        }
        let dtype = if weights.dtype() == DType::F32 { DType::F32 } else { DType::F64 };
        let sums = added(self, self.bins(minlength)?, &weights.detach().to(dtype)?)?;
        record_none(NAME, &[weights], sums.into_tensor())
    }

    /// How many bins there are.
    fn bins(&self, minlength: usize) -> Result<usize> {
        const NAME: &str = "bincount";
        if self.rank() != 1 {
            return Err(Error::shape(NAME, format!("{:?}", self.shape()), "one dimension").into());
        }
        if self.dtype().is_float() || self.dtype() == DType::Bool {
            return Err(Error::dtype(NAME, self.dtype(), "an integer dtype").into());
        }
        not_meta(NAME, self)?;
        if self.numel() == 0 {
            return Ok(minlength);
        }
        let wide = self.to(DType::I64)?;
        let (least, most) = (wide.min_all()?.item::<i64>()?, wide.max_all()?.item::<i64>()?);
        if least < 0 {
            return Err(Error::range(NAME, format!("the element {least}"), "numbers from 0 up").into());
        }
        Ok(minlength.max(most as usize + 1))
    }

    /// The different elements of all in ascending order, the place of each element among them (i64, of this shape), and how
    /// often each occurs (i64). NaNs differ from each other. The host waits for the device.
    ///
    /// # Errors
    /// If this requires a gradient, or is on a `meta` device.
    pub fn unique(&self) -> Result<(Var, Var, Var)> {
        const NAME: &str = "unique";
        not_meta(NAME, self)?;
        let n = self.numel();
        let (sorted, order) = self.detach().reshape_to(&[n])?.sort(0, false)?;
        if n == 0 {
            let places = Tensor::zeros(self.shape(), DType::I64, self.device())?;
            return Ok((record_none(NAME, &[self], sorted.into_tensor())?, Var::new(places), order));
        }
        let differs = sorted.narrow(0, 1, n - 1)?.ne(&sorted.narrow(0, 0, n - 1)?)?.to(DType::I64)?;
        let first = Var::new(Tensor::zeros(&[1], DType::I64, self.device())?);
        let starts = Var::cat(&[&first, &differs], 0)?;
        let groups = starts.cumsum(0)?;
        let count = groups.narrow(0, n - 1, 1)?.item::<i64>()? as usize + 1;
        let places = Var::new(kernels::arange(0, n as i64, 1, DType::I64, self.device())?);
        let at = added(&groups, count, &places.mul(&starts)?)?;
        let values = sorted.gather(0, &at)?;
        let inverse = added(&order, n, &groups)?.reshape_to(self.shape())?;
        let counts = added(&groups, count, &ones(self)?)?;
        Ok((record_none(NAME, &[self], values.into_tensor())?, inverse, counts))
    }

    /// Where each of `values` would be put into this ascending sequence (i64, of the values' shape): before equal
    /// elements, or behind them if `right`. A sequence of several dimensions is a sequence for each line of the values,
    /// which have the same dimensions but the last.
    ///
    /// # Errors
    /// If dtypes or devices differ, or the shapes do not fit.
    pub fn searchsorted(&self, values: &Var, right: bool) -> Result<Var> {
        const NAME: &str = "searchsorted";
        same(NAME, &[self, values])?;
        let rank = self.rank();
        let fits = rank == 1
            || rank == values.rank() && rank > 0 && self.shape()[..rank - 1] == values.shape()[..rank - 1];
        if !fits {
            let got = format!("a sequence of shape {:?} and values of {:?}", self.shape(), values.shape());
            let wanted =
                "one dimension of the sequence, or as many as the values, of the same sizes but the last";
            return Err(Error::shape(NAME, got, wanted).into());
        }
        let shape = Dims::from_slice(values.shape());
        let (sequence, values) = (self.detach(), values.detach());
        let values = if rank == 1 { values.reshape_to(&[values.numel()])? } else { values };
        let (n, m, last) = (sequence.shape()[rank - 1], values.shape()[rank - 1], rank - 1);
        // The order is stable: what comes first stays before its equals. Then what lies before each is counted.
        let (whole, start) = match right {
            true => (Var::cat(&[&sequence, &values], last)?, n),
            false => (Var::cat(&[&values, &sequence], last)?, 0),
        };
        let order = whole.sort(last, false)?.1;
        let counted = if right { order.lt_scalar(n as i64)? } else { order.ge_scalar(m as i64)? };
        let before = counted.cumsum(last)?;
        let zeros = Var::new(Tensor::zeros(order.shape(), DType::I64, order.device())?);
        zeros.scatter_add(last, &order, &before)?.narrow(last, start, m)?.reshape_to(&shape)
    }
}

/// A one for each element.
fn ones(x: &Var) -> Result<Var> {
    Var::new(Tensor::zeros(&[x.numel()], DType::I64, x.device())?).add_scalar(1)
}

/// `source` added at `places` of so many zeros.
fn added(places: &Var, size: usize, source: &Var) -> Result<Var> {
    let zeros = Var::new(Tensor::zeros(&[size], source.dtype(), source.device())?);
    zeros.scatter_add(0, &places.to(DType::I64)?, source)
}

/// An error on a device without elements.
fn not_meta(name: &'static str, x: &Var) -> Result<()> {
    match x.device() {
        device @ Device::Meta(_) => {
            let why = "the result's shape depends on the elements, of which there are none".into();
            Err(Error::Unsupported { op: name, device, why }.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::check_twice;

    #[test]
    fn places_are_listed_in_row_major_order_for_any_dtype_and_rank() {
        let x = Var::from_slice(&[0.0, f64::NAN, -0.0, 2.0, 0.0, -1.0], &[2, 3], Device::CPU).unwrap();
        assert_eq!(x.nonzero().unwrap().to_vec::<i64>().unwrap(), [0, 1, 1, 0, 1, 2]);
        let turned = x.transpose(0, 1).unwrap();
        assert_eq!(turned.nonzero().unwrap().to_vec::<i64>().unwrap(), [0, 1, 1, 0, 2, 1]);
        let [rows, columns] = <[Var; 2]>::try_from(x.where_indices().unwrap()).unwrap();
        assert_eq!(rows.to_vec::<i64>().unwrap(), [0, 1, 1]);
        assert_eq!(columns.to_vec::<i64>().unwrap(), [1, 0, 2]);
        for (value, count) in [(0_i64, 0), (3, 1)] {
            let one = Var::scalar(value, Device::CPU).unwrap();
            assert_eq!(one.nonzero().unwrap().shape(), [count, 0]);
            assert_eq!(one.where_indices().unwrap()[0].to_vec::<i64>().unwrap(), vec![0; count]);
        }
        let none = x.narrow(0, 0, 0).unwrap();
        assert_eq!(none.nonzero().unwrap().shape(), [0, 2]);
        assert_eq!(none.to(DType::U8).unwrap().where_indices().unwrap()[1].shape(), [0]);
    }

    #[test]
    fn selection_has_its_derivatives_and_broadcasts_either_way() {
        let mask = Var::from_slice(&[true, false, true], &[3], Device::CPU).unwrap();
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.masked_select(&mask));
        check_twice(&[&[2, 1]], |v| v[0].tanh()?.masked_select(&mask));
        let never = Var::from_slice(&[false], &[1], Device::CPU).unwrap();
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.masked_select(&never));
    }

    #[test]
    fn without_values_there_is_an_error_that_says_why() {
        let x = Var::arange(0, 4, 1, DType::F32, Device::Meta(0)).unwrap();
        let mask = x.gt_scalar(1.0).unwrap();
        for error in [x.nonzero().unwrap_err(), x.masked_select(&mask).unwrap_err()] {
            assert!(error.to_string().contains("the values decide the result's size"), "{error}");
        }
        let x = Var::arange(0, 4, 1, DType::F32, Device::CPU).unwrap();
        assert!(x.masked_select(&x).unwrap_err().to_string().contains("masked_select: got dtype f32"));
    }

    fn var<T: phalanx_tensor::Value>(values: &[T]) -> Var {
        Var::from_slice(values, &[values.len()], Device::CPU).unwrap()
    }

    #[test]
    fn histograms_leave_out_what_lies_outside_and_find_their_own_bounds() {
        let x = var(&[0.0, 1.0, 0.99, 2.0, -0.1, f64::NAN, f64::INFINITY]);
        assert_eq!(x.histc(2, 0.0, 1.0).unwrap().to_vec::<f64>().unwrap(), [1.0, 2.0]);
        assert_eq!(var(&[1.0, 2.0, 3.0]).histc(2, 0.0, 0.0).unwrap().to_vec::<f64>().unwrap(), [1.0, 2.0]);
        assert_eq!(
            var(&[4.0, 4.0]).histc(4, 0.0, 0.0).unwrap().to_vec::<f64>().unwrap(),
            [0.0, 0.0, 2.0, 0.0]
        );
        assert!(x.histc(2, 0.0, 0.0).unwrap_err().to_string().starts_with("histc"));
        let refused = x.histc(0, 0.0, 1.0).err().unwrap().to_string();
        assert!(refused.contains("histc: got 0 bins"), "{refused}");
        let refused = x.histc(2, 1.0, 0.0).err().unwrap().to_string();
        assert!(refused.contains("histc: the range from 1 to 0"), "{refused}");
        assert_eq!(var::<f64>(&[]).histc(2, 0.0, 0.0).unwrap().to_vec::<f64>().unwrap(), [0.0, 0.0]);
    }

    #[test]
    fn counts_refuse_what_cannot_be_counted() {
        assert_eq!(var(&[1i64, 3, 1]).bincount(0).unwrap().to_vec::<i64>().unwrap(), [0, 2, 0, 1]);
        assert_eq!(var(&[2u8]).bincount(5).unwrap().to_vec::<i64>().unwrap(), [0, 0, 1, 0, 0]);
        assert_eq!(var::<i64>(&[]).bincount(2).unwrap().to_vec::<i64>().unwrap(), [0, 0]);
        let weighted = var(&[1i64, 1]).bincount_weighted(&var(&[0.5, 2.0]), 0).unwrap();
        assert_eq!(weighted.to_vec::<f64>().unwrap(), [0.0, 2.5]);
        let meta = Var::new(Tensor::empty(&[3], DType::I64, Device::Meta(0)).unwrap());
        for refused in [var(&[-1i64]).bincount(0), var(&[1.0]).bincount(0), meta.bincount(0)] {
            assert!(refused.unwrap_err().to_string().starts_with("bincount"));
        }
        assert!(meta.unique().map(|_| ()).unwrap_err().to_string().starts_with("unique"));
    }

    #[test]
    fn unique_values_come_with_places_and_counts() {
        let x = Var::from_slice(&[2.0f32, -1.0, 2.0, 0.0, -0.0, 7.0], &[2, 3], Device::CPU).unwrap();
        let (values, inverse, counts) = x.unique().unwrap();
        assert_eq!(values.to_vec::<f32>().unwrap(), [-1.0, 0.0, 2.0, 7.0]);
        assert_eq!(
            (inverse.shape(), inverse.to_vec::<i64>().unwrap()),
            (&[2, 3][..], vec![2, 0, 2, 1, 1, 3])
        );
        assert_eq!(counts.to_vec::<i64>().unwrap(), [1, 2, 2, 1]);
        assert_eq!(var(&[f64::NAN, f64::NAN, 1.0]).unique().unwrap().2.to_vec::<i64>().unwrap(), [1, 1, 1]);
        assert_eq!(var(&[true, false, true]).unique().unwrap().0.to_vec::<bool>().unwrap(), [false, true]);
        assert_eq!(var::<i64>(&[]).unique().unwrap().0.shape(), [0]);
    }

    #[test]
    fn places_in_sequences_of_several_dimensions_are_found_line_by_line() {
        let sequence = Var::from_slice(&[1i64, 3, 3, 0, 2, 9], &[2, 3], Device::CPU).unwrap();
        let values = Var::from_slice(&[3i64, 0, 2, 10], &[2, 2], Device::CPU).unwrap();
        assert_eq!(sequence.searchsorted(&values, false).unwrap().to_vec::<i64>().unwrap(), [1, 0, 1, 3]);
        assert_eq!(sequence.searchsorted(&values, true).unwrap().to_vec::<i64>().unwrap(), [3, 0, 2, 3]);
        let line = var(&[1.0, 2.0]);
        let number = Var::scalar(f64::NAN, Device::CPU).unwrap();
        let found = line.searchsorted(&number, false).unwrap();
        assert_eq!((found.rank(), found.item::<i64>().unwrap()), (0, 2));
        let refused = sequence.searchsorted(&line, false).err().unwrap().to_string();
        assert!(refused.contains("searchsorted: got dtype f64"), "{refused}");
        let refused = line.searchsorted(&values, false).err().unwrap().to_string();
        assert!(refused.contains("searchsorted: got dtype i64"), "{refused}");
    }
}
