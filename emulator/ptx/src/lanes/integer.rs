//! Arithmetic of whole numbers; logic, shifts, fields of bits, permutations and moves.

use super::{Lane, Map, integers, map};

/// Sources of a multiplication, with the next wider type.
trait Wide: Lane + Copy {
    type Wider: Lane;
    fn wide(self, other: Self) -> Self::Wider;
    fn high(self, other: Self) -> Self;
}

macro_rules! wide {
    ($($narrow:ty => $wider:ty, $bits:expr);*) => {$(
        impl Wide for $narrow {
            type Wider = $wider;
            #[inline(always)]
            fn wide(self, other: Self) -> $wider { (self as $wider).wrapping_mul(other as $wider) }
            #[inline(always)]
            fn high(self, other: Self) -> Self { ((self as $wider).wrapping_mul(other as $wider) >> $bits) as $narrow }
        }
    )*};
}
wide!(u16 => u32, 16; i16 => i32, 16; u32 => u64, 32; i32 => i64, 32);

macro_rules! high64 {
    ($($narrow:ty => $wider:ty),*) => {$(
        impl Wide for $narrow {
            type Wider = $narrow;
            #[inline(always)]
            fn wide(self, other: Self) -> $narrow { self.wrapping_mul(other) }
            #[inline(always)]
            fn high(self, other: Self) -> Self { (self as $wider).wrapping_mul(other as $wider).wrapping_shr(64) as $narrow }
        }
    )*};
}
high64!(u64 => u128, i64 => i128);

/// Whether there is a type for the whole product of two numbers of a type.
fn has_wider(kind: &str) -> bool {
    matches!(kind, "u16" | "s16" | "u32" | "s32")
}

/// Sums and the like: `name` without its type.
pub(crate) fn plain(name: &str, kind: &str) -> Option<Map> {
    match name {
        "add" => integers!(kind, T, map!((a: T, b: T) -> T { a.wrapping_add(b) })),
        "sub" => integers!(kind, T, map!((a: T, b: T) -> T { a.wrapping_sub(b) })),
        "mul.lo" => integers!(kind, T, map!((a: T, b: T) -> T { a.wrapping_mul(b) })),
        "mul.hi" => integers!(kind, T, map!((a: T, b: T) -> T { a.high(b) })),
        "mul.wide" if has_wider(kind) => {
            integers!(kind, T, map!((a: T, b: T) -> <T as Wide>::Wider { a.wide(b) }))
        }
        "mad.lo" => integers!(kind, T, map!((a: T, b: T, c: T) -> T { a.wrapping_mul(b).wrapping_add(c) })),
        "mad.hi" => integers!(kind, T, map!((a: T, b: T, c: T) -> T { a.high(b).wrapping_add(c) })),
        "mad.wide" if has_wider(kind) => integers!(
            kind,
            T,
            map!((a: T, b: T, c: <T as Wide>::Wider) -> <T as Wide>::Wider {
                a.wide(b).wrapping_add(c)
            })
        ),
        // Division by zero: PTX leaves it open; hardware gives all ones, and the dividend as the remainder.
        "div" => integers!(kind, T, map!((a: T, b: T) -> T { if b == 0 { !0 } else { a.wrapping_div(b) } })),
        "rem" => integers!(kind, T, map!((a: T, b: T) -> T { if b == 0 { a } else { a.wrapping_rem(b) } })),
        "min" => integers!(kind, T, map!((a: T, b: T) -> T { a.min(b) })),
        "max" => integers!(kind, T, map!((a: T, b: T) -> T { a.max(b) })),
        "sad" => integers!(
            kind,
            T,
            map!((a: T, b: T, c: T) -> T {
                c.wrapping_add(if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) })
            })
        ),
        _ => signed(name, kind).or_else(|| saturating(name, kind)),
    }
    .or_else(|| pairs(name, kind))
}

/// An operation on both halves.
fn halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    (f((a >> 16) as u16, (b >> 16) as u16) as u32) << 16 | f(a as u16, b as u16) as u32
}

