//! Copies into a view.

use phalanx_tensor::{Result, Tensor};

use crate::check;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{evaluate, refuse_overlap};

/// Sets `to`'s elements to `from`'s, converted to its dtype, in place: `to` may be any view that does not overlap
/// itself. The two may share a storage: all is read before anything is written.
///
/// # Errors
/// If shapes or devices differ, or the destination overlaps itself.
pub fn copy_(to: &mut Tensor, from: &Tensor) -> Result<()> {
    const OP: &str = "copy";
    check::same_device(OP, &[to, from])?;
    check::shape(OP, "a tensor", from, to.shape())?;
    refuse_overlap(OP, to)?;
    let from = &super::cast(from, to.dtype())?;
    if to.shares_storage(from) {
        return copy_(to, &from.copy()?);
    }
    evaluate(OP, &Expression::of_bits("x[0]", to.dtype(), &[]), [from], to, |to| to.copy_over(OP, from))
}

/// The storage's bytes as elements.
pub(crate) fn elements<T: bytemuck::Pod>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::copy_;
    use crate::testing::{make, tensors, values};

    #[test]
    fn every_view_receives_every_layout() {
        for x in tensors(&|i| i as f64 % 100.0) {
            let larger: Vec<usize> = x.shape().iter().map(|n| n + 3).collect();
            let order: Vec<usize> = (0..x.rank()).rev().collect();
            let back: Vec<usize> = larger.iter().rev().copied().collect();
            let plain = Tensor::zeros(&larger, x.dtype(), Device::CPU).unwrap();
            let turned = Tensor::zeros(&back, x.dtype(), Device::CPU).unwrap().permute(&order).unwrap();
            for whole in [plain, turned] {
                let view =
                    |t: &Tensor| (0..x.rank()).fold(t.clone(), |t, d| t.narrow(d, 2, x.shape()[d]).unwrap());
                copy_(&mut view(&whole), &x).unwrap();
                assert_eq!(values(&view(&whole)), values(&x));
                assert_eq!(values(&whole).iter().sum::<f64>(), values(&x).iter().sum::<f64>());
            }
        }
    }

    #[test]
    fn another_dtype_is_converted() {
        let mut x = make(&[2, 3], DType::BF16, &|_| 0.0);
        copy_(&mut x.transpose(0, 1).unwrap(), &make(&[3, 2], DType::F32, &|i| i as f64)).unwrap();
        assert_eq!(values(&x), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        copy_(&mut x, &make(&[2, 3], DType::I64, &|i| -(i as f64))).unwrap();
        assert_eq!(values(&x), [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]);
    }

    #[test]
    fn a_destination_that_overlaps_itself_is_refused_on_every_device() {
        for device in [Device::CPU, Device::Meta(0)] {
            let from = Tensor::zeros(&[2, 2], DType::F32, device).unwrap();
            let held = Tensor::zeros(&[4], DType::F32, device).unwrap();
            let one = Tensor::zeros(&[2, 1], DType::F32, device).unwrap();
            for mut to in [held.as_strided(&[2, 2], &[1, 1], 0).unwrap(), one.broadcast_to(&[2, 2]).unwrap()]
            {
                let error = copy_(&mut to, &from).unwrap_err().to_string();
                assert!(error.starts_with("copy: the destination overlaps itself: shape [2, 2]"), "{error}");
            }
        }
    }

    #[test]
    fn copying_between_views_of_one_storage_reads_before_it_writes() {
        let x = make(&[6], DType::F32, &|i| i as f64);
        copy_(&mut x.narrow(0, 1, 5).unwrap(), &x.narrow(0, 0, 5).unwrap()).unwrap();
        assert_eq!(values(&x), [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
    }
}
