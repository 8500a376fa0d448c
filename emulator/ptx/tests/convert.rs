//! Conversions, comparisons and selections.

mod common;

use common::{check, check_body, check_float, combinations, compute, low, size, value};
use half::{bf16, f16};

const WHOLE: [&str; 8] = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"];

fn real(x: u64, kind: &str) -> f64 {
    match kind {
        "f16" => f16::from_bits(x as u16).to_f64(),
        "bf16" => bf16::from_bits(x as u16).to_f64(),
        "f32" => f32::from_bits(x as u32) as f64,
        _ => f64::from_bits(x),
    }
}

fn ends(kind: &str) -> (i128, i128) {
    let bits = size(kind) * 8;
    if kind.starts_with('s') { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1i128 << bits) - 1) }
}

#[test]
fn whole_numbers_are_cut_extended_or_clamped() {
    for from in WHOLE {
        for to in WHOLE {
            // A register of 8 bits is one of 16, into which the sign is extended.
            let out = if size(to) == 1 { "b16" } else { to };
            let source = if size(from) == 1 { "b16" } else { from };
            let extend = |v: i128| low(value(low(v, to), to), out);
            let cut = |x: u64| value(x & (u64::MAX >> (64 - size(from) * 8)), from);
            check(&format!("cvt.{to}.{from}"), &[source], out, |x| extend(cut(x[0])));
            if to != from {
                let (least, most) = ends(to);
                check(&format!("cvt.sat.{to}.{from}"), &[source], out, |x| {
                    low(cut(x[0]).clamp(least, most), out)
                });
            }
        }
    }
    check_body("cvt.s64.s8 %out, %a;", &["b16"], "s64", |x| x[0] as u8 as i8 as i64 as u64);
    check_body("cvt.s8.s32 %out, %a;", &["s32"], "b32", |x| x[0] as u8 as i8 as i32 as u32 as u64);
}

fn whole(x: f64, mode: &str) -> f64 {
    match mode {
        "rni" => {
            let (down, up) = (x.floor(), x.ceil());
            match (x - down).partial_cmp(&(up - x)) {
                Some(std::cmp::Ordering::Less) => down,
                Some(std::cmp::Ordering::Greater) => up,
                _ => {
                    if down % 2.0 == 0.0 {
                        down
                    } else {
                        up
                    }
                }
            }
        }
        "rzi" => x.trunc(),
        "rmi" => x.floor(),
        _ => x.ceil(),
    }
}

#[test]
fn floats_become_whole_numbers_in_every_direction() {
    for from in ["f32", "f64", "f16", "bf16"] {
        for to in WHOLE {
            for mode in ["rni", "rzi", "rmi", "rpi"] {
                let out = if size(to) == 1 { "b16" } else { to };
                check(&format!("cvt.{mode}.{to}.{from}"), &[from], out, |x| {
                    let x = real(x[0], from);
                    let (least, most) = ends(to);
                    if x.is_nan() {
                        let bits = size(to) * 8;
                        return if from == "f64" || bits == 64 {
                            low(value(1 << (bits - 1), to), out)
                        } else {
                            0
                        };
                    }
                    low((whole(x, mode) as i128).clamp(least, most), out)
                });
            }
        }
    }
}

#[test]
fn floats_are_made_whole_in_every_direction() {
    for mode in ["rni", "rzi", "rmi", "rpi"] {
        check_float(&format!("cvt.{mode}.f32.f32"), &["f32"], "f32", |x| {
            let v = real(x[0], "f32");
            ((whole(v, mode) as f32).copysign(v as f32)).to_bits() as u64
        });
        check_float(&format!("cvt.{mode}.f64.f64"), &["f64"], "f64", |x| {
            whole(real(x[0], "f64"), mode).copysign(real(x[0], "f64")).to_bits()
        });
    }
}

