//! Multiplying a tensor by a number in place.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, modify, pointwise};

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
