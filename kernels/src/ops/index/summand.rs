//! Elements that are added up, and the type that their sums are kept in.

use phalanx_tensor::{Element, bf16, f16};

/// An element that is added up. The halves' sums are kept in f32; integers wrap.
pub(super) trait Summand: Element {
    /// The type of sums.
    type Sum: Copy + Send + Sync;
    /// The sum of nothing.
    const ZERO: Self::Sum;
    /// The elements as sums, where they are.
    fn as_sums(x: &mut [Self]) -> Option<&mut [Self::Sum]>;
    /// One element as a sum.
    fn widen(self) -> Self::Sum;
    /// The nearest element.
    fn narrow(sum: Self::Sum) -> Self;
    /// `a + b`.
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    /// `factor * sum`.
    fn scale(sum: Self::Sum, factor: f64) -> Self::Sum;
}

macro_rules! summand {
    ($($type:ty: |$a:ident, $b:ident| $add:expr, |$s:ident, $f:ident| $scale:expr;)*) => {$(
        impl Summand for $type {
            type Sum = $type;
            const ZERO: $type = 0 as $type;
            #[inline(always)]
            fn as_sums(x: &mut [Self]) -> Option<&mut [Self]> {
                Some(x)
            }
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(sum: Self) -> Self {
                sum
            }
            #[inline(always)]
            fn add($a: Self, $b: Self) -> Self {
                $add
            }
            #[inline(always)]
            fn scale($s: Self, $f: f64) -> Self {
                $scale
            }
        }
    )*};
}

summand! {
    f64: |a, b| a + b, |s, f| s * f;
    f32: |a, b| a + b, |s, f| s * f as f32;
    i64: |a, b| a.wrapping_add(b), |s, f| s.wrapping_mul(f as i64);
    i32: |a, b| a.wrapping_add(b), |s, f| s.wrapping_mul(f as i32);
    u8: |a, b| a.wrapping_add(b), |s, f| s.wrapping_mul(f as i64 as u8);
}

macro_rules! half {
    ($($type:ty),*) => {$(
        impl Summand for $type {
            type Sum = f32;
            const ZERO: f32 = 0.0;
            #[inline(always)]
            fn as_sums(_: &mut [Self]) -> Option<&mut [f32]> {
                None
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(sum: f32) -> Self {
                <$type>::from_f32(sum)
            }
            #[inline(always)]
            fn add(a: f32, b: f32) -> f32 {
                a + b
            }
            #[inline(always)]
            fn scale(sum: f32, factor: f64) -> f32 {
                sum * factor as f32
            }
        }
    )*};
}

half!(bf16, f16);
