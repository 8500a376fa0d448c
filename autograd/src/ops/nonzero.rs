//! What is not zero: its places (`nonzero`, `where_indices`) and the elements there (`masked_select`).
//!
//! The values decide the result's size, so the host waits for the device and reads the mask; a `meta` tensor has no values and
//! is refused. `masked_select` then is `index_select` of the flattened input, whose derivative adds `dy` at those places.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Error, Tensor, broadcast_shapes};

use super::composed::named;
use crate::{Result, Var};

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
    /// If the shapes do not broadcast, the mask is no bool or on another device, or on a `meta` device, which has no values.
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

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use crate::Var;
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
}
