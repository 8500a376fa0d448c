//! Blocks of elements converted from one dtype to another, in vectors.
//!
//! bf16 and f16 are converted by way of f32, which holds every value of both. An f64 or an integer that f32 does not hold is first
//! rounded to odd, so that its bf16 or f16 has the bits of a single rounding.

use std::ops::BitAnd;

use bytemuck::{Zeroable, cast_slice};
use phalanx_tensor::{DType, Element, bf16, f16};

use super::{Number, to_odd, to_odd_i32};
use crate::moves::by_size;
use crate::real::Real;
use crate::simd::{Isa, Kernel, dispatch};
use crate::source::BLOCK;

/// Elements that are converted at a time: to clear the room for more takes longer than to convert them.
const PART: usize = BLOCK / 2;

/// A dtype's elements as those of another that is converted directly.
pub(crate) trait Convert: Number {
    /// f32 for halves, else the type itself.
    type Direct: Number;

    /// The elements in that type, where they lie or in `scratch`.
    fn direct<'a>(from: &'a [Self], scratch: &'a mut [Self::Direct]) -> &'a [Self::Direct];

    /// Sets elements from such ones, one for one, at most [`PART`]; `near` is room for as many.
    fn set<T: Number>(to: &mut [Self], from: &[T], near: &mut [f32; PART]);
}

/// Sets elements from those of another dtype, one for one.
pub(crate) fn convert<T: Convert, U: Convert>(from: &[T], to: &mut [U]) {
    let (mut scratch, mut near) = ([<T::Direct as Zeroable>::zeroed(); PART], [0.0; PART]);
    for (from, to) in from.chunks(PART).zip(to.chunks_mut(PART)) {
        U::set(to, T::direct(from, &mut scratch[..from.len()]), &mut near);
    }
}

/// Sets bytes to whether elements are other than zero, as floats are where any bit but the sign's is set.
pub(crate) fn convert_to_bool<T: Element>(from: &[T], to: &mut [u8]) {
    let sign = u32::from(T::DTYPE.is_float());
    by_size!(T, B => dispatch(NonZero::<B> { from: cast_slice(from), to, kept: B::MAX >> sign }));
}

macro_rules! direct {
    ($($type:ty),*) => {$(
        impl Convert for $type {
            type Direct = $type;

            #[inline(always)]
            fn direct<'a>(from: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                from
            }

            #[inline(always)]
            fn set<T: Number>(to: &mut [Self], from: &[T], _: &mut [f32; PART]) {
                dispatch(Each { from, to });
            }
        }
    )*};
}

macro_rules! by_way_of_f32 {
    ($($type:ty),*) => {$(
        impl Convert for $type {
            type Direct = f32;

            #[inline(always)]
            fn direct<'a>(from: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
                <$type>::widen_all(from, scratch);
                scratch
            }

            #[inline(always)]
            fn set<T: Number>(to: &mut [Self], from: &[T], near: &mut [f32; PART]) {
                if T::DTYPE == DType::F32 {
                    return <$type>::narrow_all(cast_slice(from), to);
                }
                let near = &mut near[..from.len()];
                dispatch(ToOdd { from, to: near });
                <$type>::narrow_all(near, to);
            }
        }
    )*};
}

direct!(f64, f32, i64, i32, u8);
by_way_of_f32!(bf16, f16);

/// Numbers from numbers.
struct Each<'a, T, U> {
    from: &'a [T],
    to: &'a mut [U],
}

impl<T: Number, U: Number> Kernel for Each<'_, T, U> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = U::from_number(from);
        }
    }
}

/// [`to_odd`] of all.
struct ToOdd<'a, T> {
    from: &'a [T],
    to: &'a mut [f32],
}

impl<T: Number> Kernel for ToOdd<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = match T::INTEGER && size_of::<T>() <= 4 {
                true => to_odd_i32(from.to_i64() as i32),
                false => to_odd(from.to_f64()),
            };
        }
    }
}

/// Whether elements are other than zero when the bits that `kept` has not are left out.
struct NonZero<'a, B> {
    from: &'a [B],
    to: &'a mut [u8],
    kept: B,
}

impl<B: Copy + Default + PartialEq + BitAnd<Output = B>> Kernel for NonZero<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = u8::from(from & self.kept != B::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::{Convert, convert, convert_to_bool};
    use crate::ops::cast::Number;
    use crate::real::for_element;

    /// Numbers at which some dtype rounds, saturates or wraps, zeros, infinities and NaN.
    fn numbers<T: Number>(len: usize) -> Vec<T> {
        let bounds =
            [0.0, 1.0, 1.00390625, 127.5, 255.0, 256.9, 65504.0, 65520.0, 2147483647.5, 1e10, 9.3e18];
        let odd = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.0, 1e300, 1e-40, 6e-8];
        let all: Vec<f64> = bounds.iter().flat_map(|&x| [x, -x, x + 0.3, -x - 0.3]).chain(odd).collect();
        (0..len).map(|i| T::from_f64(all[i % all.len()] * if i < 40 { 1.0 } else { 0.37 })).collect()
    }

    fn check<T: Convert, U: Convert>() {
        for len in [0, 1, 7, 33, 129, 2050] {
            let x = numbers::<T>(len);
            let (mut got, mut bools) = (vec![U::zeroed(); len], vec![7; len]);
            convert(&x, &mut got);
            convert_to_bool(&x, &mut bools);
            for ((x, got), bool) in x.iter().zip(got).zip(bools) {
                let wanted = U::from_number(*x);
                let alike = bytemuck::bytes_of(&got) == bytemuck::bytes_of(&wanted);
                assert!(
                    alike || wanted.to_f64().is_nan() && got.to_f64().is_nan(),
                    "{x:?} to {got:?}, wanted {wanted:?}"
                );
                assert_eq!(bool, u8::from(x.to_f64() != 0.0), "{x:?}");
            }
        }
    }

    #[test]
    fn blocks_are_converted_as_single_numbers_are() {
        for from in DType::ALL {
            for to in DType::ALL {
                let done: phalanx_tensor::Result<()> =
                    for_element!(from, T => for_element!(to, U => { check::<T, U>(); Ok(()) }));
                done.unwrap();
            }
        }
    }
}
