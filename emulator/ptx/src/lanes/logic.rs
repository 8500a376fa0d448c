//! Bits: logic, shifts, fields, permutations, and moves.

use super::{Map, integers, map};

/// An instruction on bits: `name` without its type.
pub(crate) fn plain(name: &str, kind: &str) -> Option<Map> {
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
