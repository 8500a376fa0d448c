//! Arithmetic of f16 and bf16: every operation is computed exactly, or rounded to odd, in f64 and rounded once.

use super::float::{max, max_nan, min, min_nan, saturate, xor_sign};
use super::round::{self, Mode, odd_sum};
use super::{Lane, Map, Number, map};

/// An f16 in a register, as its value; a result is an f64, exact or rounded to odd, until it is put there. `FTZ` replaces
/// subnormal sources and results by zero, `SAT` clamps the result to 0..=1.
#[derive(Clone, Copy)]
pub(crate) struct Half<const FTZ: bool, const SAT: bool>(pub(crate) f64);

/// The same of a bf16.
#[derive(Clone, Copy)]
pub(crate) struct Brain(pub(crate) f64);

fn flush16(x: f64) -> f64 {
    if x.abs() < 6.103515625e-5 { 0f64.copysign(x) } else { x }
}

impl<const FTZ: bool, const SAT: bool> Lane for Half<FTZ, SAT> {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        let x = round::f16(bits as u16) as f64;
        Half(if FTZ { flush16(x) } else { x })
    }
    #[inline(always)]
    fn put(self) -> u64 {
        let x = round::round(self.0, Mode::Nearest, round::F16);
        let x = if FTZ { flush16(x) } else { x };
        let x = if SAT { saturate(x) } else { x };
        round::f16_bits(x) as u64
    }
}

impl Lane for Brain {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        Brain(round::bf16(bits as u16) as f64)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        round::bf16_bits(round::round(self.0, Mode::Nearest, round::BF16)) as u64
    }
}

impl<const FTZ: bool, const SAT: bool> Number for Half<FTZ, SAT> {
    type Value = f64;
    #[inline(always)]
    fn of(value: f64) -> Self {
        Half(value)
    }
    #[inline(always)]
    fn value(self) -> f64 {
        self.0
    }
}

impl Number for Brain {
    type Value = f64;
    #[inline(always)]
    fn of(value: f64) -> Self {
        Brain(value)
    }
    #[inline(always)]
    fn value(self) -> f64 {
        self.0
    }
}

/// Two of them in one register: sources and results of the packed forms.
pub(crate) struct Two<N>(pub(crate) N, pub(crate) N);

impl<N: Lane> Lane for Two<N> {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        Two(N::get(bits & 0xffff), N::get(bits >> 16 & 0xffff))
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.0.put() | self.1.put() << 16
    }
}

#[inline(always)]
fn pairs<N: Number<Value = f64>>(a: Two<N>, b: Two<N>, f: impl Fn(f64, f64) -> f64) -> Two<N> {
    Two(N::of(f(a.0.value(), b.0.value())), N::of(f(a.1.value(), b.1.value())))
}

fn fma(a: f64, b: f64, c: f64) -> f64 {
    odd_sum(a * b, c)
}

/// A fused product and sum whose negative results, and negative zeros, become zero; NaN stays.
fn fma_relu(a: f64, b: f64, c: f64) -> f64 {
    let x = fma(a, b, c);
    if x.is_sign_negative() && !x.is_nan() { 0.0 } else { x }
}

