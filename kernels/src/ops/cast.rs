//! Conversions between dtypes.

use phalanx_tensor::{DType, Element, Result, Tensor, bf16, f16};

use crate::pointwise::map_scalar;
use crate::real::for_element;

/// `x` in another dtype; `x` itself if it has that dtype. Floats round to nearest even, float to integer truncates
/// (saturating, NaN to 0), anything to bool is `x != 0`.
///
/// # Errors
/// If the copy cannot be allocated.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let mut out = Tensor::empty(x.shape(), dtype, x.device())?;
    cast_into(x, &mut out)?;
    Ok(out)
}

/// [`cast`] into a contiguous tensor of `x`'s shape.
pub(crate) fn cast_into(x: &Tensor, out: &mut Tensor) -> Result<()> {
    if out.dtype() == DType::Bool {
        return for_element!(x.dtype(), T => {
            map_scalar("cast", |[x]: [T; 1]| u8::from(x.to_f64() != 0.0), [x], out)
        });
    }
    for_element!(x.dtype(), T => for_element!(out.dtype(), U => {
        map_scalar("cast", |[x]: [T; 1]| <U as Number>::from_number(x), [x], out)
    }))
}

/// A stored number.
pub(crate) trait Number: Element {
    /// Whether it is an integer.
    const INTEGER: bool;
    /// The nearest f64.
    fn to_f64(self) -> f64;
    /// The integer; a float truncates and saturates.
    fn to_i64(self) -> i64;
    /// The nearest value.
    fn from_f64(x: f64) -> Self;
    /// The low bits.
    fn from_i64(x: i64) -> Self;

    /// From another number, by way of whichever of f64 and i64 holds it exactly.
    #[inline(always)]
    fn from_number<T: Number>(x: T) -> Self {
        if T::INTEGER { Self::from_i64(x.to_i64()) } else { Self::from_f64(x.to_f64()) }
    }
}

macro_rules! number {
    ($($type:ty, $integer:expr, $x:ident, $to_f64:expr, $to_i64:expr, $from_f64:expr, $from_i64:expr;)*) => {$(
        impl Number for $type {
            const INTEGER: bool = $integer;
            #[inline(always)]
            fn to_f64(self) -> f64 {
                let $x = self;
                $to_f64
            }
            #[inline(always)]
            fn to_i64(self) -> i64 {
                let $x = self;
                $to_i64
            }
            #[inline(always)]
            fn from_f64($x: f64) -> Self {
                $from_f64
            }
            #[inline(always)]
            fn from_i64($x: i64) -> Self {
                $from_i64
            }
        }
    )*};
}

number! {
    f64, false, x, x, x as i64, x, x as f64;
    f32, false, x, f64::from(x), x as i64, x as f32, x as f32;
    bf16, false, x, x.to_f64(), x.to_f64() as i64, bf16::from_f64(x), bf16::from_f64(x as f64);
    f16, false, x, x.to_f64(), x.to_f64() as i64, f16::from_f64(x), f16::from_f64(x as f64);
    i64, true, x, x as f64, x, x as i64, x;
    i32, true, x, f64::from(x), i64::from(x), x as i32, x as i32;
    u8, true, x, f64::from(x), i64::from(x), x as i64 as u8, x as u8;
}
