//! Adding to a tensor in place.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, modify, pointwise};

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

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{accumulate_, add_scaled_};
    use crate::ops::{cast, scale_};
    use crate::testing::{floats, make, tensors, values};

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
}
