//! Comparisons, and selections that depend on one.

use super::float::Single;
use super::half::{Brain, Half};
use super::{LANES, Lanes, Map, Number, integers, map};

#[inline(always)]
fn each<T: Number>(a: &Lanes, b: &Lanes, d: &mut Lanes, test: impl Fn(T::Value, T::Value) -> bool) {
    for l in 0..LANES {
        d[l] = test(T::get(a[l]).value(), T::get(b[l]).value()) as u64;
    }
}

/// The tests by PTX's names; those that end in `u` are true of a NaN.
#[allow(clippy::double_comparisons)]
fn tests<T: Number>(test: &str) -> Option<Map> {
    Some(match test {
        "eq" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x == y),
        // Not `x != y`, which is true of a NaN.
        "ne" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x < y || x > y),
        "lt" | "lo" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x < y),
        "le" | "ls" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x <= y),
        "gt" | "hi" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x > y),
        "ge" | "hs" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x >= y),
        "equ" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| !(x < y || x > y)),
        "neu" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x != y),
        "ltu" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x.partial_cmp(&y).is_none_or(|o| o.is_lt())),
        "leu" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x.partial_cmp(&y).is_none_or(|o| o.is_le())),
        "gtu" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x.partial_cmp(&y).is_none_or(|o| o.is_gt())),
        "geu" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x.partial_cmp(&y).is_none_or(|o| o.is_ge())),
        "num" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x.partial_cmp(&y).is_some()),
        "nan" => |a, b, _, _, d| each::<T>(a, b, d, |x, y| x.partial_cmp(&y).is_none()),
        _ => return None,
    })
}

/// `setp` on one type.
pub(crate) fn plain(test: &str, kind: &str, ftz: bool) -> Option<Map> {
    match (kind, ftz) {
        ("f32", false) => tests::<f32>(test),
        ("f32", true) => tests::<Single<true, false>>(test),
        ("f64", _) => tests::<f64>(test),
        ("f16", false) => tests::<Half<false, false>>(test),
        ("f16", true) => tests::<Half<true, false>>(test),
        ("bf16", _) => tests::<Brain>(test),
        _ => integers!(kind, T, tests::<T>(test)).flatten(),
    }
}

/// `set`: all ones, or 1.0 of a float, where the predicate `a` is true.
pub(crate) fn spread(kind: &str) -> Option<Map> {
    Some(match kind {
        "u32" | "s32" | "b32" => map!((a: bool) -> u32 { if a { !0 } else { 0 } }),
        "u16" | "s16" => map!((a: bool) -> u16 { if a { !0 } else { 0 } }),
        "f32" => map!((a: bool) -> u32 { if a { 0x3f80_0000 } else { 0 } }),
        "f16" => map!((a: bool) -> u16 { if a { 0x3c00 } else { 0 } }),
        "bf16" => map!((a: bool) -> u16 { if a { 0x3f80 } else { 0 } }),
        _ => return None,
    })
}

/// `slct`: `a` where `c` is not negative, else `b`.
pub(crate) fn select(bits: u32, kind: &str, ftz: bool) -> Option<Map> {
    Some(match (bits, kind, ftz) {
        (16, "s32", _) => map!((a: u16, b: u16, c: i32) -> u16 { if c >= 0 { a } else { b } }),
        (32, "s32", _) => map!((a: u32, b: u32, c: i32) -> u32 { if c >= 0 { a } else { b } }),
        (64, "s32", _) => map!((a: u64, b: u64, c: i32) -> u64 { if c >= 0 { a } else { b } }),
        (16, "f32", _) => map!((a: u16, b: u16, c: f32) -> u16 { if c >= 0.0 { a } else { b } }),
        (32, "f32", false) => map!((a: u32, b: u32, c: f32) -> u32 { if c >= 0.0 { a } else { b } }),
        (32, "f32", true) => {
            map!((a: u32, b: u32, c: Single<true, false>) -> u32 { if c.0 >= 0.0 { a } else { b } })
        }
        (64, "f32", _) => map!((a: u64, b: u64, c: f32) -> u64 { if c >= 0.0 { a } else { b } }),
        _ => return None,
    })
}

/// `testp`: what kind of number a float is.
pub(crate) fn class(name: &str, kind: &str) -> Option<Map> {
    macro_rules! classes {
        ($t:ty) => {
            match name {
                "finite" => map!((a: $t) -> bool { a.is_finite() }),
                "infinite" => map!((a: $t) -> bool { a.is_infinite() }),
                "number" => map!((a: $t) -> bool { !a.is_nan() }),
                "notanumber" => map!((a: $t) -> bool { a.is_nan() }),
                "normal" => map!((a: $t) -> bool { a.is_normal() }),
                "subnormal" => map!((a: $t) -> bool { a.is_subnormal() }),
                _ => return None,
            }
        };
    }
    Some(match kind {
        "f32" => classes!(f32),
        "f64" => classes!(f64),
        _ => return None,
    })
}