/// Neighbours of f32 around an exact whole number.
fn around(v: i128) -> (f32, f32) {
    let near = v as f32;
    let exact = near as f64 as i128;
    match exact.cmp(&v) {
        std::cmp::Ordering::Equal => (near, near),
        std::cmp::Ordering::Less => (near, near.next_up()),
        std::cmp::Ordering::Greater => (near.next_down(), near),
    }
}

#[test]
fn whole_numbers_become_floats_in_every_direction() {
    for from in ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"] {
        let source = if size(from) == 1 { "b16" } else { from };
        let cut = |x: u64| value(x & (u64::MAX >> (64 - size(from) * 8)), from);
        check(&format!("cvt.rn.f32.{from}"), &[source], "f32", |x| (cut(x[0]) as f32).to_bits() as u64);
        check(&format!("cvt.rm.f32.{from}"), &[source], "f32", |x| around(cut(x[0])).0.to_bits() as u64);
        check(&format!("cvt.rp.f32.{from}"), &[source], "f32", |x| around(cut(x[0])).1.to_bits() as u64);
        check(&format!("cvt.rz.f32.{from}"), &[source], "f32", |x| {
            let v = cut(x[0]);
            (if v >= 0 { around(v).0 } else { around(v).1 }).to_bits() as u64
        });
        check(&format!("cvt.rn.f64.{from}"), &[source], "f64", |x| (cut(x[0]) as f64).to_bits());
        check(&format!("cvt.rn.f16.{from}"), &[source], "f16", |x| {
            // In f64 such a number is exact or far above what f16 holds.
            f16::from_f64(cut(x[0]) as f64).to_bits() as u64
        });
    }
}

/// The neighbours of a format around a value, by walking over its bits.
fn neighbours(x: f64, kind: &str) -> (u64, u64) {
    let near = match kind {
        "f16" => f16::from_f64(x).to_bits() as u64,
        "bf16" => bf16::from_f64(x).to_bits() as u64,
        _ => (x as f32).to_bits() as u64,
    };
    let top = if kind == "f32" { 1 << 31 } else { 1 << 15 };
    let step = |bits: u64, up: bool| match (bits & top != 0, up) {
        (false, true) => bits + 1,
        (false, false) if bits == 0 => top | 1,
        (false, false) => bits - 1,
        (true, true) if bits == top => 1,
        (true, true) => bits - 1,
        (true, false) => bits + 1,
    };
    // Rounding twice may be off by one: walk until the value is between.
    let (mut below, mut above) = (near, near);
    while real(below, kind) > x {
        below = step(below, false);
    }
    while real(above, kind) < x {
        above = step(above, true);
    }
    if real(below, kind) < x {
        above = step(below, true)
    }
    if real(above, kind) > x {
        below = step(above, false)
    }
    (below, above)
}

#[test]
fn floats_are_narrowed_in_every_direction() {
    for (to, from) in [("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64")] {
        for mode in ["rn", "rz", "rm", "rp"] {
            check_float(&format!("cvt.{mode}.{to}.{from}"), &[from], to, |x| {
                let v = real(x[0], from);
                if !v.is_finite() || v == 0.0 {
                    return match to {
                        "f32" => (v as f32).to_bits() as u64,
                        "f16" => f16::from_f64(v).to_bits() as u64,
                        _ => bf16::from_f64(v).to_bits() as u64,
                    };
                }
                let (below, above) = neighbours(v, to);
                let sign = if to == "f32" { 1u64 << 31 } else { 1 << 15 };
                let signed =
                    |bits: u64| if real(bits, to) == 0.0 { if v < 0.0 { sign } else { 0 } } else { bits };
                signed(match mode {
                    "rm" => below,
                    "rp" => above,
                    "rz" => {
                        if v > 0.0 {
                            below
                        } else {
                            above
                        }
                    }
                    _ => {
                        // Infinity counts as the next power of two would.
                        let size = |bits: u64| {
                            if real(bits, to).is_infinite() {
                                2f64.powi(if to == "f16" { 16 } else { 128 }).copysign(v)
                            } else {
                                real(bits, to)
                            }
                        };
                        let (down, up) = ((v - size(below)).abs(), (size(above) - v).abs());
                        if below == above || down < up {
                            below
                        } else if up < down {
                            above
                        } else if below & 1 == 0 {
                            below
                        } else {
                            above
                        }
                    }
                })
            });
        }
    }
}

