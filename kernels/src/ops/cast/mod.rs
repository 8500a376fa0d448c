//! Conversions between dtypes.

use std::ops::BitAnd;

use bytemuck::{Zeroable, cast_slice};
use phalanx_tensor::{DType, Element, Result, Tensor, bf16, f16};

use crate::block_reader::BLOCK;
use crate::data_movement::by_size;
use crate::pointwise::cuda::{Expression, Numbers, converted_name};
use crate::pointwise::{in_order, map_blocks};
use crate::real::{Real, for_element};
use crate::simd::{Isa, Kernel, dispatch, truncate_f32_to_i32, truncate_to_i32, truncate_to_i64};

/// `x` in another dtype; `x` itself if it has that dtype. Floats round to nearest even, float to integer truncates
/// (saturating, NaN to 0; a u8 keeps the low bits), anything to bool is `x != 0`.
///
/// # Errors
/// If the copy cannot be allocated.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    in_order(OP, dtype, [x], |[x], out| cast_into(x, out))
}

const OP: &str = "cast";

/// [`cast`] into a contiguous tensor of `x`'s shape.
pub(crate) fn cast_into(x: &Tensor, out: &mut Tensor) -> Result<()> {
    let text = if out.dtype() == DType::Bool { "x[0] != 0" } else { "convert<OUT>(x[0])" };
    let cuda = &Expression { text, value: converted_name(x.dtype()), numbers: Numbers::Integers(&[]) };
    match (x.dtype(), out.dtype()) {
        (DType::F32, DType::BF16) | (DType::BF16, DType::F32) => between::<bf16>(x, out, cuda),
        (DType::F32, DType::F16) | (DType::F16, DType::F32) => between::<f16>(x, out, cuda),
        (_, DType::Bool) => {
            for_element!(x.dtype(), T => map_blocks(OP, &|[x], to| convert_to_bool::<T>(x, to), cuda, [x], out))
        }
        _ => for_element!(x.dtype(), T => for_element!(out.dtype(), U => {
            map_blocks(OP, &|[x], to| convert::<T, U>(x, to), cuda, [x], out)
        })),
    }
}

/// Between f32 and a half type, either way.
fn between<H: Real<Wide = f32>>(x: &Tensor, out: &mut Tensor, cuda: &Expression<'_>) -> Result<()> {
    match out.dtype() {
        DType::F32 => map_blocks(OP, &|[x]: [&[H]; 1], to| H::widen_all(x, to), cuda, [x], out),
        _ => map_blocks(OP, &|[x], to: &mut [H]| H::narrow_all(x, to), cuda, [x], out),
    }
}

/// To f32 by rounding to odd: what is then rounded to a half is rounded as if it came from `x` itself. (The `half`
/// crate's own conversions from f64 drop the low bits before they look for ties.)
#[inline(always)]
pub(crate) fn to_odd(x: f64) -> f32 {
    // The first 15 digits after the point are more than any half has, and few enough for the smallest halves to be exact in f32
    // too. Whether others follow is in the last of them.
    const OTHERS: u64 = (1 << 37) - 1;
    let bits = x.to_bits();
    f64::from_bits((bits | ((bits & OTHERS) + OTHERS)) & !OTHERS) as f32
}

