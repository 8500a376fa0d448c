//! Conversions to and from several narrow numbers in one register.

use super::round::{self, Format, Mode, round};
use super::{Map, map};

/// `cvt` of two f32: `a` becomes the upper half, `b` the lower.
pub(crate) fn halves(to: &str, zero: bool, relu: bool) -> Option<Map> {
    macro_rules! two {
        ($bits:path, $format:expr) => {
            match (zero, relu) {
                (false, false) => map!((a: f32, b: f32) -> u32 { join($bits(fit(a, Mode::Nearest, $format)), $bits(fit(b, Mode::Nearest, $format))) }),
                (true, false) => map!((a: f32, b: f32) -> u32 { join($bits(fit(a, Mode::Zero, $format)), $bits(fit(b, Mode::Zero, $format))) }),
                (false, true) => map!((a: f32, b: f32) -> u32 { join($bits(fit(up(a), Mode::Nearest, $format)), $bits(fit(up(b), Mode::Nearest, $format))) }),
                (true, true) => map!((a: f32, b: f32) -> u32 { join($bits(fit(up(a), Mode::Zero, $format)), $bits(fit(up(b), Mode::Zero, $format))) }),
            }
        };
    }
    Some(match to {
        "f16x2" => two!(round::f16_bits, round::F16),
        "bf16x2" => two!(round::bf16_bits, round::BF16),
        _ => return None,
    })
}

fn join(high: u16, low: u16) -> u32 {
    (high as u32) << 16 | low as u32
}

fn fit(x: f32, mode: Mode, format: Format) -> f64 {
    round(x as f64, mode, format)
}

/// Negative numbers become zero.
fn up(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// The bits of an f8, clamped to its largest number.
fn f8_bits(x: f64, e5m2: bool) -> u8 {
    let format = if e5m2 { round::E5M2 } else { round::E4M3 };
    if x.is_nan() {
        return 0x7f;
    }
    let value = round(x, Mode::Nearest, format);
    let value = if value.abs() > format.max { format.max.copysign(value) } else { value };
    let sign = (value.is_sign_negative() as u8) << 7;
    let size = value.abs();
    if size < round::power(format.least) {
        return sign | (size * round::power(format.mantissa - format.least)) as u8;
    }
    let bits = size.to_bits();
    let exponent = (bits >> 52) as i32 - 1023 - format.least + 1;
    let mantissa = bits >> (52 - format.mantissa) & ((1 << format.mantissa) - 1);
    sign | (exponent << format.mantissa) as u8 | mantissa as u8
}

/// The value of f8 bits.
pub(crate) fn f8(bits: u8, e5m2: bool) -> f64 {
    let format = if e5m2 { round::E5M2 } else { round::E4M3 };
    let size = bits & 0x7f;
    let exponent = (size >> format.mantissa) as i32;
    let mantissa = (size & ((1 << format.mantissa) - 1)) as f64 * round::power(-format.mantissa);
    let value = match (e5m2, size) {
        (false, 0x7f) => f64::NAN,
        (true, 0x7c) => f64::INFINITY,
        (true, 0x7d..) => f64::NAN,
        _ if exponent == 0 => mantissa * round::power(format.least),
        _ => (1.0 + mantissa) * round::power(exponent - 1 + format.least),
    };
    if bits & 0x80 != 0 { -value } else { value }
}

fn f16_pair(bits: u32) -> (f64, f64) {
    (round::f16((bits >> 16) as u16) as f64, round::f16(bits as u16) as f64)
}

fn two_f8(high: f64, low: f64, e5m2: bool) -> u16 {
    (f8_bits(high, e5m2) as u16) << 8 | f8_bits(low, e5m2) as u16
}

fn positive(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

/// `cvt` to and from two f8 (`e4m3x2`, `e5m2x2`).
pub(crate) fn f8_pairs(to: &str, from: &str, relu: bool) -> Option<Map> {
    Some(match (to, from, relu) {
        ("e4m3x2", "f32", false) => map!((a: f32, b: f32) -> u16 { two_f8(a as f64, b as f64, false) }),
        ("e4m3x2", "f32", true) => {
            map!((a: f32, b: f32) -> u16 { two_f8(positive(a as f64), positive(b as f64), false) })
        }
        ("e5m2x2", "f32", false) => map!((a: f32, b: f32) -> u16 { two_f8(a as f64, b as f64, true) }),
        ("e5m2x2", "f32", true) => {
            map!((a: f32, b: f32) -> u16 { two_f8(positive(a as f64), positive(b as f64), true) })
        }
        ("e4m3x2", "f16x2", false) => map!((a: u32) -> u16 { let (h, l) = f16_pair(a); two_f8(h, l, false) }),
        ("e5m2x2", "f16x2", false) => map!((a: u32) -> u16 { let (h, l) = f16_pair(a); two_f8(h, l, true) }),
        ("f16x2", "e4m3x2", _) => map!((a: u16) -> u32 {
            join(round::f16_bits(f8((a >> 8) as u8, false)), round::f16_bits(f8(a as u8, false)))
        }),
        ("f16x2", "e5m2x2", _) => map!((a: u16) -> u32 {
            join(round::f16_bits(f8((a >> 8) as u8, true)), round::f16_bits(f8(a as u8, true)))
        }),
        _ => return None,
    })
}

/// `cvt.pack.sat`: `a` and `b` clamped, `b` lowest; of bytes the low half of `c` comes above.
pub(crate) fn pack(to: &str, with_third: bool) -> Option<Map> {
    Some(match (to, with_third) {
        ("u16", _) => {
            map!((a: i32, b: i32) -> u32 { (a.clamp(0, 65535) as u32) << 16 | b.clamp(0, 65535) as u32 })
        }
        ("s16", _) => map!((a: i32, b: i32) -> u32 {
            (a.clamp(-32768, 32767) as u32) << 16 | b.clamp(-32768, 32767) as u32 & 0xffff
        }),
        ("u8", true) => map!((a: i32, b: i32, c: u32) -> u32 {
            c << 16 | (a.clamp(0, 255) as u32) << 8 | b.clamp(0, 255) as u32
        }),
        ("s8", true) => map!((a: i32, b: i32, c: u32) -> u32 {
            c << 16 | (a.clamp(-128, 127) as u32 & 0xff) << 8 | b.clamp(-128, 127) as u32 & 0xff
        }),
        _ => return None,
    })
}
