//! Conversions between all types of numbers, and to and from several narrow numbers in one register.
//!
//! What depends on modifiers (direction, flushing, clamping) is read from the fourth source, a constant that [`flags`]
//! makes: the pairs of types are many enough without.

use super::float::{CANONICAL_NAN, flush, positive, saturate};
use super::round::{self, Format, Mode, round};
use super::{Lane, Map, integers, map};

/// A conversion's modifiers as the fourth source of its map.
pub(crate) fn flags(mode: Mode, ftz: bool, sat: bool, relu: bool) -> u64 {
    let direction = match mode {
        Mode::Nearest => 0,
        Mode::NearestAway => 1,
        Mode::Zero => 2,
        Mode::Down => 3,
        Mode::Up => 4,
    };
    direction | (ftz as u64) << 3 | (sat as u64) << 4 | (relu as u64) << 5
}

/// Set where a float is rounded to a whole number.
pub(crate) const WHOLE: u64 = 1 << 6;

fn mode(flags: u64) -> Mode {
    match flags & 7 {
        0 => Mode::Nearest,
        1 => Mode::NearestAway,
        2 => Mode::Zero,
        3 => Mode::Down,
        _ => Mode::Up,
    }
}

fn set(flags: u64, bit: u32) -> bool {
    flags >> bit & 1 == 1
}

/// Whole numbers: the value, and how to make one of it.
trait Whole: Lane + Copy {
    const LEAST: i128;
    const MOST: i128;
    const BITS: u32;
    fn exact(self) -> i128;
    fn of(value: i128) -> Self;
}

macro_rules! whole {
    ($($t:ty),*) => {$(
        impl Whole for $t {
            const LEAST: i128 = <$t>::MIN as i128;
            const MOST: i128 = <$t>::MAX as i128;
            const BITS: u32 = <$t>::BITS;
            #[inline(always)]
            fn exact(self) -> i128 { self as i128 }
            #[inline(always)]
            fn of(value: i128) -> Self { value as $t }
        }
    )*};
}
whole!(u8, i8, u16, i16, u32, i32, u64, i64);

/// Floats: the value in an f64, and the bits that an f64 is rounded to.
trait Real: Lane {
    const FORMAT: Option<Format>;
    fn value(self, ftz: bool) -> f64;
    fn of(value: f64, ftz: bool) -> Self;
}

/// The bits of an f16.
#[derive(Clone, Copy)]
struct F16(u16);
/// The bits of a bf16.
#[derive(Clone, Copy)]
struct Bf16(u16);
/// An f32 of which ten bits of the fraction count.
struct Tf32(f32);

macro_rules! lane {
    ($($t:ident: $bits:ty),*) => {$(
        impl Lane for $t {
            fn get(bits: u64) -> Self { $t(<$bits>::get(bits)) }
            fn put(self) -> u64 { self.0.put() }
        }
    )*};
}
lane!(F16: u16, Bf16: u16, Tf32: f32);

impl Real for F16 {
    const FORMAT: Option<Format> = Some(round::F16);
    fn value(self, _: bool) -> f64 {
        round::f16(self.0) as f64
    }
    fn of(value: f64, _: bool) -> Self {
        F16(round::f16_bits(value))
    }
}

impl Real for Bf16 {
    const FORMAT: Option<Format> = Some(round::BF16);
    fn value(self, _: bool) -> f64 {
        round::bf16(self.0) as f64
    }
    fn of(value: f64, _: bool) -> Self {
        Bf16(round::bf16_bits(value))
    }
}

impl Real for Tf32 {
    const FORMAT: Option<Format> = Some(round::TF32);
    fn value(self, _: bool) -> f64 {
        self.0 as f64
    }
    fn of(value: f64, _: bool) -> Self {
        Tf32(if value.is_nan() { f32::from_bits(CANONICAL_NAN) } else { value as f32 })
    }
}

impl Real for f32 {
    const FORMAT: Option<Format> = Some(round::F32);
    fn value(self, ftz: bool) -> f64 {
        if ftz { flush(self) as f64 } else { self as f64 }
    }
    fn of(value: f64, ftz: bool) -> Self {
        let value = value as f32;
        if value.is_nan() {
            return f32::from_bits(CANONICAL_NAN);
        }
        if ftz { flush(value) } else { value }
    }
}

impl Real for f64 {
    const FORMAT: Option<Format> = None;
    fn value(self, _: bool) -> f64 {
        self
    }
    fn of(value: f64, _: bool) -> Self {
        value
    }
}

