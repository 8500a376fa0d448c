//! Arithmetic of f32 and f64. One table has the operations that round, in every direction, for both.
//!
//! f32 comes with and without flushing of subnormal numbers and saturation ([`Single`]); f64 has neither.

use std::ops::{Neg, Sub};

use super::round::{self, Mode, directed, odd_quotient, odd_root, odd_sum, sum_error};
use super::{Lane, Map, Number, map};

/// The f32 that the hardware returns where a result is no number.
pub(crate) const CANONICAL_NAN: u32 = 0x7fff_ffff;

/// An f32 in a register: `FTZ` replaces subnormal sources and results by zero, `SAT` clamps the result to 0..=1.
#[derive(Clone, Copy)]
pub(crate) struct Single<const FTZ: bool, const SAT: bool>(pub(crate) f32);

impl<const FTZ: bool, const SAT: bool> Lane for Single<FTZ, SAT> {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        let x = f32::from_bits(bits as u32);
        Single(if FTZ { flush(x) } else { x })
    }
    #[inline(always)]
    fn put(self) -> u64 {
        let x = if FTZ { flush(self.0) } else { self.0 };
        let x = if SAT { saturate(x) } else { x };
        (if x.is_nan() { CANONICAL_NAN } else { x.to_bits() }) as u64
    }
}

impl<const FTZ: bool, const SAT: bool> Number for Single<FTZ, SAT> {
    type Value = f32;
    #[inline(always)]
    fn of(value: f32) -> Self {
        Single(value)
    }
    #[inline(always)]
    fn value(self) -> f32 {
        self.0
    }
}

/// f32 and f64: their parts, and their arithmetic rounded in a direction. Where an f64 that is rounded in another
/// direction than to nearest is subnormal, its last bit may be that of the nearest.
pub(crate) trait Float: Copy + PartialOrd + Sub<Output = Self> + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NAN: Self;
    /// The smallest normal number.
    const MIN_POSITIVE: Self;

    fn is_nan(self) -> bool;
    fn is_sign_negative(self) -> bool;
    fn abs(self) -> Self;
    fn copysign(self, sign: Self) -> Self;
    fn sum(a: Self, b: Self, mode: Mode) -> Self;
    fn product(a: Self, b: Self, mode: Mode) -> Self;
    /// `a * b + c` with one rounding.
    fn fused(a: Self, b: Self, c: Self, mode: Mode) -> Self;
    fn quotient(a: Self, b: Self, mode: Mode) -> Self;
    fn root(a: Self, mode: Mode) -> Self;

    #[inline(always)]
    fn difference(a: Self, b: Self, mode: Mode) -> Self {
        if mode == Mode::Nearest { a - b } else { Self::sum(a, -b, mode) }
    }
}

macro_rules! float_parts {
    ($t:ident) => {
        const ZERO: $t = 0.0;
        const ONE: $t = 1.0;
        const NAN: $t = $t::NAN;
        const MIN_POSITIVE: $t = $t::MIN_POSITIVE;

        #[inline(always)]
        fn is_nan(self) -> bool {
            self.is_nan()
        }
        #[inline(always)]
        fn is_sign_negative(self) -> bool {
            self.is_sign_negative()
        }
        #[inline(always)]
        fn abs(self) -> $t {
            self.abs()
        }
        #[inline(always)]
        fn copysign(self, sign: $t) -> $t {
            self.copysign(sign)
        }
    };
}

/// An f64 that is exact or rounded to odd, rounded to f32.
#[inline(always)]
fn to_f32(x: f64, mode: Mode) -> f32 {
    round::round(x, mode, round::F32) as f32
}

/// A sum whose exact value is zero has the sign that the direction asks for.
#[inline(always)]
fn zero_sign(x: f64, a: f64, b: f64, mode: Mode) -> f64 {
    let negative = a.is_sign_negative() || b.is_sign_negative();
    if x == 0.0 && mode == Mode::Down && negative { -0.0 } else { x }
}

/// Computes in f64. The product of two f32 is exact there. A result that is not exact is rounded to odd, then to f32, which gives the
/// correctly rounded result.
impl Float for f32 {
    float_parts!(f32);