fn pairs(name: &str, kind: &str) -> Option<Map> {
    Some(match (name, kind) {
        ("add", "u16x2" | "s16x2") => map!((a: u32, b: u32) -> u32 { halves(a, b, u16::wrapping_add) }),
        ("min", "u16x2") => map!((a: u32, b: u32) -> u32 { halves(a, b, u16::min) }),
        ("max", "u16x2") => map!((a: u32, b: u32) -> u32 { halves(a, b, u16::max) }),
        ("min", "s16x2") => {
            map!((a: u32, b: u32) -> u32 { halves(a, b, |x, y| (x as i16).min(y as i16) as u16) })
        }
        ("max", "s16x2") => {
            map!((a: u32, b: u32) -> u32 { halves(a, b, |x, y| (x as i16).max(y as i16) as u16) })
        }
        ("min.relu", "s16x2") => {
            map!((a: u32, b: u32) -> u32 { halves(a, b, |x, y| (x as i16).min(y as i16).max(0) as u16) })
        }
        ("max.relu", "s16x2") => {
            map!((a: u32, b: u32) -> u32 { halves(a, b, |x, y| (x as i16).max(y as i16).max(0) as u16) })
        }
        _ => return None,
    })
}

fn signed(name: &str, kind: &str) -> Option<Map> {
    Some(match (name, kind) {
        ("abs", "s16") => map!((a: i16) -> i16 { a.wrapping_abs() }),
        ("abs", "s32") => map!((a: i32) -> i32 { a.wrapping_abs() }),
        ("abs", "s64") => map!((a: i64) -> i64 { a.wrapping_abs() }),
        ("neg", "s16") => map!((a: i16) -> i16 { a.wrapping_neg() }),
        ("neg", "s32") => map!((a: i32) -> i32 { a.wrapping_neg() }),
        ("neg", "s64") => map!((a: i64) -> i64 { a.wrapping_neg() }),
        _ => return None,
    })
}

fn saturating(name: &str, kind: &str) -> Option<Map> {
    Some(match (name, kind) {
        ("add.sat", "s32") => map!((a: i32, b: i32) -> i32 { a.saturating_add(b) }),
        ("sub.sat", "s32") => map!((a: i32, b: i32) -> i32 { a.saturating_sub(b) }),
        ("mad.hi.sat", "s32") => map!((a: i32, b: i32, c: i32) -> i32 { a.high(b).saturating_add(c) }),
        ("min.relu", "s32") => map!((a: i32, b: i32) -> i32 { a.min(b).max(0) }),
        ("max.relu", "s32") => map!((a: i32, b: i32) -> i32 { a.max(b).max(0) }),
        ("mul24.lo", "s32") => map!((a: i32, b: i32) -> i32 { product24(a, b) as i32 }),
        ("mul24.lo", "u32") => map!((a: u32, b: u32) -> u32 { unsigned24(a, b) as u32 }),
        ("mul24.hi", "s32") => map!((a: i32, b: i32) -> i32 { (product24(a, b) >> 16) as i32 }),
        ("mul24.hi", "u32") => map!((a: u32, b: u32) -> u32 { (unsigned24(a, b) >> 16) as u32 }),
        ("mad24.lo", "s32") => {
            map!((a: i32, b: i32, c: i32) -> i32 { (product24(a, b) as i32).wrapping_add(c) })
        }
        ("mad24.lo", "u32") => {
            map!((a: u32, b: u32, c: u32) -> u32 { (unsigned24(a, b) as u32).wrapping_add(c) })
        }
        ("mad24.hi", "s32") => {
            map!((a: i32, b: i32, c: i32) -> i32 { ((product24(a, b) >> 16) as i32).wrapping_add(c) })
        }
        ("mad24.hi", "u32") => {
            map!((a: u32, b: u32, c: u32) -> u32 { ((unsigned24(a, b) >> 16) as u32).wrapping_add(c) })
        }
        ("mad24.hi.sat", "s32") => {
            map!((a: i32, b: i32, c: i32) -> i32 { ((product24(a, b) >> 16) as i32).saturating_add(c) })
        }
        _ => return None,
    })
}

/// The product of the lower 24 bits.
fn product24(a: i32, b: i32) -> i64 {
    (a << 8 >> 8) as i64 * (b << 8 >> 8) as i64
}

fn unsigned24(a: u32, b: u32) -> u64 {
    (a & 0xff_ffff) as u64 * (b & 0xff_ffff) as u64
}

/// The carry that an addition of `bits` leaves: `a + b + carry`, or of `a - b - !carry` that there is no borrow. (PTX says
/// that it is the borrow. Hardware adds `a` and `!b`, and NVIDIA's division of 128 bits reads its carry by `addc`.)
pub(crate) fn carry(subtract: bool, bits: u32) -> Map {
    match (subtract, bits) {
        (false, 32) => {
            map!((a: u32, b: u32, c: bool) -> bool { a as u64 + b as u64 + c as u64 > u32::MAX as u64 })
        }
        (false, _) => {
            map!((a: u64, b: u64, c: bool) -> bool { a as u128 + b as u128 + c as u128 > u64::MAX as u128 })
        }
        (true, 32) => map!((a: u32, b: u32, c: bool) -> bool { a as u64 + c as u64 > b as u64 }),
        (true, _) => map!((a: u64, b: u64, c: bool) -> bool { a as u128 + c as u128 > b as u128 }),
    }
}

