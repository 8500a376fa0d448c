//! Arithmetic of f32: with and without flushing of subnormal numbers, saturated, and in every direction.

use super::round::{self, Mode, odd_quotient, odd_root, odd_sum};
use super::{Lane, Map, map};

/// What the hardware returns where a result is no number.
pub(crate) const NAN: u32 = 0x7fff_ffff;

/// An f32 in a register: `FTZ` replaces subnormal sources and results by zero, `SAT` clamps the result to 0..=1.
#[derive(Clone, Copy)]
pub(crate) struct Single<const FTZ: bool, const SAT: bool>(pub(crate) f32);

#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

#[inline(always)]
pub(crate) fn saturate(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

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
        (if x.is_nan() { NAN } else { x.to_bits() }) as u64
    }
}

impl Lane for f32 {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.to_bits() as u64
    }
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

/// `a * b + c` with one rounding: the product is exact in f64, the sum rounded to odd.
#[inline(always)]
pub(crate) fn fused(a: f32, b: f32, c: f32) -> f32 {
    odd_sum(a as f64 * b as f64, c as f64) as f32
}

fn to(x: f64, mode: Mode) -> f32 {
    round::round(x, mode, round::F32) as f32
}

/// A sum whose exact value is zero has the sign that the direction asks for.
fn zero_sign(x: f64, a: f64, b: f64, mode: Mode) -> f64 {
    let negative = a.is_sign_negative() || b.is_sign_negative();
    if x == 0.0 && mode == Mode::Down && negative { -0.0 } else { x }
}

macro_rules! directions {
    ($mode:expr, $m:ident, $map:expr) => {
        match $mode {
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

/// `add`, `sub`, `mul`, `fma`, `div`, `rcp`, `sqrt` with their rounding.
pub(crate) fn rounded(name: &str, mode: Mode, ftz: bool, sat: bool) -> Option<Map> {
    if mode == Mode::Nearest {
        return nearest(name, ftz, sat);
    }
    Some(match name {
        "add" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S, b: S) -> S {
                    let (a, b) = (a.0 as f64, b.0 as f64);
                    Single(to(zero_sign(odd_sum(a, b), a, b, M), M))
                })
            )
        ),
        "sub" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S, b: S) -> S {
                    let (a, b) = (a.0 as f64, -b.0 as f64);
                    Single(to(zero_sign(odd_sum(a, b), a, b, M), M))
                })
            )
        ),
        "mul" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S, b: S) -> S {
                    Single(to(a.0 as f64 * b.0 as f64, M))
                })
            )
        ),
        "fma" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S, b: S, c: S) -> S {
                    let (p, c) = (a.0 as f64 * b.0 as f64, c.0 as f64);
                    Single(to(zero_sign(odd_sum(p, c), p, c, M), M))
                })
            )
        ),
        "div" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S, b: S) -> S {
                    Single(to(odd_quotient(a.0 as f64, b.0 as f64), M))
                })
            )
        ),
        "rcp" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S) -> S {
                    Single(to(odd_quotient(1.0, a.0 as f64), M))
                })
            )
        ),
        "sqrt" => directions!(
            mode,
            M,
            singles!(
                ftz,
                sat,
                S,
                map!((a: S) -> S {
                    Single(to(odd_root(a.0 as f64), M))
                })
            )
        ),
        _ => return None,
    })
}

fn nearest(name: &str, ftz: bool, sat: bool) -> Option<Map> {
    Some(match name {
        "add" => singles!(ftz, sat, S, map!((a: S, b: S) -> S { Single(a.0 + b.0) })),
        "sub" => singles!(ftz, sat, S, map!((a: S, b: S) -> S { Single(a.0 - b.0) })),
        "mul" => singles!(ftz, sat, S, map!((a: S, b: S) -> S { Single(a.0 * b.0) })),
        "fma" => singles!(ftz, sat, S, map!((a: S, b: S, c: S) -> S { Single(fused(a.0, b.0, c.0)) })),
        "fma.relu" => {
            singles!(ftz, sat, S, map!((a: S, b: S, c: S) -> S { Single(fused(a.0, b.0, c.0).max(0.0)) }))
        }
        "div" => singles!(ftz, sat, S, map!((a: S, b: S) -> S { Single(a.0 / b.0) })),
        "rcp" => singles!(ftz, sat, S, map!((a: S) -> S { Single(1.0 / a.0) })),
        "sqrt" => singles!(ftz, sat, S, map!((a: S) -> S { Single(a.0.sqrt()) })),
        _ => return None,
    })
}

/// The smaller, -0 below +0; of a number and a NaN the number, or with `NAN_WINS` the NaN.
#[inline(always)]
fn least<const NAN_WINS: bool>(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if NAN_WINS || b.is_nan() && a.is_nan() {
            f32::NAN
        } else if a.is_nan() {
            b
        } else {
            a
        };
    }
    if a < b || a == b && a.is_sign_negative() { a } else { b }
}

#[inline(always)]
fn greatest<const NAN_WINS: bool>(a: f32, b: f32) -> f32 {
    -least::<NAN_WINS>(-a, -b)
}

fn signs(a: f32, b: f32) -> u32 {
    (a.to_bits() ^ b.to_bits()) & 0x8000_0000
}

/// What needs no rounding: `min`, `max`, `abs`, `neg`, `copysign` and their variants.
pub(crate) fn exact(name: &str, ftz: bool) -> Option<Map> {
    Some(match name {
        "min" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(least::<false>(a.0, b.0)) })),
        "max" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(greatest::<false>(a.0, b.0)) })),
        "min.NaN" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(least::<true>(a.0, b.0)) })),
        "max.NaN" => singles!(ftz, false, S, map!((a: S, b: S) -> S { Single(greatest::<true>(a.0, b.0)) })),
        "min.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { xor_sign(least::<false>(a.0.abs(), b.0.abs()), a.0, b.0) })
        ),
        "max.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { xor_sign(greatest::<false>(a.0.abs(), b.0.abs()), a.0, b.0) })
        ),
        "min.NaN.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { xor_sign(least::<true>(a.0.abs(), b.0.abs()), a.0, b.0) })
        ),
        "max.NaN.xorsign.abs" => singles!(
            ftz,
            false,
            S,
            map!((a: S, b: S) -> S { xor_sign(greatest::<true>(a.0.abs(), b.0.abs()), a.0, b.0) })
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

fn xor_sign<const FTZ: bool, const SAT: bool>(size: f32, a: f32, b: f32) -> Single<FTZ, SAT> {
    Single(f32::from_bits(size.to_bits() & 0x7fff_ffff | signs(a, b)))
}

/// The approximate functions, computed in f64 and rounded once: within the bounds that PTX gives them.
pub(crate) fn approximate(name: &str, ftz: bool, sat: bool) -> Option<Map> {
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