/// [`to_odd`] of an i32, in 32 bits. Where f32 does not hold it a half has none of its last nine digits.
#[inline(always)]
pub(crate) fn to_odd_i32(x: i32) -> f32 {
    const OTHERS: i32 = (1 << 8) - 1;
    let odd = (x | ((x & OTHERS) + OTHERS)) & !OTHERS;
    (if x.unsigned_abs() < 1 << 24 { x } else { odd }) as f32
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

    /// From a number given beside tensors.
    #[inline]
    fn from_scalar(x: phalanx_tensor::Scalar) -> Self {
        match x {
            phalanx_tensor::Scalar::Int(x) => Self::from_i64(x),
            phalanx_tensor::Scalar::Float(x) => Self::from_f64(x),
        }
    }

    /// From another number, by way of whichever of f64 and i64 holds it exactly. An f32 becomes an i32 without them, so that vectors
    /// stay as long: not even by way of f64 and back, which the compiler would keep in the comparisons.
    #[inline(always)]
    fn from_number<T: Number>(x: T) -> Self {
        match (T::DTYPE, Self::DTYPE) {
            (DType::F32, DType::I32) => Self::from_i64(truncate_f32_to_i32(bytemuck::cast(x)).into()),
            _ if T::INTEGER => Self::from_i64(x.to_i64()),
            _ => Self::from_f64(x.to_f64()),
        }
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
    f64, false, x, x, truncate_to_i64(x), x, x as f64;
    f32, false, x, f64::from(x), truncate_to_i64(x.into()), x as f32, x as f32;
    bf16, false, x, f64::from(x.widen()), x.widen() as i64, bf16::narrow(to_odd(x)), bf16::narrow(to_odd(x as f64));
    f16, false, x, f64::from(x.widen()), x.widen() as i64, f16::narrow(to_odd(x)), f16::narrow(to_odd(x as f64));
    i64, true, x, x as f64, x, truncate_to_i64(x), x;
    i32, true, x, f64::from(x), i64::from(x), truncate_to_i32(x), x as i32;
    u8, true, x, f64::from(x), i64::from(x), truncate_to_i64(x) as u8, x as u8;
}

/// Elements that are converted at a time: to clear the room for more takes longer than to convert them.
const PART: usize = BLOCK / 2;

/// A dtype's elements as those of another that is converted directly.
pub(crate) trait Convert: Number {
    /// f32 for halves, else the type itself.
    type Direct: Number;

    /// The elements in that type, in place or in `scratch`.
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

    use super::*;
    use crate::real::for_element;
    use crate::testing::values;

    #[test]
    fn halves_are_rounded_once_to_nearest_even() {
        // A tie is 1 + 2^-8 in bf16 and 1 + 2^-11 in f16; a hair more rounds up, however little it is.
        let tie = 1.0 + 2f64.powi(-8);
        assert_eq!(<bf16 as Number>::from_f64(tie).to_f64(), 1.0);
        for hair in [1e-15, 1e-9, 1e-6] {
            assert_eq!(<bf16 as Number>::from_f64(tie + hair).to_f64(), 1.0 + 2f64.powi(-7));
            assert_eq!(<bf16 as Number>::from_f64(-tie - hair).to_f64(), -1.0 - 2f64.powi(-7));
            assert_eq!(<bf16 as Number>::from_f64(tie - hair).to_f64(), 1.0);
        }
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(<f16 as Number>::from_f64(tie).to_f64(), 1.0);
        assert_eq!(<f16 as Number>::from_f64(tie + 1e-15).to_f64(), 1.0 + 2f64.powi(-10));
        assert!(<f16 as Number>::from_f64(f64::NAN).is_nan());
        assert_eq!(<bf16 as Number>::from_f64(1e300).to_f64(), f64::INFINITY);
        assert_eq!(<f16 as Number>::from_f64(-1e-300).to_f64(), 0.0);
    }

    /// [`to_odd`] by comparisons: the nearest f32, made odd where it is not the number, from the side of zero.
    fn to_odd_slowly(x: f64) -> f32 {
        let nearest = x as f32;
        let (size, wanted) = (f64::from(nearest.abs()), x.abs());
        let (above, below) = (u32::from(size > wanted), u32::from(size < wanted));
        f32::from_bits((nearest.to_bits() - above) | above | below)
    }

    #[test]
    fn what_is_rounded_to_odd_becomes_the_nearest_half() {
        let halves = |x: f32| {
            let nan = |bits: u16, nan: bool| if nan { 0 } else { bits };
            [nan(bf16::narrow(x).to_bits(), x.is_nan()), nan(f16::narrow(x).to_bits(), x.is_nan())]
        };
        let mut state = 1u64;
        let mut any = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state
        };
        for i in 0..400_000 {
            // Any bits, or few of them below a half's, with an exponent that halves have.
            let bits = any() ^ any() >> 32;
            let near = bits & 0x800f_ffff_ffff_ffff & u64::MAX << [52, 45, 44, 42, 41, 29, 23, 3][i % 8];
            let exponent = (1023 - 160 + any() % 300) << 52;
            for x in
                [f64::from_bits(bits), f64::from_bits(near | exponent), f64::from_bits((near | exponent) + 1)]
            {
                assert_eq!(halves(to_odd(x)), halves(to_odd_slowly(x)), "{x:e}");
            }
            let few = u32::MAX << [0, 7, 8, 9, 15, 16, 17, 23][i % 8];
            let x = (bits as u32 & few) as i32 >> (i / 8 % 31);
            for x in [x, x.wrapping_add(1), x.wrapping_sub(1)] {
                assert_eq!(halves(to_odd_i32(x)), halves(to_odd_slowly(x.into())), "{x}");
            }
        }
    }

    #[test]
    fn casts_in_vectors_have_the_bits_of_single_ones() {
        // Every exponent and both signs, with ties of both halves and what lies beside them; infinity and NaN among them.
        let tails = [0, 0x8000, 0x7fff, 0x8001, 0x1_8000, 0x1000, 0x0fff, 0x3001];
        let bits = |i: usize| (i as u32 / 8) << 23 | tails[i % 8];
        let numbers: Vec<f32> = (0..4096).map(|i| f32::from_bits(bits(i))).collect();
        let x = Tensor::from_slice(&numbers, &[64, 64], phalanx_tensor::Device::CPU).unwrap();
        for x in [x.clone(), x.transpose(0, 1).unwrap(), x.narrow(1, 3, 17).unwrap()] {
            let alike = |a: f64, b: f64| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            let numbers = values(&x);
            for dtype in [DType::BF16, DType::F16] {
                let single = |x: f64| match dtype {
                    DType::BF16 => <bf16 as Number>::from_f64(x).to_f64(),
                    _ => <f16 as Number>::from_f64(x).to_f64(),
                };
                let half = cast(&x, dtype).unwrap();
                let halves = values(&half);
                assert!(halves.iter().zip(&numbers).all(|(&half, &x)| alike(half, single(x))), "{dtype}");
                let back = values(&cast(&half, DType::F32).unwrap());
                assert!(back.iter().zip(&halves).all(|(&x, &half)| alike(x, half)), "{dtype}");
            }
        }
    }

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