/// The sum or difference with the carry in.
pub(crate) fn with_carry(subtract: bool, bits: u32) -> Map {
    match (subtract, bits) {
        (false, 32) => map!((a: u32, b: u32, c: bool) -> u32 { a.wrapping_add(b).wrapping_add(c as u32) }),
        (false, _) => map!((a: u64, b: u64, c: bool) -> u64 { a.wrapping_add(b).wrapping_add(c as u64) }),
        (true, 32) => map!((a: u32, b: u32, c: bool) -> u32 { a.wrapping_sub(b).wrapping_sub(!c as u32) }),
        (true, _) => map!((a: u64, b: u64, c: bool) -> u64 { a.wrapping_sub(b).wrapping_sub(!c as u64) }),
    }
}

macro_rules! bytes_dot {
    ($ta:ty, $tb:ty) => {
        map!((a: u32, b: u32, c: u32) -> u32 {
            let (x, y) = (a.to_le_bytes(), b.to_le_bytes());
            (0..4).fold(c, |sum, i| sum.wrapping_add(((x[i] as $ta as i32) * (y[i] as $tb as i32)) as u32))
        })
    };
}

macro_rules! words_dot {
    ($ta:ty, $tb:ty, $from:expr) => {
        map!((a: u32, b: u32, c: u32) -> u32 {
            let y = b.to_le_bytes();
            let word = |i: usize| if i == 0 { a as u16 } else { (a >> 16) as u16 };
            (0..2).fold(c, |sum, i| {
                sum.wrapping_add((word(i) as $ta as i32).wrapping_mul(y[$from + i] as $tb as i32) as u32)
            })
        })
    };
}

/// `dp4a` and `dp2a`: sums of products of the bytes of `a` (or its halves) and `b`, and `c`.
pub(crate) fn dot(name: &str, high: bool, a: &str, b: &str) -> Option<Map> {
    Some(match (name, high, a, b) {
        ("dp4a", _, "u32", "u32") => bytes_dot!(u8, u8),
        ("dp4a", _, "u32", "s32") => bytes_dot!(u8, i8),
        ("dp4a", _, "s32", "u32") => bytes_dot!(i8, u8),
        ("dp4a", _, "s32", "s32") => bytes_dot!(i8, i8),
        ("dp2a", false, "u32", "u32") => words_dot!(u16, u8, 0),
        ("dp2a", false, "u32", "s32") => words_dot!(u16, i8, 0),
        ("dp2a", false, "s32", "u32") => words_dot!(i16, u8, 0),
        ("dp2a", false, "s32", "s32") => words_dot!(i16, i8, 0),
        ("dp2a", true, "u32", "u32") => words_dot!(u16, u8, 2),
        ("dp2a", true, "u32", "s32") => words_dot!(u16, i8, 2),
        ("dp2a", true, "s32", "u32") => words_dot!(i16, u8, 2),
        ("dp2a", true, "s32", "s32") => words_dot!(i16, i8, 2),
        _ => return None,
    })
}

/// An instruction on bits: `name` without its type.
pub(crate) fn bits(name: &str, kind: &str) -> Option<Map> {
    let bits = match kind {
        "pred" => return predicate(name),
        "b16" | "u16" | "s16" | "f16" | "bf16" => "u16",
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => "u32",
        "b64" | "u64" | "s64" | "f64" => "u64",
        _ => return None,
    };
    match name {
        "mov" => integers!(bits, T, map!((a: T) -> T { a })),
        "and" => integers!(bits, T, map!((a: T, b: T) -> T { a & b })),
        "or" => integers!(bits, T, map!((a: T, b: T) -> T { a | b })),
        "xor" => integers!(bits, T, map!((a: T, b: T) -> T { a ^ b })),
        "not" => integers!(bits, T, map!((a: T) -> T { !a })),
        "cnot" => integers!(bits, T, map!((a: T) -> T { (a == 0) as T })),
        "shl" => integers!(bits, T, map!((a: T, b: u32) -> T { a.checked_shl(b).unwrap_or(0) })),
        "shr" => {
            integers!(kind, T, map!((a: T, b: u32) -> T { a >> b.min(T::BITS - 1) >> (b >= T::BITS) as u32 }))
        }
        "selp" => integers!(bits, T, map!((a: T, b: T, c: bool) -> T { if c { a } else { b } })),
        "brev" => integers!(bits, T, map!((a: T) -> T { a.reverse_bits() })),
        "popc" => integers!(bits, T, map!((a: T) -> u32 { a.count_ones() })),
        "clz" => integers!(bits, T, map!((a: T) -> u32 { a.leading_zeros() })),
        _ => fields(name, kind),
    }
}

