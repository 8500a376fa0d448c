//! Arithmetic of whole numbers, held against the PTX ISA's definitions in 128-bit numbers.

mod common;
use common::{check, check_body, low, size, value};

const KINDS: [&str; 6] = ["u16", "s16", "u32", "s32", "u64", "s64"];

/// The product in 128 bits: exact but for u64, whose upper half is asked for all the same.
fn product(a: u64, b: u64, kind: &str) -> (u64, u64) {
    let bits = size(kind) * 8;
    let wide = match kind {
        "u64" => a as u128 * b as u128,
        _ => (value(a, kind) * value(b, kind)) as u128,
    };
    (low(wide as i128, kind), low((wide >> bits) as i128, kind))
}

fn wider(kind: &str) -> &'static str {
    match kind {
        "u16" => "u32",
        "s16" => "s32",
        "u32" => "u64",
        _ => "s64",
    }
}

#[test]
fn sums_and_differences_wrap() {
    for kind in KINDS {
        check(&format!("add.{kind}"), &[kind, kind], kind, |x| low(x[0] as i128 + x[1] as i128, kind));
        check(&format!("sub.{kind}"), &[kind, kind], kind, |x| low(x[0] as i128 - x[1] as i128, kind));
    }
}

#[test]
fn saturated_sums_stop_at_the_ends_of_s32() {
    let clamp = |x: i128| low(x.clamp(i32::MIN as i128, i32::MAX as i128), "s32");
    check("add.sat.s32", &["s32", "s32"], "s32", |x| clamp(value(x[0], "s32") + value(x[1], "s32")));
    check("sub.sat.s32", &["s32", "s32"], "s32", |x| clamp(value(x[0], "s32") - value(x[1], "s32")));
    check("mad.hi.sat.s32", &["s32", "s32", "s32"], "s32", |x| {
        clamp(((value(x[0], "s32") * value(x[1], "s32")) >> 32) + value(x[2], "s32"))
    });
}

#[test]
fn products_have_a_low_and_a_high_half_and_a_wide_form() {
    for kind in KINDS {
        check(&format!("mul.lo.{kind}"), &[kind, kind], kind, |x| product(x[0], x[1], kind).0);
        check(&format!("mul.hi.{kind}"), &[kind, kind], kind, |x| product(x[0], x[1], kind).1);
        check(&format!("mad.lo.{kind}"), &[kind, kind, kind], kind, |x| {
            low(product(x[0], x[1], kind).0 as i128 + x[2] as i128, kind)
        });
        check(&format!("mad.hi.{kind}"), &[kind, kind, kind], kind, |x| {
            low(product(x[0], x[1], kind).1 as i128 + x[2] as i128, kind)
        });
    }
    for kind in &KINDS[..4] {
        let wide = wider(kind);
        check(&format!("mul.wide.{kind}"), &[kind, kind], wide, |x| {
            low(value(x[0], kind) * value(x[1], kind), wide)
        });
        check(&format!("mad.wide.{kind}"), &[kind, kind, wide], wide, |x| {
            low(value(x[0], kind) * value(x[1], kind) + x[2] as i128, wide)
        });
    }
}

#[test]
fn products_of_24_bits_see_no_more() {
    let s = |x: u64| ((x << 40) as i64 >> 40) as i128;
    check("mul24.lo.s32", &["s32", "s32"], "s32", |x| low(s(x[0]) * s(x[1]), "s32"));
    check("mul24.lo.u32", &["u32", "u32"], "u32", |x| {
        low((x[0] as i128 & 0xffffff) * (x[1] as i128 & 0xffffff), "u32")
    });
    check("mad24.lo.s32", &["s32", "s32", "s32"], "s32", |x| low(s(x[0]) * s(x[1]) + x[2] as i128, "s32"));
    check("mad24.lo.u32", &["u32", "u32", "u32"], "u32", |x| {
        low((x[0] as i128 & 0xffffff) * (x[1] as i128 & 0xffffff) + x[2] as i128, "u32")
    });
}

#[test]
fn quotients_are_cut_towards_zero() {
    for kind in KINDS {
        let zero = |x: u64| if x == 0 { 1 } else { x };
        // PTX leaves division by zero open, so the divisor is made 1 there.
        let body = |op: &str| {
            let bits = size(kind) * 8;
            let test = if bits == 16 {
                "setp.eq.u16"
            } else if bits == 32 {
                "setp.eq.u32"
            } else {
                "setp.eq.u64"
            };
            format!("{test} %q0, %b, 0; selp.b{bits} %b, 1, %b, %q0; {op}.{kind} %out, %a, %b;")
        };
        check_body(&body("div"), &[kind, kind], kind, |x| {
            low(value(x[0], kind) / value(zero(x[1]), kind), kind)
        });
        check_body(&body("rem"), &[kind, kind], kind, |x| {
            low(value(x[0], kind) % value(zero(x[1]), kind), kind)
        });
    }
}