fn whole_to_whole<A: Whole, R: Whole>(a: A, flags: u64) -> R {
    R::of(if set(flags, 4) { a.exact().clamp(R::LEAST, R::MOST) } else { a.exact() })
}

fn real_to_whole<A: Real, R: Whole>(a: A, flags: u64) -> R {
    let wide = A::FORMAT.is_none() || R::BITS == 64;
    let x = a.value(set(flags, 3));
    if x.is_nan() {
        return R::of(if wide { 1i128 << (R::BITS - 1) } else { 0 });
    }
    let x = mode(flags).whole(x);
    // `as` clamps to i128, and that is clamped to the type.
    R::of((x as i128).clamp(R::LEAST, R::MOST))
}

fn whole_to_real<A: Whole, R: Real>(a: A, flags: u64) -> R {
    let exact = a.exact();
    let near = exact as f64;
    let error = exact - near as i128;
    let clamp = |x: f64| if set(flags, 4) { saturate(x) } else { x };
    match R::FORMAT {
        Some(format) => {
            // Rounded to odd: a sticky bit for the second rounding.
            let bits = near.to_bits();
            let outwards = (error > 0) == (near > 0.0);
            let odd = if error == 0 || bits & 1 == 1 {
                bits
            } else if outwards {
                bits + 1
            } else {
                bits - 1
            };
            R::of(clamp(round(f64::from_bits(odd), mode(flags), format)), false)
        }
        None => R::of(clamp(round::directed(near, error as f64, mode(flags))), false),
    }
}

fn real_to_real<A: Real, R: Real>(a: A, flags: u64) -> R {
    let mut x = a.value(set(flags, 3));
    if flags & WHOLE != 0 {
        x = mode(flags).whole(x).copysign(x);
    }
    let mut x = match R::FORMAT {
        Some(format) => round(x, mode(flags), format),
        None => x,
    };
    if set(flags, 4) {
        x = saturate(x);
    }
    if set(flags, 5) {
        x = positive(x);
    }
    R::of(x, set(flags, 3))
}

/// [`integers!`](super::integers) with the types of 8 bits.
macro_rules! all_integers {
    ($kind:expr, $t:ident, $map:expr) => {
        match $kind {
            "u8" | "b8" => {
                type $t = u8;
                Some($map)
            }
            "s8" => {
                type $t = i8;
                Some($map)
            }
            other => integers!(other, $t, $map),
        }
    };
}

macro_rules! floats {
    ($kind:expr, $t:ident, $map:expr) => {
        match $kind {
            "f16" => {
                type $t = F16;
                Some($map)
            }
            "bf16" => {
                type $t = Bf16;
                Some($map)
            }
            "tf32" => {
                type $t = Tf32;
                Some($map)
            }
            "f32" => {
                type $t = f32;
                Some($map)
            }
            "f64" => {
                type $t = f64;
                Some($map)
            }
            _ => None,
        }
    };
}

/// `cvt` from one type to another. The fourth source is [`flags`].
pub(crate) fn plain(to: &str, from: &str) -> Option<Map> {
    fn floating(kind: &str) -> bool {
        matches!(kind, "f16" | "bf16" | "tf32" | "f32" | "f64")
    }
    match (floating(to), floating(from)) {
        (false, false) => all_integers!(
            to,
            R,
            all_integers!(
                from,
                A,
                map!((a: A, _b: u64, _c: u64, e: u64) -> R { whole_to_whole::<A, R>(a, e) })
            )
        )
        .flatten(),
        (false, true) => all_integers!(
            to,
            R,
            floats!(from, A, map!((a: A, _b: u64, _c: u64, e: u64) -> R { real_to_whole::<A, R>(a, e) }))
        )
        .flatten(),
        (true, false) => floats!(
            to,
            R,
            all_integers!(
                from,
                A,
                map!((a: A, _b: u64, _c: u64, e: u64) -> R { whole_to_real::<A, R>(a, e) })
            )
        )
        .flatten(),
        (true, true) => floats!(
            to,
            R,
            floats!(from, A, map!((a: A, _b: u64, _c: u64, e: u64) -> R { real_to_real::<A, R>(a, e) }))
        )
        .flatten(),
    }
}

