//! Margins around a tensor.

use phalanx_tensor::{Dims, Error, Result, Scalar, Tensor};

use crate::ops::copy::copy_;
use crate::ops::full::full_for;

/// `x` with `before` elements of `value` put before it and `after` behind it along each of the last dimensions:
/// `margins[i]` is `(before, after)` of dimension `rank - 1 - i`. Negative margins crop.
///
/// # Errors
/// If there are more margins than dimensions, they crop more than there is, the result is too large, or an integer dtype
/// cannot hold the value.
pub fn pad(x: &Tensor, margins: &[(isize, isize)], value: Scalar) -> Result<Tensor> {
    const OP: &str = "pad";
    let wrong = || {
        let wanted = "margins of at most as many dimensions, which crop no more than there is";
        Error::shape(OP, format!("{margins:?} for shape {:?}", x.shape()), wanted)
    };
    if margins.len() > x.rank() {
        return Err(wrong());
    }
    let (mut shape, mut inside, mut places) = (Dims::from_slice(x.shape()), x.clone(), Vec::new());
    for (i, &(before, after)) in margins.iter().enumerate() {
        let dim = x.rank() - 1 - i;
        let size = x.shape()[dim];
        let (crop, crop_end) = (before.min(0).unsigned_abs(), after.min(0).unsigned_abs());
        let (margin, margin_end) = (before.max(0).unsigned_abs(), after.max(0).unsigned_abs());
        let length = size.checked_sub(crop.saturating_add(crop_end)).ok_or_else(wrong)?;
        let padded = margin.checked_add(length).and_then(|n| n.checked_add(margin_end));
        shape[dim] = padded.ok_or_else(wrong)?;
        inside = inside.narrow(dim, crop, length)?;
        places.push((dim, margin, length));
    }
    let out = full_for(OP, &shape, value, x.dtype(), x.device())?;
    let place = |t: Tensor, &(dim, start, length): &(usize, usize, usize)| t.narrow(dim, start, length);
    copy_(&mut places.iter().try_fold(out.clone(), place)?, &inside)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::pad;
    use crate::testing::{make, values};

    #[test]
    fn margins_fill_and_negative_ones_crop() {
        let x = make(&[2, 3], DType::F16, &|i| i as f64);
        let y = pad(&x, &[(1, -1), (0, 1)], 9.into()).unwrap();
        assert_eq!((y.shape(), values(&y)), (&[3, 3][..], vec![9.0, 0.0, 1.0, 9.0, 3.0, 4.0, 9.0, 9.0, 9.0]));
        assert_eq!(pad(&x, &[(-2, -1)], 0.into()).unwrap().shape(), [2, 0]);
        assert_eq!(values(&pad(&x, &[(-3, 2)], 7.into()).unwrap()), [7.0; 4]);
        assert!(pad(&x, &[(-4, 3)], 0.into()).is_err() && pad(&x, &[(3, -4)], 0.into()).is_err());
        assert!(pad(&x, &[(-2, -2)], 0.into()).is_err() && pad(&x, &[(0, 0); 3], 0.into()).is_err());
        assert!(pad(&x, &[(isize::MAX, isize::MAX)], 0.into()).is_err());
        let bytes = crate::ops::cast(&x, DType::U8).unwrap();
        let error = pad(&bytes, &[(1, 1)], 300.into()).unwrap_err().to_string();
        assert_eq!(error, "pad: got the number 300 for a tensor of u8, wanted an integer from 0 to 255");
    }
}
