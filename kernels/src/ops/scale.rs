//! Multiplying a tensor by a number in place.

use phalanx_tensor::{Result, Tensor};

use crate::check;
use crate::pointwise::PIECE;
use crate::real::{Real, for_real};
use crate::simd::Float;
use crate::strided::for_each_run_mut;

/// `x *= factor`, in place, whatever the strides.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn scale_(x: &mut Tensor, factor: f64) -> Result<()> {
    check::float("scale", x)?;
    if x.device().is_meta() {
        x.bump_version();
        return Ok(());
    }
    for_real!("scale", x.dtype(), T => scale::<T>(x, factor))
}

fn scale<T: Real>(x: &mut Tensor, factor: f64) -> Result<()> {
    let (layout, pool) = (x.layout().clone(), x.device().pool()?);
    let factor = T::Wide::from_f64(factor);
    let scaled = |x: &mut T| *x = T::narrow(x.widen() * factor);
    let mut target = x.write::<T>("scale")?;
    if layout.is_contiguous() {
        let target = &mut target[layout.offset()..][..layout.numel()];
        pool.for_each_chunk(target, PIECE, |_, piece| piece.iter_mut().for_each(scaled));
    } else {
        for_each_run_mut(&mut target, &layout, |run| run.for_each(|_, x| scaled(x)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, floats, tensors, tolerance, values};

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
