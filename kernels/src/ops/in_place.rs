//! Operations in place on a view: copying into it, adding to it, multiplying it by a number.

use phalanx_tensor::{Result, Tensor};

use crate::check;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{c, evaluate, modify, pointwise, refuse_overlap};

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

/// `to += x`, in place: `to` may be any view into a buffer that does not overlap itself, and `x` of another
/// floating-point dtype, which is converted first. The bits are those of the sum computed apart.
///
/// # Errors
/// If shapes or devices differ, or a dtype is no floating-point one.
pub fn accumulate_(to: &mut Tensor, x: &Tensor) -> Result<()> {
    modify("accumulate", Add, to, Some(x))
}

/// `to += alpha x`, in place, rounded once; otherwise as [`accumulate_`].
///
/// # Errors
/// As [`accumulate_`].
pub fn add_scaled_(to: &mut Tensor, x: &Tensor, alpha: f64) -> Result<()> {
    modify("add_scaled", AddScaled { alpha }, to, Some(x))
}

pointwise!(Add, |to, x| to + x);
pointwise!(AddScaled { alpha }, |to, x| x.mul_add(c(alpha), to));

/// `x *= factor`, in place; `x` may be any view that does not overlap itself.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn scale_(x: &mut Tensor, factor: f64) -> Result<()> {
    modify("scale", Scale { factor }, x, None)
}

pointwise!(Scale { factor }, |x, _same| x * c(factor));

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::super::{cast, scale_};
    use super::*;
    use crate::testing::{assert_close, floats, make, tensors, tolerance, values};

    #[test]
    fn every_view_receives_every_layout() {
        for x in tensors(&|i| i as f64 % 100.0) {
            let larger: Vec<usize> = x.shape().iter().map(|n| n + 3).collect();
            let order: Vec<usize> = (0..x.rank()).rev().collect();
            let back: Vec<usize> = larger.iter().rev().copied().collect();
            let plain = Tensor::zeros(&larger, x.dtype(), Device::CPU).unwrap();
            let transposed = Tensor::zeros(&back, x.dtype(), Device::CPU).unwrap().permute(&order).unwrap();
            for whole in [plain, transposed] {
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

    #[test]
    fn every_view_and_dtype_is_modified_in_place_and_nothing_else() {
        for x in tensors(&floats(-4.0, 4.0)) {
            let larger: Vec<usize> = x.shape().iter().map(|n| n + 2).collect();
            let whole = cast(&Tensor::zeros(&larger, DType::F64, Device::CPU).unwrap(), x.dtype()).unwrap();
            let view =
                |t: &Tensor| (0..x.rank()).fold(t.clone(), |t, d| t.narrow(d, 1, x.shape()[d]).unwrap());
            accumulate_(&mut view(&whole), &x).unwrap();
            add_scaled_(&mut view(&whole), &x, 2.0).unwrap();
            scale_(&mut view(&whole), -0.5).unwrap();
            // One rounding of 3 x at most; the rest is exact.
            let rounded = |x: f64| values(&make(&[1], whole.dtype(), &|_| 3.0 * x))[0] * -0.5;
            let wanted: Vec<f64> = values(&x).into_iter().map(rounded).collect();
            assert_eq!(values(&view(&whole)), wanted);
            let sum = |v: Vec<f64>| v.iter().map(|x| x.abs()).sum::<f64>();
            assert_eq!(sum(values(&whole)), sum(wanted));
        }
    }

    #[test]
    fn the_destination_may_be_the_operand_but_not_overlap_itself() {
        let mut x = make(&[3], DType::BF16, &|i| i as f64);
        accumulate_(&mut x.clone(), &x).unwrap();
        assert_eq!(values(&x), [0.0, 2.0, 4.0]);
        add_scaled_(&mut x, &make(&[3], DType::F32, &|_| 1.0), 3.0).unwrap();
        assert_eq!(values(&x), [3.0, 5.0, 7.0]);
        let mut expanded = make(&[1], DType::F32, &|_| 1.0).broadcast_to(&[4]).unwrap();
        let ones = make(&[4], DType::F32, &|_| 1.0);
        assert!(accumulate_(&mut expanded, &ones).unwrap_err().to_string().contains("overlaps itself"));
        assert!(accumulate_(&mut x, &ones).is_err());
    }

    #[test]
    fn every_element_is_scaled_where_it_lies() {
        for mut x in tensors(&floats(-3.0, 3.0)) {
            let before = values(&x);
            scale_(&mut x, 0.3).unwrap();
            for (got, x0) in values(&x).into_iter().zip(before) {
                assert_close(got, 0.3 * x0, tolerance(x.dtype()));
            }
        }
    }
}