#[test]
fn floats_are_widened_exactly() {
    check_float("cvt.f64.f32", &["f32"], "f64", |x| real(x[0], "f32").to_bits());
    check_float("cvt.f32.f16", &["f16"], "f32", |x| (real(x[0], "f16") as f32).to_bits() as u64);
    check_float("cvt.f32.bf16", &["bf16"], "f32", |x| (real(x[0], "bf16") as f32).to_bits() as u64);
    check_float("cvt.f64.f16", &["f16"], "f64", |x| real(x[0], "f16").to_bits());
    check("cvt.sat.f32.f32", &["f32"], "f32", |x| {
        let v = real(x[0], "f32") as f32;
        (if v > 0.0 { v.min(1.0) } else { 0.0 }).to_bits() as u64
    });
    check_float("cvt.ftz.f32.f32", &["f32"], "f32", |x| {
        let v = real(x[0], "f32") as f32;
        (if v.is_subnormal() { 0f32.copysign(v) } else { v }).to_bits() as u64
    });
}

#[test]
fn tf32_keeps_ten_bits_with_halves_away_from_zero() {
    check_float("cvt.rna.tf32.f32", &["f32"], "f32", |x| {
        let bits = x[0] as u32;
        if f32::from_bits(bits).is_nan() || f32::from_bits(bits).is_infinite() {
            x[0]
        } else {
            ((bits + 0x1000) & !0x1fff) as u64
        }
    });
}

#[test]
fn two_floats_become_one_register() {
    for (kind, f) in [
        ("f16", (|x| f16::from_f32(x).to_bits()) as fn(f32) -> u16),
        ("bf16", |x| bf16::from_f32(x).to_bits()),
    ] {
        let rows: Vec<_> = combinations(&["f32", "f32"])
            .into_iter()
            .filter(|row| row.iter().all(|&x| !f32::from_bits(x as u32).is_nan()))
            .collect();
        let made = compute(&format!("cvt.rn.{kind}x2.f32 %out, %a, %b;"), &["f32", "f32"], "b32", &rows);
        let relu = compute(&format!("cvt.rn.relu.{kind}x2.f32 %out, %a, %b;"), &["f32", "f32"], "b32", &rows);
        for (i, row) in rows.iter().enumerate() {
            let [a, b] = [row[0], row[1]].map(|x| f32::from_bits(x as u32));
            assert_eq!(made[i], (f(a) as u64) << 16 | f(b) as u64, "{kind}x2 of {a} and {b}");
            let up = |x: f32| if x < 0.0 { 0 } else { f(x) as u64 };
            assert_eq!(relu[i], up(a) << 16 | up(b), "{kind}x2 of {a} and {b}, not below zero");
        }
    }
}