    #[inline(always)]
    fn sum(a: f32, b: f32, mode: Mode) -> f32 {
        if mode == Mode::Nearest {
            return a + b;
        }
        let (a, b) = (a as f64, b as f64);
        to_f32(zero_sign(odd_sum(a, b), a, b, mode), mode)
    }
    #[inline(always)]
    fn product(a: f32, b: f32, mode: Mode) -> f32 {
        if mode == Mode::Nearest { a * b } else { to_f32(a as f64 * b as f64, mode) }
    }
    #[inline(always)]
    fn fused(a: f32, b: f32, c: f32, mode: Mode) -> f32 {
        let (product, c) = (a as f64 * b as f64, c as f64);
        let sum = odd_sum(product, c);
        if mode == Mode::Nearest { sum as f32 } else { to_f32(zero_sign(sum, product, c, mode), mode) }
    }
    #[inline(always)]
    fn quotient(a: f32, b: f32, mode: Mode) -> f32 {
        if mode == Mode::Nearest { a / b } else { to_f32(odd_quotient(a as f64, b as f64), mode) }
    }
    #[inline(always)]
    fn root(a: f32, mode: Mode) -> f32 {
        if mode == Mode::Nearest { a.sqrt() } else { to_f32(odd_root(a as f64), mode) }
    }
}

/// A finite f64's result that is too large.
fn overflow(infinite: f64, mode: Mode) -> f64 {
    let inwards = mode == Mode::Zero || (mode == Mode::Down) == (infinite > 0.0);
    if inwards { f64::MAX.copysign(infinite) } else { infinite }
}

/// By the error of the nearest result, whose sign says in which direction the exact one lies.
impl Float for f64 {
    float_parts!(f64);

    #[inline(always)]
    fn sum(a: f64, b: f64, mode: Mode) -> f64 {
        let sum = a + b;
        if mode == Mode::Nearest {
            return sum;
        }
        if sum.is_infinite() && a.is_finite() && b.is_finite() {
            return overflow(sum, mode);
        }
        if sum == 0.0 && mode == Mode::Down && (a.is_sign_negative() || b.is_sign_negative()) {
            return -0.0;
        }
        directed(sum, sum_error(a, b, sum), mode)
    }
    #[inline(always)]
    fn product(a: f64, b: f64, mode: Mode) -> f64 {
        let product = a * b;
        if mode == Mode::Nearest {
            return product;
        }
        if product.is_infinite() && a.is_finite() && b.is_finite() {
            return overflow(product, mode);
        }
        directed(product, a.mul_add(b, -product), mode)
    }
    /// The error of the nearest result is the sum of the product's and the additions' errors.
    #[inline(always)]
    fn fused(a: f64, b: f64, c: f64, mode: Mode) -> f64 {
        let nearest = a.mul_add(b, c);
        if mode == Mode::Nearest {
            return nearest;
        }
        if nearest.is_infinite() && a.is_finite() && b.is_finite() && c.is_finite() {
            return overflow(nearest, mode);
        }
        if nearest == 0.0 && mode == Mode::Down && a * b != 0.0 && a * b == -c {
            return -0.0;
        }
        let (product, low) = (a * b, a.mul_add(b, -(a * b)));
        let high = product + c;
        let rest = sum_error(product, c, high);
        directed(nearest, (high - nearest) + (rest + low), mode)
    }
    #[inline(always)]
    fn quotient(a: f64, b: f64, mode: Mode) -> f64 {
        let quotient = a / b;
        if mode == Mode::Nearest {
            return quotient;
        }
        if quotient.is_infinite() && a.is_finite() && b != 0.0 {
            return overflow(quotient, mode);
        }
        let rest = (-quotient).mul_add(b, a);
        directed(quotient, if b < 0.0 { -rest } else { rest }, mode)
    }
    #[inline(always)]
    fn root(a: f64, mode: Mode) -> f64 {
        let root = a.sqrt();
        if mode == Mode::Nearest { root } else { directed(root, (-root).mul_add(root, a), mode) }
    }
}

/// Subnormal numbers become zero.
#[inline(always)]
pub(crate) fn flush<F: Float>(x: F) -> F {
    if x.abs() < F::MIN_POSITIVE { F::ZERO.copysign(x) } else { x }
}

/// Clamps to 0..=1; a NaN becomes 0.
#[inline(always)]
pub(crate) fn saturate<F: Float>(x: F) -> F {
    let x = if x > F::ZERO { x } else { F::ZERO };
    if x < F::ONE { x } else { F::ONE }
}

/// Negative numbers become zero.
#[inline(always)]
pub(crate) fn positive<F: Float>(x: F) -> F {
    if x < F::ZERO { F::ZERO } else { x }
}