fn predicate(name: &str) -> Option<Map> {
    Some(match name {
        "mov" => map!((a: bool) -> bool { a }),
        "and" => map!((a: bool, b: bool) -> bool { a & b }),
        "or" => map!((a: bool, b: bool) -> bool { a | b }),
        "xor" => map!((a: bool, b: bool) -> bool { a ^ b }),
        "not" => map!((a: bool) -> bool { !a }),
        "selp" => map!((a: bool, b: bool, c: bool) -> bool { if c { a } else { b } }),
        _ => return None,
    })
}

fn extract(a: i128, width: u32, position: u32, len: u32, signed: bool) -> u64 {
    let (position, len) = (position & 0xff, len & 0xff);
    let bit = |at: u32| (a >> at.min(127)) & 1;
    let sign = if !signed || len == 0 { 0 } else { bit((position + len - 1).min(width - 1)) };
    let mut value: u64 = 0;
    for i in 0..width {
        let own = i < len && position + i < width;
        value |= (if own { bit(position + i) } else { sign } as u64) << i;
    }
    value
}

/// How far below the top bit the highest bit is that is no copy of the sign.
fn find(bits: u64, width: u32, signed: bool) -> Option<u32> {
    let top = 64 - width;
    let value = if signed && bits >> (width - 1) & 1 == 1 { !bits << top >> top } else { bits };
    (value != 0).then(|| value.ilog2())
}

fn fields(name: &str, kind: &str) -> Option<Map> {
    Some(match (name, kind) {
        ("bfe", "u32") => map!((a: u32, b: u32, c: u32) -> u32 {
            let (b, c) = (b & 0xff, c & 0xff);
            let shifted = if b > 31 { 0 } else { a >> b };
            if c > 31 { shifted } else { shifted & ((1 << c) - 1) }
        }),
        ("bfe", "s32") => map!((a: i32, b: u32, c: u32) -> u32 { extract(a as i128, 32, b, c, true) as u32 }),
        ("bfe", "u64") => map!((a: u64, b: u32, c: u32) -> u64 { extract(a as i128, 64, b, c, false) }),
        ("bfe", "s64") => map!((a: i64, b: u32, c: u32) -> u64 { extract(a as i128, 64, b, c, true) }),
        ("bfi", "b32") => {
            map!((a: u32, b: u32, c: u32, e: u32) -> u32 { insert(a as u64, b as u64, c, e, 32) as u32 })
        }
        ("bfi", "b64") => map!((a: u64, b: u64, c: u32, e: u32) -> u64 { insert(a, b, c, e, 64) }),
        ("bfind", "u32") => map!((a: u32) -> u32 { find(a as u64, 32, false).unwrap_or(!0) }),
        ("bfind", "s32") => map!((a: u32) -> u32 { find(a as u64, 32, true).unwrap_or(!0) }),
        ("bfind", "u64") => map!((a: u64) -> u32 { find(a, 64, false).unwrap_or(!0) }),
        ("bfind", "s64") => map!((a: u64) -> u32 { find(a, 64, true).unwrap_or(!0) }),
        ("bfind.shiftamt", "u32") => {
            map!((a: u32) -> u32 { find(a as u64, 32, false).map_or(!0, |at| 31 - at) })
        }
        ("bfind.shiftamt", "s32") => {
            map!((a: u32) -> u32 { find(a as u64, 32, true).map_or(!0, |at| 31 - at) })
        }
        ("bfind.shiftamt", "u64") => map!((a: u64) -> u32 { find(a, 64, false).map_or(!0, |at| 63 - at) }),
        ("bfind.shiftamt", "s64") => map!((a: u64) -> u32 { find(a, 64, true).map_or(!0, |at| 63 - at) }),
        ("fns", "b32") => map!((a: u32, b: u32, c: i32) -> u32 { nth_bit(a, b, c).unwrap_or(!0) }),
        ("bmsk.clamp", "b32") => map!((a: u32, b: u32) -> u32 { mask(a, b) }),
        ("bmsk.wrap", "b32") => map!((a: u32, b: u32) -> u32 { mask(a & 31, b & 31) }),
        ("szext.clamp", "u32") => {
            map!((a: u32, b: u32) -> u32 { if b > 31 { a } else { a & ((1 << b) - 1) } })
        }
        ("szext.clamp", "s32") => map!((a: u32, b: u32) -> u32 { extend(a, b) }),
        ("szext.wrap", "u32") => map!((a: u32, b: u32) -> u32 { a & ((1 << (b & 31)) - 1) }),
        ("szext.wrap", "s32") => map!((a: u32, b: u32) -> u32 { extend(a, b & 31) }),
        ("shf.l.wrap", "b32") => {
            map!((a: u32, b: u32, c: u32) -> u32 { (pair(a, b) << (c & 31) >> 32) as u32 })
        }
        ("shf.l.clamp", "b32") => {
            map!((a: u32, b: u32, c: u32) -> u32 { (pair(a, b) << c.min(32) >> 32) as u32 })
        }
        ("shf.r.wrap", "b32") => map!((a: u32, b: u32, c: u32) -> u32 { (pair(a, b) >> (c & 31)) as u32 }),
        ("shf.r.clamp", "b32") => map!((a: u32, b: u32, c: u32) -> u32 { (pair(a, b) >> c.min(32)) as u32 }),
        // The table's bit of index `a b c`, for all bits at once: the terms of its sum of products.
        ("lop3", "b32") => map!((a: u32, b: u32, c: u32, e: u32) -> u32 {
            let mut result = 0;
            for term in 0..8u32 {
                let pick = |source: u32, bit: u32| if term >> bit & 1 == 1 { source } else { !source };
                let all = pick(a, 2) & pick(b, 1) & pick(c, 0);
                result |= all & (0u32.wrapping_sub(e >> term & 1));
            }
            result
        }),
        _ => return permute(name),
    })
}