#[test]
fn eight_bit_floats_go_there_and_back() {
    // Every f8 value is an f16, and comes back as itself.
    for (kind, nan) in
        [("e4m3", [0x7f, 0xff].as_slice()), ("e5m2", &[0x7c, 0x7d, 0x7e, 0x7f, 0xfc, 0xfd, 0xfe, 0xff])]
    {
        let rows: Vec<Vec<u64>> = (0..256).map(|b| vec![b | 0x38 << 8]).collect();
        let body = format!("cvt.rn.f16x2.{kind}x2 %r1, %a; cvt.rn.satfinite.{kind}x2.f16x2 %out, %r1;");
        for (i, back) in compute(&body, &["b16"], "b16", &rows).into_iter().enumerate() {
            if !nan.contains(&(i as i32)) {
                assert_eq!(back, rows[i][0], "{kind} {i:#x}");
            }
        }
    }
    for kind in ["e4m3", "e5m2"] {
        // Of numbers that are not NaN, and not -0.
        let rows: Vec<Vec<u64>> =
            (0..256).filter(|b| b & 0x7f < 0x7c && *b != 0x80).map(|b| vec![b | 0x38 << 8]).collect();
        for body in [
            format!("cvt.rn.f16x2.{kind}x2 %r1, %a; cvt.rn.satfinite.relu.{kind}x2.f16x2 %out, %r1;"),
            format!("cvt.rn.relu.f16x2.{kind}x2 %r1, %a; cvt.rn.satfinite.{kind}x2.f16x2 %out, %r1;"),
        ] {
            for (row, found) in rows.iter().zip(compute(&body, &["b16"], "b16", &rows)) {
                let wanted = if row[0] & 0x80 != 0 { 0x3800 } else { row[0] };
                assert_eq!(found, wanted, "{body} {row:x?}");
            }
        }
    }
    let one = |x: f32| vec![x.to_bits() as u64, 0];
    let made = compute(
        "cvt.rn.satfinite.e4m3x2.f32 %out, %a, %b;",
        &["f32", "f32"],
        "b16",
        &[one(1.0), one(448.0), one(1e9), one(-0.0625), one(0.001953125), one(1.0625), one(1.1875)],
    );
    assert_eq!(made, [0x3800, 0x7e00, 0x7e00, 0x9800, 0x0100, 0x3800, 0x3a00]);
}

#[test]
fn numbers_are_packed_with_saturation() {
    check("cvt.pack.sat.s16.s32", &["s32", "s32"], "b32", |x| {
        let c = |x: u64| low(value(x, "s32").clamp(-32768, 32767), "s16");
        c(x[0]) << 16 | c(x[1])
    });
    check("cvt.pack.sat.u8.s32.b32", &["s32", "s32", "b32"], "b32", |x| {
        let c = |x: u64| value(x, "s32").clamp(0, 255) as u64;
        x[2] << 16 & 0xffff_ffff | c(x[0]) << 8 | c(x[1])
    });
}

#[test]
fn whole_numbers_are_compared_by_their_sign() {
    for kind in ["u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64"] {
        let tests: &[&str] = match kind.as_bytes()[0] {
            b'b' => &["eq", "ne"],
            b'u' => &["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"],
            _ => &["eq", "ne", "lt", "le", "gt", "ge"],
        };
        for test in tests {
            check_body(
                &format!("setp.{test}.{kind} %q0, %a, %b; selp.b16 %out, 1, 0, %q0;"),
                &[kind, kind],
                "b16",
                |x| {
                    let (a, b) = (value(x[0], kind), value(x[1], kind));
                    (match *test {
                        "eq" => a == b,
                        "ne" => a != b,
                        "lt" | "lo" => a < b,
                        "le" | "ls" => a <= b,
                        "gt" | "hi" => a > b,
                        _ => a >= b,
                    }) as u64
                },
            );
        }
    }
}

#[test]
fn floats_are_compared_with_and_without_nan() {
    for kind in ["f32", "f64", "f16", "bf16"] {
        for test in
            ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
        {
            check_body(
                &format!("setp.{test}.{kind} %q0, %a, %b; selp.b16 %out, 1, 0, %q0;"),
                &[kind, kind],
                "b16",
                |x| {
                    let (a, b) = (real(x[0], kind), real(x[1], kind));
                    let nan = a.is_nan() || b.is_nan();
                    (match test {
                        "eq" => a == b,
                        "ne" => !nan && a != b,
                        "lt" => a < b,
                        "le" => a <= b,
                        "gt" => a > b,
                        "ge" => a >= b,
                        "equ" => nan || a == b,
                        "neu" => nan || a != b,
                        "ltu" => nan || a < b,
                        "leu" => nan || a <= b,
                        "gtu" => nan || a > b,
                        "geu" => nan || a >= b,
                        "num" => !nan,
                        _ => nan,
                    }) as u64
                },
            );
        }
    }
}