/// `min`: -0 is below +0; of a number and a NaN the number.
#[inline(always)]
pub(crate) fn min<F: Float>(a: F, b: F) -> F {
    if a.is_nan() {
        return b;
    }
    if b.is_nan() || a < b || a == b && a.is_sign_negative() { a } else { b }
}

/// `max`, as [`min`].
#[inline(always)]
pub(crate) fn max<F: Float>(a: F, b: F) -> F {
    -min(-a, -b)
}

/// `min.NaN`: of a number and a NaN the NaN.
#[inline(always)]
pub(crate) fn min_nan<F: Float>(a: F, b: F) -> F {
    if a.is_nan() || b.is_nan() { F::NAN } else { min(a, b) }
}

/// `max.NaN`, as [`min_nan`].
#[inline(always)]
pub(crate) fn max_nan<F: Float>(a: F, b: F) -> F {
    -min_nan(-a, -b)
}

/// `.xorsign`: `size` with the exclusive or of the signs of `a` and `b`.
#[inline(always)]
pub(crate) fn xor_sign<F: Float>(size: F, a: F, b: F) -> F {
    if a.is_sign_negative() != b.is_sign_negative() { -size.abs() } else { size.abs() }
}

/// The map for f32 with the given modifiers; `$s` is the type of sources and result.
macro_rules! singles {
    ($ftz:expr, $sat:expr, $s:ident, $map:expr) => {
        match ($ftz, $sat) {
            (false, false) => {
                type $s = Single<false, false>;
                $map
            }
            (true, false) => {
                type $s = Single<true, false>;
                $map
            }
            (false, true) => {
                type $s = Single<false, true>;
                $map
            }
            (true, true) => {
                type $s = Single<true, true>;
                $map
            }
        }
    };
}

/// The map for the given direction, which is the constant `$m` in it.
macro_rules! directions {
    ($mode:expr, $m:ident, $map:expr) => {
        match $mode {
            Mode::Nearest => {
                const $m: Mode = Mode::Nearest;
                $map
            }
            Mode::Zero => {
                const $m: Mode = Mode::Zero;
                $map
            }
            Mode::Down => {
                const $m: Mode = Mode::Down;
                $map
            }
            _ => {
                const $m: Mode = Mode::Up;
                $map
            }
        }
    };
}

/// The map of an operation that rounds, for sources and a result of type `$t`.
macro_rules! rounded {
    ($name:expr, $mode:expr, $t:ty) => {
        directions!(
            $mode,
            M,
            match $name {
                "add" => map!((a: $t, b: $t) -> $t { Number::of(Float::sum(a.value(), b.value(), M)) }),
                "sub" => map!((a: $t, b: $t) -> $t { Number::of(Float::difference(a.value(), b.value(), M)) }),
                "mul" => map!((a: $t, b: $t) -> $t { Number::of(Float::product(a.value(), b.value(), M)) }),
                "fma" => map!((a: $t, b: $t, c: $t) -> $t {
                    Number::of(Float::fused(a.value(), b.value(), c.value(), M))
                }),
                "div" => map!((a: $t, b: $t) -> $t { Number::of(Float::quotient(a.value(), b.value(), M)) }),
                "rcp" => map!((a: $t) -> $t { Number::of(Float::quotient(1.0, a.value(), M)) }),
                "sqrt" => map!((a: $t) -> $t { Number::of(Float::root(a.value(), M)) }),
                _ => return None,
            }
        )
    };
}

/// `add`, `sub`, `mul`, `fma`, `div`, `rcp`, `sqrt` of f32 with their rounding, and `fma.relu`.
pub(crate) fn f32_rounded(name: &str, mode: Mode, ftz: bool, sat: bool) -> Option<Map> {
    if (name, mode) == ("fma.relu", Mode::Nearest) {
        return Some(singles!(
            ftz,
            sat,
            S,
            map!((a: S, b: S, c: S) -> S { Single(Float::fused(a.0, b.0, c.0, Mode::Nearest).max(0.0)) })
        ));
    }
    Some(singles!(ftz, sat, S, rounded!(name, mode, S)))
}

/// `add`, `sub`, `mul`, `fma`, `div`, `rcp`, `sqrt` of f64 with their rounding.
pub(crate) fn f64_rounded(name: &str, mode: Mode) -> Option<Map> {
    Some(rounded!(name, mode, f64))
}

