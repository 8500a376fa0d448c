//! The two element types that vectors hold, and the scalar arithmetic that generic code needs of them.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use super::dispatch::Isa;
use super::halves::Halves;
use super::tables::Tables;
use super::vector::Vector;
use super::whole::small;

/// f32 or f64.
pub(crate) trait Float:
    Copy
    + Default
    + Send
    + Sync
    + PartialEq
    + PartialOrd
    + std::fmt::Debug
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Tables
    + 'static
{
    /// The vector of this element in an instruction set.
    type Vec<S: Isa>: Vector<Elem = Self>;

    /// 0
    const ZERO: Self;
    /// 1
    const ONE: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// A quiet NaN.
    const NAN: Self;
    /// The largest finite value.
    const MAX: Self;

    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The value as f64, exactly.
    fn to_f64(self) -> f64;
    /// `self * b + c`, rounded once.
    #[cfg(test)]
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// Whether this is a NaN.
    fn is_nan(self) -> bool;

    /// The integer that this is, from 0 to 2^24; some such number of any other.
    fn small(self) -> i32;

    /// At most a vector's lanes, widened; zeros beyond. Only f32 is what halves are computed in: f64 gives zeros.
    fn load_bf16<S: Isa>(from: &[bf16]) -> Self::Vec<S>;
    /// [`Float::load_bf16`] for f16.
    fn load_f16<S: Isa>(from: &[f16]) -> Self::Vec<S>;
    /// Rounds as many leading lanes as there is room for. f64 leaves what is there.
    fn store_bf16<S: Isa>(x: Self::Vec<S>, to: &mut [bf16]);
    /// [`Float::store_bf16`] for f16.
    fn store_f16<S: Isa>(x: Self::Vec<S>, to: &mut [f16]);
}

macro_rules! float {
    ($elem:ident: $vector:ident $($halves:item)*) => {
        impl Float for $elem {
            type Vec<S: Isa> = S::$vector;

            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const INFINITY: Self = $elem::INFINITY;
            const NAN: Self = $elem::NAN;
            const MAX: Self = $elem::MAX;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $elem
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            #[cfg(test)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                $elem::mul_add(self, b, c)
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                $elem::is_nan(self)
            }

            $($halves)*
        }
    };
}

float! {
    f32: F32

    #[inline(always)]
    fn small(self) -> i32 {
        small(self)
    }

    #[inline(always)]
    fn load_bf16<S: Isa>(from: &[bf16]) -> S::F32 {
        S::F32::load_bf16(from)
    }

    #[inline(always)]
    fn load_f16<S: Isa>(from: &[f16]) -> S::F32 {
        S::F32::load_f16(from)
    }

    #[inline(always)]
    fn store_bf16<S: Isa>(x: S::F32, to: &mut [bf16]) {
        x.store_bf16(to);
    }

    #[inline(always)]
    fn store_f16<S: Isa>(x: S::F32, to: &mut [f16]) {
        x.store_f16(to);
    }
}

float! {
    f64: F64

    #[inline(always)]
    fn small(self) -> i32 {
        small(self as f32)
    }

    #[inline(always)]
    fn load_bf16<S: Isa>(_: &[bf16]) -> S::F64 {
        S::F64::zero()
    }

    #[inline(always)]
    fn load_f16<S: Isa>(_: &[f16]) -> S::F64 {
        S::F64::zero()
    }

    #[inline(always)]
    fn store_bf16<S: Isa>(_: S::F64, _: &mut [bf16]) {}

    #[inline(always)]
    fn store_f16<S: Isa>(_: S::F64, _: &mut [f16]) {}
}