/// Every operation for one narrow type, alone and packed.
macro_rules! operations {
    ($name:expr, $packed:expr, $n:ty) => {
        Some(match ($name, $packed) {
            ("add", false) => map!((a: $n, b: $n) -> $n { Number::of(odd_sum(a.value(), b.value())) }),
            ("sub", false) => map!((a: $n, b: $n) -> $n { Number::of(odd_sum(a.value(), -b.value())) }),
            ("mul", false) => map!((a: $n, b: $n) -> $n { Number::of(a.value() * b.value()) }),
            ("fma", false) => map!((a: $n, b: $n, c: $n) -> $n { Number::of(fma(a.value(), b.value(), c.value())) }),
            ("fma.relu", false) => map!((a: $n, b: $n, c: $n) -> $n { Number::of(fma_relu(a.value(), b.value(), c.value())) }),
            ("min", false) => map!((a: $n, b: $n) -> $n { Number::of(min(a.value(), b.value())) }),
            ("max", false) => map!((a: $n, b: $n) -> $n { Number::of(max(a.value(), b.value())) }),
            ("min.NaN", false) => map!((a: $n, b: $n) -> $n { Number::of(min_nan(a.value(), b.value())) }),
            ("max.NaN", false) => map!((a: $n, b: $n) -> $n { Number::of(max_nan(a.value(), b.value())) }),
            ("min.xorsign.abs", false) => map!((a: $n, b: $n) -> $n {
                let (x, y) = (a.value(), b.value());
                Number::of(xor_sign(min(x.abs(), y.abs()), x, y))
            }),
            ("max.xorsign.abs", false) => map!((a: $n, b: $n) -> $n {
                let (x, y) = (a.value(), b.value());
                Number::of(xor_sign(max(x.abs(), y.abs()), x, y))
            }),
            ("min.NaN.xorsign.abs", false) => map!((a: $n, b: $n) -> $n {
                let (x, y) = (a.value(), b.value());
                Number::of(xor_sign(min_nan(x.abs(), y.abs()), x, y))
            }),
            ("max.NaN.xorsign.abs", false) => map!((a: $n, b: $n) -> $n {
                let (x, y) = (a.value(), b.value());
                Number::of(xor_sign(max_nan(x.abs(), y.abs()), x, y))
            }),
            ("min.NaN.xorsign.abs", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> {
                pairs(a, b, |x, y| xor_sign(min_nan(x.abs(), y.abs()), x, y))
            }),
            ("max.NaN.xorsign.abs", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> {
                pairs(a, b, |x, y| xor_sign(max_nan(x.abs(), y.abs()), x, y))
            }),
            ("tanh", false) => map!((a: $n) -> $n { Number::of(a.value().tanh()) }),
            ("ex2", false) => map!((a: $n) -> $n { Number::of(a.value().exp2()) }),
            ("tanh", true) => map!((a: Two<$n>) -> Two<$n> { pairs(a, Two(Number::of(0.0), Number::of(0.0)), |x, _| x.tanh()) }),
            ("ex2", true) => map!((a: Two<$n>) -> Two<$n> { pairs(a, Two(Number::of(0.0), Number::of(0.0)), |x, _| x.exp2()) }),
            ("add", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, odd_sum) }),
            ("sub", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, |x, y| odd_sum(x, -y)) }),
            ("mul", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, |x, y| x * y) }),
            ("min", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, min) }),
            ("max", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, max) }),
            ("min.NaN", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, min_nan) }),
            ("max.NaN", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> { pairs(a, b, max_nan) }),
            ("min.xorsign.abs", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> {
                pairs(a, b, |x, y| xor_sign(min(x.abs(), y.abs()), x, y))
            }),
            ("max.xorsign.abs", true) => map!((a: Two<$n>, b: Two<$n>) -> Two<$n> {
                pairs(a, b, |x, y| xor_sign(max(x.abs(), y.abs()), x, y))
            }),
            ("fma", true) => map!((a: Two<$n>, b: Two<$n>, c: Two<$n>) -> Two<$n> {
                Two(
                    Number::of(fma(a.0.value(), b.0.value(), c.0.value())),
                    Number::of(fma(a.1.value(), b.1.value(), c.1.value())),
                )
            }),
            ("fma.relu", true) => map!((a: Two<$n>, b: Two<$n>, c: Two<$n>) -> Two<$n> {
                Two(
                    Number::of(fma_relu(a.0.value(), b.0.value(), c.0.value())),
                    Number::of(fma_relu(a.1.value(), b.1.value(), c.1.value())),
                )
            }),
            _ => return None,
        })
    };
}

/// An operation on `f16`, `f16x2`, `bf16` or `bf16x2`: `name` without its type, `.ftz` and `.sat`.
pub(crate) fn plain(name: &str, kind: &str, ftz: bool, sat: bool) -> Option<Map> {
    if let Some(sign) = sign(name, kind, ftz) {
        return Some(sign);
    }
    match (kind, ftz, sat) {
        ("f16", false, false) => operations!(name, false, Half<false, false>),
        ("f16", true, false) => operations!(name, false, Half<true, false>),
        ("f16", false, true) => operations!(name, false, Half<false, true>),
        ("f16", true, true) => operations!(name, false, Half<true, true>),
        ("f16x2", false, false) => operations!(name, true, Half<false, false>),
        ("f16x2", true, false) => operations!(name, true, Half<true, false>),
        ("f16x2", false, true) => operations!(name, true, Half<false, true>),
        ("f16x2", true, true) => operations!(name, true, Half<true, true>),
        ("bf16", ..) => operations!(name, false, Brain),
        ("bf16x2", ..) => operations!(name, true, Brain),
        _ => None,
    }
}

/// `abs` and `neg` touch the sign alone.
fn sign(name: &str, kind: &str, ftz: bool) -> Option<Map> {
    Some(match (name, kind, ftz) {
        ("abs", "f16" | "bf16", false) | ("abs", "bf16", _) => map!((a: u16) -> u16 { a & 0x7fff }),
        ("neg", "f16" | "bf16", false) | ("neg", "bf16", _) => map!((a: u16) -> u16 { a ^ 0x8000 }),
        ("abs", "f16x2" | "bf16x2", false) | ("abs", "bf16x2", _) => {
            map!((a: u32) -> u32 { a & 0x7fff_7fff })
        }
        ("neg", "f16x2" | "bf16x2", false) | ("neg", "bf16x2", _) => {
            map!((a: u32) -> u32 { a ^ 0x8000_8000 })
        }
        ("abs", "f16", true) => map!((a: Half<true, false>) -> Half<true, false> { Half(a.0.abs()) }),
        ("neg", "f16", true) => map!((a: Half<true, false>) -> Half<true, false> { Half(-a.0) }),
        ("abs", "f16x2", true) => {
            map!((a: Two<Half<true, false>>) -> Two<Half<true, false>> { Two(Half(a.0.0.abs()), Half(a.1.0.abs())) })
        }
        ("neg", "f16x2", true) => {
            map!((a: Two<Half<true, false>>) -> Two<Half<true, false>> { Two(Half(-a.0.0), Half(-a.1.0)) })
        }
        _ => return None,
    })
}
