//! Rounding: to any format and in any direction, from an f64 that is exact or rounded to odd.
//!
//! Rounding to odd keeps a sticky bit: where an f64 is not exact its last bit is made 1, so that rounding it again to
//! a format of at most 51 significant bits gives what rounding the exact value would (Boldo, Melquiond 2008).

/// The direction of a rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Nearest,
    NearestAway,
    Zero,
    Down,
    Up,
}

impl Mode {
    /// The direction a modifier names.
    pub(crate) fn named(name: &str) -> Option<Mode> {
        Some(match name {
            "rn" | "rni" => Mode::Nearest,
            "rna" => Mode::NearestAway,
            "rz" | "rzi" => Mode::Zero,
            "rm" | "rmi" => Mode::Down,
            "rp" | "rpi" => Mode::Up,
            _ => return None,
        })
    }

    /// The whole number next to `x` in this direction.
    pub(crate) fn whole(self, x: f64) -> f64 {
        match self {
            Mode::Nearest => x.round_ties_even(),
            Mode::NearestAway => x.round(),
            Mode::Zero => x.trunc(),
            Mode::Down => x.floor(),
            Mode::Up => x.ceil(),
        }
    }
}

/// A binary format: stored mantissa bits, exponent of the smallest normal number, largest finite number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub(crate) mantissa: i32,
    pub(crate) least: i32,
    pub(crate) max: f64,
}

pub(crate) const F32: Format = Format { mantissa: 23, least: -126, max: f32::MAX as f64 };
pub(crate) const TF32: Format = Format { mantissa: 10, least: -126, max: 3.401162134214653e38 };
pub(crate) const F16: Format = Format { mantissa: 10, least: -14, max: 65504.0 };
pub(crate) const BF16: Format = Format { mantissa: 7, least: -126, max: 3.3895313892515355e38 };
pub(crate) const E4M3: Format = Format { mantissa: 3, least: -6, max: 448.0 };
pub(crate) const E5M2: Format = Format { mantissa: 2, least: -14, max: 57344.0 };

/// 2^e of a normal f64.
pub(crate) fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// `x` rounded to a format, as an f64; too large a value becomes infinite, or the largest number where the direction
/// is inwards.
pub(crate) fn round(x: f64, mode: Mode, format: Format) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(format.least);
    let quantum = exponent - format.mantissa;
    let rounded = (mode.whole(x * power(-quantum)) * power(quantum)).copysign(x);
    if rounded.abs() <= format.max {
        return rounded;
    }
    let inwards = match mode {
        Mode::Nearest | Mode::NearestAway => false,
        Mode::Zero => true,
        Mode::Down => x > 0.0,
        Mode::Up => x < 0.0,
    };
    if inwards { format.max.copysign(x) } else { f64::INFINITY.copysign(x) }
}

/// `sum`, whose exact value is `sum + error`, rounded to odd instead of to nearest.
#[inline(always)]
fn odd(sum: f64, error: f64) -> f64 {
    let bits = sum.to_bits();
    let inexact = error != 0.0 && error.is_finite() && sum.is_finite() && bits & 1 == 0;
    // Towards zero if the error points there, away from it otherwise: the odd neighbour on that side.
    let towards = (error < 0.0) != (sum < 0.0);
    let neighbour = if towards { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    f64::from_bits(if inexact { neighbour } else { bits })
}

/// What the rounded sum of `a` and `b` misses (Knuth's TwoSum).
#[inline(always)]
pub(crate) fn sum_error(a: f64, b: f64, sum: f64) -> f64 {
    let part = sum - a;
    (a - (sum - part)) + (b - part)
}

/// `a + b` rounded to odd.
#[inline(always)]
pub(crate) fn odd_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    odd(sum, sum_error(a, b, sum))
}

/// `a / b` rounded to odd.
pub(crate) fn odd_quotient(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    let rest = (-quotient).mul_add(b, a);
    odd(quotient, if (rest < 0.0) != (b < 0.0) { -rest.abs() } else { rest.abs() })
}

/// The square root of `a` rounded to odd.
pub(crate) fn odd_root(a: f64) -> f64 {
    let root = a.sqrt();
    odd(root, (-root).mul_add(root, a))
}

/// An f64 result that was rounded to nearest, rounded in another direction instead: `error` has the sign of what is
/// missing.
pub(crate) fn directed(nearest: f64, error: f64, mode: Mode) -> f64 {
    if error == 0.0 || error.is_nan() || nearest.is_nan() {
        return nearest;
    }
    if nearest.is_infinite() {
        return nearest;
    }
    match mode {
        Mode::Nearest | Mode::NearestAway => nearest,
        Mode::Down => {
            if error < 0.0 {
                nearest.next_down()
            } else {
                nearest
            }
        }
        Mode::Up => {
            if error > 0.0 {
                nearest.next_up()
            } else {
                nearest
            }
        }
        Mode::Zero if nearest > 0.0 && error < 0.0 => nearest.next_down(),
        Mode::Zero if nearest < 0.0 && error > 0.0 => nearest.next_up(),
        Mode::Zero => nearest,
    }
}

/// The value of f16 bits.
#[inline(always)]
pub(crate) fn f16(bits: u16) -> f32 {
    let (exponent, mantissa) = (bits >> 10 & 31, (bits & 1023) as u32);
    let sign = (bits as u32 & 0x8000) << 16;
    let value = match exponent {
        0 => (mantissa as f32 * (1.0 / 16777216.0)).to_bits(),
        31 => 0x7f80_0000 | mantissa << 13,
        _ => (exponent as u32 + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(value | sign)
}

/// The f16 bits of a value that f16 holds exactly. A NaN is the canonical one.
#[inline(always)]
pub(crate) fn f16_bits(value: f64) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let bits = (value as f32).to_bits();
    let (sign, size) = ((bits >> 16) as u16 & 0x8000, bits & 0x7fff_ffff);
    sign | if value.is_infinite() {
        0x7c00
    } else if size < 0x3880_0000 {
        (value.abs() * 16777216.0) as u16
    } else {
        ((size - (112 << 23)) >> 13) as u16
    }
}

/// The value of bf16 bits.
#[inline(always)]
pub(crate) fn bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The bf16 bits of a value that bf16 holds exactly. A NaN is the canonical one.
#[inline(always)]
pub(crate) fn bf16_bits(value: f64) -> u16 {
    if value.is_nan() { 0x7fff } else { ((value as f32).to_bits() >> 16) as u16 }
}