#[test]
fn smaller_larger_absolute_and_negative() {
    for kind in KINDS {
        check(&format!("min.{kind}"), &[kind, kind], kind, |x| {
            low(value(x[0], kind).min(value(x[1], kind)), kind)
        });
        check(&format!("max.{kind}"), &[kind, kind], kind, |x| {
            low(value(x[0], kind).max(value(x[1], kind)), kind)
        });
        check(&format!("sad.{kind}"), &[kind, kind, kind], kind, |x| {
            low(x[2] as i128 + (value(x[0], kind) - value(x[1], kind)).abs(), kind)
        });
    }
    for kind in ["s16", "s32", "s64"] {
        check(&format!("abs.{kind}"), &[kind], kind, |x| low(value(x[0], kind).abs(), kind));
        check(&format!("neg.{kind}"), &[kind], kind, |x| low(-value(x[0], kind), kind));
    }
    check("min.relu.s32", &["s32", "s32"], "s32", |x| {
        low(value(x[0], "s32").min(value(x[1], "s32")).max(0), "s32")
    });
    check("max.relu.s32", &["s32", "s32"], "s32", |x| {
        low(value(x[0], "s32").max(value(x[1], "s32")).max(0), "s32")
    });
}

#[test]
fn carries_make_sums_of_two_words() {
    // (a, b) + (c, e) with 32-bit words, and the same of 64-bit words through the upper result.
    check_body("add.cc.u32 %r1, %a, %c; addc.u32 %out, %b, %e;", &["u32"; 4], "u32", |x| {
        let [a, c] = [x[0] | x[1] << 32, x[2] | x[3] << 32];
        a.wrapping_add(c) >> 32
    });
    check_body("sub.cc.u32 %r1, %a, %c; subc.u32 %out, %b, %e;", &["u32"; 4], "u32", |x| {
        let [a, c] = [x[0] | x[1] << 32, x[2] | x[3] << 32];
        a.wrapping_sub(c) >> 32
    });
    check_body("add.cc.u64 %d8, %a, %c; addc.cc.u64 %out, %b, %e;", &["u64"; 4], "u64", |x| {
        let wide = |l: u64, h: u64| (h as u128) << 64 | l as u128;
        (wide(x[0], x[1]).wrapping_add(wide(x[2], x[3])) >> 64) as u64
    });
    check_body("sub.cc.u64 %d8, %a, %c; subc.cc.u64 %out, %b, %e;", &["u64"; 4], "u64", |x| {
        let wide = |l: u64, h: u64| (h as u128) << 64 | l as u128;
        (wide(x[0], x[1]).wrapping_sub(wide(x[2], x[3])) >> 64) as u64
    });
    // The upper word of a * b + (c, 0), and the carry that it leaves.
    check_body("mad.lo.cc.u32 %r1, %a, %b, %c; madc.hi.u32 %out, %a, %b, 0;", &["u32"; 3], "u32", |x| {
        x[0].wrapping_mul(x[1]).wrapping_add(x[2]) >> 32
    });
    check_body(
        "add.cc.u32 %r1, %a, %b; addc.cc.u32 %r2, %a, %b; addc.u32 %out, 0, 0;",
        &["u32"; 2],
        "u32",
        |x| {
            let carry = (x[0] + x[1]) >> 32;
            (x[0] + x[1] + carry) >> 32
        },
    );
}

#[test]
fn dot_products_of_bytes() {
    let byte = |x: u64, i: u32, s: &str| {
        if s == "s32" { (x >> (8 * i)) as u8 as i8 as i128 } else { (x >> (8 * i)) as u8 as i128 }
    };
    let half = |x: u64, i: u32, s: &str| {
        if s == "s32" { (x >> (16 * i)) as u16 as i16 as i128 } else { (x >> (16 * i)) as u16 as i128 }
    };
    for a in ["u32", "s32"] {
        let apart = |x: &[u64], i: u32| (byte(x[0], i, a) - byte(x[1], i, a)).abs();
        check(&format!("vabsdiff4.u32.{a}.{a}"), &["u32", "u32", "u32"], "u32", |x| {
            low((0..4).map(|i| apart(x, i) << (8 * i)).sum(), "u32")
        });
        check(&format!("vabsdiff4.u32.{a}.{a}.add"), &["u32", "u32", "u32"], "u32", |x| {
            low(x[2] as i128 + (0..4).map(|i| apart(x, i)).sum::<i128>(), "u32")
        });
        check(&format!("vabsdiff2.u32.{a}.{a}.add"), &["u32", "u32", "u32"], "u32", |x| {
            low(
                x[2] as i128 + (0..2).map(|i| (half(x[0], i, a) - half(x[1], i, a)).abs()).sum::<i128>(),
                "u32",
            )
        });
        for b in ["u32", "s32"] {
            check(&format!("dp4a.{a}.{b}"), &["u32", "u32", "u32"], "u32", |x| {
                low(x[2] as i128 + (0..4).map(|i| byte(x[0], i, a) * byte(x[1], i, b)).sum::<i128>(), "u32")
            });
            for (name, from) in [("lo", 0), ("hi", 2)] {
                check(&format!("dp2a.{name}.{a}.{b}"), &["u32", "u32", "u32"], "u32", |x| {
                    low(
                        x[2] as i128
                            + (0..2).map(|i| half(x[0], i, a) * byte(x[1], from + i, b)).sum::<i128>(),
                        "u32",
                    )
                });
            }
        }
    }
}

#[test]
fn pairs_of_16_bits_are_two_of_the_same() {
    for (op, f) in [("add", (|a, b| a + b) as fn(i128, i128) -> i128), ("min", i128::min), ("max", i128::max)]
    {
        for kind in ["u16", "s16"] {
            check(&format!("{op}.{kind}x2"), &["b32", "b32"], "b32", |x| {
                let half =
                    |s: u32| low(f(value(x[0] >> s & 0xffff, kind), value(x[1] >> s & 0xffff, kind)), "u16");
                half(16) << 16 | half(0)
            });
        }
    }
}