fn insert(a: u64, b: u64, position: u32, len: u32, width: u32) -> u64 {
    let (position, len) = (position & 0xff, len & 0xff);
    if position >= width {
        return b;
    }
    let field = (if len >= 64 { !0 } else { (1u64 << len) - 1 }) << position;
    b & !field | a << position & field
}

/// The bit that is `n` set bits from `base` on, counted upwards or downwards; of 0 that at `base` itself, if it is set.
fn nth_bit(bits: u32, base: u32, n: i32) -> Option<u32> {
    let set = |at: &u32| bits.checked_shr(*at).unwrap_or(0) & 1 == 1;
    let nth = n.unsigned_abs().saturating_sub(1) as usize;
    match n {
        0 => Some(base).filter(set),
        1.. => (base..32).filter(set).nth(nth),
        _ => (0..=base.min(31)).rev().filter(set).nth(nth),
    }
}

fn mask(position: u32, len: u32) -> u32 {
    if position > 31 {
        return 0;
    }
    let ones = if len > 31 { !0 } else { (1u32 << len) - 1 };
    ones << position
}

fn extend(a: u32, bits: u32) -> u32 {
    match bits {
        0 => 0,
        1..32 => ((a << (32 - bits)) as i32 >> (32 - bits)) as u32,
        _ => a,
    }
}

fn pair(low: u32, high: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

fn picked(a: u32, b: u32, selectors: [u32; 4]) -> u32 {
    let bytes = pair(a, b).to_le_bytes();
    u32::from_le_bytes(selectors.map(|s| {
        let byte = bytes[(s & 7) as usize];
        if s & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 }
    }))
}

fn permute(name: &str) -> Option<Map> {
    Some(match name {
        "prmt" => {
            map!((a: u32, b: u32, c: u32) -> u32 { picked(a, b, [c & 15, c >> 4 & 15, c >> 8 & 15, c >> 12 & 15]) })
        }
        "prmt.f4e" => {
            map!((a: u32, b: u32, c: u32) -> u32 { picked(a, b, [0, 1, 2, 3].map(|i| ((c & 3) + i) & 7)) })
        }
        "prmt.b4e" => {
            map!((a: u32, b: u32, c: u32) -> u32 { picked(a, b, [0, 7, 6, 5].map(|i| ((c & 3) + i) & 7)) })
        }
        "prmt.rc8" => map!((a: u32, b: u32, c: u32) -> u32 { picked(a, b, [c & 3; 4]) }),
        "prmt.ecl" => {
            map!((a: u32, b: u32, c: u32) -> u32 { picked(a, b, [0, 1, 2, 3].map(|i: u32| i.max(c & 3))) })
        }
        "prmt.ecr" => {
            map!((a: u32, b: u32, c: u32) -> u32 { picked(a, b, [0, 1, 2, 3].map(|i: u32| i.min(c & 3))) })
        }
        "prmt.rc16" => map!((a: u32, b: u32, c: u32) -> u32 {
            picked(a, b, if c & 1 == 0 { [0, 1, 0, 1] } else { [2, 3, 2, 3] })
        }),
        _ => return None,
    })
}
