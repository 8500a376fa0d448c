//! Margins around a tensor.

use phalanx_tensor::{Dims, Error, Result, Scalar, Tensor};

use crate::ops::copy::copy_;
use crate::ops::full::full;

/// `x` with `before` elements of `value` put before it and `after` behind it along each of the last dimensions:
/// `margins[i]` is `(before, after)` of dimension `rank - 1 - i`. Negative margins crop.
///
/// # Errors
/// If there are more margins than dimensions, or they crop more than there is.
pub fn pad(x: &Tensor, margins: &[(isize, isize)], value: Scalar) -> Result<Tensor> {
    const OP: &str = "pad";
    let wrong = || {
        let wanted = "margins of at most as many dimensions, which leave sizes of at least 0";
        Error::shape(OP, format!("{margins:?} for shape {:?}", x.shape()), wanted)
    };
    if margins.len() > x.rank() {
        return Err(wrong());
    }
    let (mut shape, mut inside, mut places) = (Dims::from_slice(x.shape()), x.clone(), Vec::new());
    for (i, &(before, after)) in margins.iter().enumerate() {
        let dim = x.rank() - 1 - i;
        let size = x.shape()[dim];
        let wanted = size.checked_add_signed(before).and_then(|n| n.checked_add_signed(after));
        shape[dim] = wanted.ok_or_else(wrong)?;
        let (crop, crop_end) = (before.min(0).unsigned_abs(), after.min(0).unsigned_abs());
        // A crop beyond the elements is filled from the other side's margin.
        let (start, end) = (crop.min(size), size.saturating_sub(crop_end));
        inside = inside.narrow(dim, start, end.saturating_sub(start))?;
        places.push((dim, before.max(0).unsigned_abs().min(shape[dim]), end.saturating_sub(start)));
    }
    let out = full(&shape, value, x.dtype(), x.device())?;
    let place = |t: Tensor, &(dim, start, length): &(usize, usize, usize)| t.narrow(dim, start, length);
    copy_(&mut places.iter().try_fold(out.clone(), place)?, &inside)?;
    Ok(out)
}