#[test]
fn a_flushed_comparison_sees_zero_for_subnormal_numbers() {
    check_body("setp.gt.ftz.f32 %q0, %a, %b; selp.b16 %out, 1, 0, %q0;", &["f32", "f32"], "b16", |x| {
        let flush = |x: u64| {
            let v = f32::from_bits(x as u32);
            if v.is_subnormal() { 0.0 } else { v }
        };
        (flush(x[0]) > flush(x[1])) as u64
    });
}

#[test]
fn predicates_are_joined_and_the_second_is_inverted_first() {
    for (join, f) in
        [("and", (|a, b| a & b) as fn(u64, u64) -> u64), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)]
    {
        let body = format!(
            "setp.ne.u32 %q2, %c, 0; setp.lt.{join}.s32 %q0|%q1, %a, %b, %q2; selp.b32 %r1, 1, 0, %q0; selp.b32 %r2, 2, 0, %q1; or.b32 %out, %r1, %r2;"
        );
        check_body(&body, &["s32", "s32", "b32"], "b32", |x| {
            let t = (value(x[0], "s32") < value(x[1], "s32")) as u64;
            let c = (x[2] != 0) as u64;
            f(t, c) | f(1 - t, c) << 1
        });
        let body = format!(
            "setp.ne.u32 %q2, %c, 0; setp.lt.{join}.s32 %q2, %a, %b, !%q2; selp.b32 %out, 1, 0, %q2;"
        );
        check_body(&body, &["s32", "s32", "b32"], "b32", |x| {
            f((value(x[0], "s32") < value(x[1], "s32")) as u64, (x[2] == 0) as u64)
        });
    }
}

#[test]
fn selections() {
    check_body("setp.ne.u32 %q0, %c, 0; selp.b64 %out, %a, %b, %q0;", &["b64", "b64", "b32"], "b64", |x| {
        if x[2] != 0 { x[0] } else { x[1] }
    });
    check_body(
        "setp.ne.u32 %q0, %c, 0; selp.f32 %out, %a, 0f3F800000, %q0;",
        &["f32", "f32", "b32"],
        "f32",
        |x| {
            if x[2] != 0 { x[0] } else { 0x3f80_0000 }
        },
    );
    check(
        "slct.b32.s32",
        &["b32", "b32", "s32"],
        "b32",
        |x| if value(x[2], "s32") >= 0 { x[0] } else { x[1] },
    );
    check(
        "slct.u64.f32",
        &["b64", "b64", "f32"],
        "b64",
        |x| if real(x[2], "f32") >= 0.0 { x[0] } else { x[1] },
    );
    check("set.ge.u32.f32", &["f32", "f32"], "u32", |x| {
        if real(x[0], "f32") >= real(x[1], "f32") { 0xffff_ffff } else { 0 }
    });
    check("set.lt.f32.s32", &["s32", "s32"], "f32", |x| {
        if value(x[0], "s32") < value(x[1], "s32") { 0x3f80_0000 } else { 0 }
    });
}

#[test]
fn floats_are_classified() {
    for kind in ["f32", "f64"] {
        for class in ["finite", "infinite", "number", "notanumber", "normal", "subnormal"] {
            check_body(
                &format!("testp.{class}.{kind} %q0, %a; selp.b16 %out, 1, 0, %q0;"),
                &[kind],
                "b16",
                |x| {
                    let (exponent, fraction) = match kind {
                        "f32" => (x[0] >> 23 & 0xff == 0xff, x[0] & 0x7f_ffff),
                        _ => (x[0] >> 52 & 0x7ff == 0x7ff, x[0] & ((1 << 52) - 1)),
                    };
                    let zero_exponent =
                        if kind == "f32" { x[0] >> 23 & 0xff == 0 } else { x[0] >> 52 & 0x7ff == 0 };
                    (match class {
                        "finite" => !exponent,
                        "infinite" => exponent && fraction == 0,
                        "number" => !exponent || fraction == 0,
                        "notanumber" => exponent && fraction != 0,
                        "normal" => !exponent && !zero_exponent,
                        _ => zero_exponent && fraction != 0,
                    }) as u64
                },
            );
        }
    }
}
