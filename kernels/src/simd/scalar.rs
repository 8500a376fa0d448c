//! Vectors of one lane in plain Rust: for CPUs without an implementation of their own, and to hold the others against.

use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use super::halves::Halves;
use super::vector::{Float, Isa, Mask, Vector};

/// Plain Rust.
pub(crate) struct Scalar;

impl Isa for Scalar {
    type F32 = Lane<f32>;
    type F64 = Lane<f64>;
    /// As if there were few: tiles stay small, and so does what is compiled for tests and unknown processors.
    const REGISTERS: usize = 12;
}

impl Halves for Lane<f32> {}

/// A vector of one lane.
#[derive(Clone, Copy)]
pub(crate) struct Lane<T>(T);

/// A mask of one lane.
#[derive(Clone, Copy)]
pub(crate) struct Flag(bool);

impl Mask for Flag {
    #[inline(always)]
    fn any(self) -> bool {
        self.0
    }

    #[inline(always)]
    fn all(self) -> bool {
        self.0
    }
}

impl BitAnd for Flag {
    type Output = Flag;

    #[inline(always)]
    fn bitand(self, o: Flag) -> Flag {
        Flag(self.0 & o.0)
    }
}

impl BitOr for Flag {
    type Output = Flag;

    #[inline(always)]
    fn bitor(self, o: Flag) -> Flag {
        Flag(self.0 | o.0)
    }
}

impl Not for Flag {
    type Output = Flag;

    #[inline(always)]
    fn not(self) -> Flag {
        Flag(!self.0)
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident) => {
        impl<T: Float> $trait for Lane<T> {
            type Output = Self;

            #[inline(always)]
            fn $method(self, o: Self) -> Self {
                Lane(self.0.$method(o.0))
            }
        }
    };
}

operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
operator!(Div, div);

impl<T: Float> Neg for Lane<T> {
    type Output = Self;

    #[inline(always)]
    fn neg(self) -> Self {
        Lane(-self.0)
    }
}

macro_rules! lane {
    ($elem:ident, $int:ident, $mantissa_bits:expr, $bias:expr) => {
        impl Vector for Lane<$elem> {
            type Elem = $elem;
            type Mask = Flag;
            const LANES: usize = 1;

            #[inline(always)]
            fn splat(x: $elem) -> Self {
                Lane(x)
            }

            #[inline(always)]
            fn load(src: &[$elem]) -> Self {
                Lane(src[0])
            }

            #[inline(always)]
            fn load_partial(src: &[$elem], fill: $elem) -> Self {
                Lane(src.first().copied().unwrap_or(fill))
            }

            #[inline(always)]
            fn store(self, dst: &mut [$elem]) {
                dst[0] = self.0;
            }

            #[inline(always)]
            fn store_partial(self, dst: &mut [$elem]) {
                if let Some(first) = dst.first_mut() {
                    *first = self.0;
                }
            }

            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                Lane(self.0.mul_add(b.0, c.0))
            }

            #[inline(always)]
            fn min(self, o: Self) -> Self {
                if self.0 < o.0 { self } else { o }
            }

            #[inline(always)]
            fn max(self, o: Self) -> Self {
                if self.0 > o.0 { self } else { o }
            }

            #[inline(always)]
            fn abs(self) -> Self {
                Lane(self.0.abs())
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                Lane(self.0.sqrt())
            }

            #[inline(always)]
            fn floor(self) -> Self {
                Lane(self.0.floor())
            }

            #[inline(always)]
            fn trunc(self) -> Self {
                Lane(self.0.trunc())
            }

            #[inline(always)]
            fn round_even(self) -> Self {
                Lane(self.0.round_ties_even())
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                Lane(self.0.copysign(sign.0))
            }

            #[inline(always)]
            fn lt(self, o: Self) -> Flag {
                Flag(self.0 < o.0)
            }

            #[inline(always)]
            fn le(self, o: Self) -> Flag {
                Flag(self.0 <= o.0)
            }

            #[inline(always)]
            fn eq(self, o: Self) -> Flag {
                Flag(self.0 == o.0)
            }

            #[inline(always)]
            fn select(mask: Flag, if_true: Self, if_false: Self) -> Self {
                if mask.0 { if_true } else { if_false }
            }

            #[inline(always)]
            fn scale_by_power(self, n: Self) -> Self {
                // Two steps, of which only the second can leave the normal range and round.
                let n = n.0 as $int;
                let half = n >> 1;
                let power = |n: $int| $elem::from_bits(((n + $bias) << $mantissa_bits) as _);
                Lane(self.0 * power(half) * power(n - half))
            }

            #[inline(always)]
            fn split(self) -> (Self, Self) {
                let tiny = self.0 < $elem::MIN_POSITIVE;
                let lift = $mantissa_bits + 1;
                let x = if tiny { self.0 * ((1 as $int) << lift) as $elem } else { self.0 };
                let bits = x.to_bits() as $int;
                let exponent = (bits >> $mantissa_bits) - $bias - if tiny { lift } else { 0 };
                let mantissa = (bits & ((1 << $mantissa_bits) - 1)) | ($bias << $mantissa_bits);
                (Lane($elem::from_bits(mantissa as _)), Lane(exponent as $elem))
            }

            #[inline(always)]
            fn zip_parts(self, b: Self) -> (Self, Self) {
                (self, b)
            }
        }
    };
}

lane!(f32, i32, 23, 127);
lane!(f64, i64, 52, 1023);