/// The conversions that kernels make most, without a fourth source to look at.
pub(crate) fn usual(to: &str, from: &str) -> Option<Map> {
    Some(match (to, from) {
        ("u64" | "s64" | "b64", "u32") => map!((a: u32) -> u64 { a as u64 }),
        ("u64" | "s64" | "b64", "s32") => map!((a: i32) -> i64 { a as i64 }),
        ("u32" | "s32" | "b32", "u64" | "s64" | "b64") => map!((a: u64) -> u32 { a as u32 }),
        ("u32" | "s32" | "b32", "u16") => map!((a: u16) -> u32 { a as u32 }),
        ("u16" | "s16" | "b16", "u32" | "s32" | "b32") => map!((a: u32) -> u16 { a as u16 }),
        _ => return None,
    })
}

/// Extends the sign of the low bits to a register's width.
pub(crate) fn extend(from: &str, register_bits: u32) -> Option<Map> {
    Some(match (from, register_bits) {
        ("s8", 16) => map!((a: i8) -> i16 { a as i16 }),
        ("s8", 32) => map!((a: i8) -> i32 { a as i32 }),
        ("s8", 64) => map!((a: i8) -> i64 { a as i64 }),
        ("s16", 32) => map!((a: i16) -> i32 { a as i32 }),
        ("s16", 64) => map!((a: i16) -> i64 { a as i64 }),
        ("s32", 64) => map!((a: i32) -> i64 { a as i64 }),
        _ => return None,
    })
}

/// `cvt` of two f32: `a` becomes the upper half, `b` the lower.
pub(crate) fn halves(to: &str, zero: bool, relu: bool) -> Option<Map> {
    macro_rules! two {
        ($bits:path, $format:expr) => {
            match (zero, relu) {
                (false, false) => map!((a: f32, b: f32) -> u32 { join($bits(fit(a, Mode::Nearest, $format)), $bits(fit(b, Mode::Nearest, $format))) }),
                (true, false) => map!((a: f32, b: f32) -> u32 { join($bits(fit(a, Mode::Zero, $format)), $bits(fit(b, Mode::Zero, $format))) }),
                (false, true) => map!((a: f32, b: f32) -> u32 { join($bits(fit(positive(a), Mode::Nearest, $format)), $bits(fit(positive(b), Mode::Nearest, $format))) }),
                (true, true) => map!((a: f32, b: f32) -> u32 { join($bits(fit(positive(a), Mode::Zero, $format)), $bits(fit(positive(b), Mode::Zero, $format))) }),
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

/// The halves of two bytes' values.
fn from_two_f8(bytes: u16, value: impl Fn(u8) -> f64) -> u32 {
    join(round::f16_bits(value((bytes >> 8) as u8)), round::f16_bits(value(bytes as u8)))
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
        ("e4m3x2", "f16x2", true) => {
            map!((a: u32) -> u16 { let (h, l) = f16_pair(a); two_f8(positive(h), positive(l), false) })
        }
        ("e5m2x2", "f16x2", true) => {
            map!((a: u32) -> u16 { let (h, l) = f16_pair(a); two_f8(positive(h), positive(l), true) })
        }
        ("f16x2", "e4m3x2", false) => map!((a: u16) -> u32 { from_two_f8(a, |bits| f8(bits, false)) }),
        ("f16x2", "e4m3x2", true) => {
            map!((a: u16) -> u32 { from_two_f8(a, |bits| positive(f8(bits, false))) })
        }
        ("f16x2", "e5m2x2", false) => map!((a: u16) -> u32 { from_two_f8(a, |bits| f8(bits, true)) }),
        ("f16x2", "e5m2x2", true) => {
            map!((a: u16) -> u32 { from_two_f8(a, |bits| positive(f8(bits, true))) })
        }
        _ => return None,
    })
}

/// The nearest number that a type of floats has, before one of f32 is rounded to it (`.satfinite`); NaN stays.
pub(crate) fn to_finite(to: &str, from: &str) -> Option<Map> {
    Some(match (to, from) {
        ("f16" | "f16x2", "f32") => map!((a: f32) -> f32 { a.clamp(-65504.0, 65504.0) }),
        ("bf16" | "bf16x2", "f32") => map!((a: f32) -> f32 {
            a.clamp(f32::from_bits(0xff7f_0000), f32::from_bits(0x7f7f_0000))
        }),
        ("tf32", "f32") => map!((a: f32) -> f32 {
            a.clamp(f32::from_bits(0xff7f_e000), f32::from_bits(0x7f7f_e000))
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