/// What of f32 needs no rounding: `min`, `max`, `abs`, `neg`, `copysign` and their variants.
pub(crate) fn f32_exact(name: &str, ftz: bool) -> Option<Map> {
    Some(match name {
        "min" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(min(a.0, b.0)) })),
        "max" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(max(a.0, b.0)) })),
        "min.NaN" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(min_nan(a.0, b.0)) })),
        "max.NaN" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(max_nan(a.0, b.0)) })),
        "min.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { Single(xor_sign(min(a.0.abs(), b.0.abs()), a.0, b.0)) })
        ),
        "max.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { Single(xor_sign(max(a.0.abs(), b.0.abs()), a.0, b.0)) })
        ),
        "min.NaN.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { Single(xor_sign(min_nan(a.0.abs(), b.0.abs()), a.0, b.0)) })
        ),
        "max.NaN.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { Single(xor_sign(max_nan(a.0.abs(), b.0.abs()), a.0, b.0)) })
        ),
        // These two touch the sign of a NaN and nothing else.
        "abs" if !ftz => map!((a: f32) -> f32 { a.abs() }),
        "neg" if !ftz => map!((a: f32) -> f32 { -a }),
        "abs" => map!((a: f32) -> f32 { flush(a).abs() }),
        "neg" => map!((a: f32) -> f32 { -flush(a) }),
        "copysign" => map!((a: f32, b: f32) -> f32 { b.copysign(a) }),
        _ => return None,
    })
}

/// The approximate functions of f32, computed in f64 and rounded once: within the bounds that PTX gives them.
pub(crate) fn f32_approximate(name: &str, ftz: bool, sat: bool) -> Option<Map> {
    Some(match name {
        "ex2" => singles!(ftz, sat, S, map!((a: S) -> S { Single((a.0 as f64).exp2() as f32) })),
        "lg2" => singles!(ftz, sat, S, map!((a: S) -> S { Single((a.0 as f64).log2() as f32) })),
        "sin" => singles!(ftz, sat, S, map!((a: S) -> S { Single((a.0 as f64).sin() as f32) })),
        "cos" => singles!(ftz, sat, S, map!((a: S) -> S { Single((a.0 as f64).cos() as f32) })),
        "tanh" => singles!(ftz, sat, S, map!((a: S) -> S { Single((a.0 as f64).tanh() as f32) })),
        "rsqrt" => singles!(ftz, sat, S, map!((a: S) -> S { Single((1.0 / (a.0 as f64).sqrt()) as f32) })),
        "rcp" => singles!(ftz, sat, S, map!((a: S) -> S { Single(1.0 / a.0) })),
        "sqrt" => singles!(ftz, sat, S, map!((a: S) -> S { Single(a.0.sqrt()) })),
        "div" => singles!(ftz, sat, S, map!((a: S, b: S) -> S { Single(divide(a.0, b.0)) })),
        "div.full" => singles!(ftz, sat, S, map!((a: S, b: S) -> S { Single(a.0 / b.0) })),
        _ => return None,
    })
}

/// `div.approx` is `a * (1 / b)`: for a large divisor the reciprocal is zero.
fn divide(a: f32, b: f32) -> f32 {
    let large = b.abs() > power_126() && b.is_finite();
    if large { a * 0f32.copysign(b) } else { a / b }
}

fn power_126() -> f32 {
    f32::from_bits((126 + 127) << 23)
}

/// The upper half of the bits alone.
fn coarse(x: f64) -> f64 {
    f64::from_bits(x.to_bits() >> 32 << 32)
}

/// `min`, `max`, `abs`, `neg`, `copysign` of f64, and the approximations whose result has only the upper half of its
/// bits.
pub(crate) fn f64_exact(name: &str) -> Option<Map> {
    Some(match name {
        "min" => map!((a: f64, b: f64) -> f64 { min(a, b) }),
        "max" => map!((a: f64, b: f64) -> f64 { max(a, b) }),
        "abs" => map!((a: f64) -> f64 { a.abs() }),
        "neg" => map!((a: f64) -> f64 { -a }),
        "copysign" => map!((a: f64, b: f64) -> f64 { b.copysign(a) }),
        "rcp.approx" => map!((a: f64) -> f64 { coarse(flush(1.0 / coarse(flush(a)))) }),
        // Only with `.ftz` it is the hardware's coarse one.
        "rsqrt.approx" => map!((a: f64) -> f64 { 1.0 / a.sqrt() }),
        "rsqrt.approx.ftz" => map!((a: f64) -> f64 { coarse(1.0 / flush(a).sqrt()) }),
        _ => return None,
    })
}
