//! Integer arithmetic, logic, shifts and fields of bits.

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
    // A subtraction's carry is that of hardware, which adds the complement: 1 where nothing is borrowed.
    check_body("sub.cc.u32 %r1, %a, %b; addc.u32 %out, 0, 0;", &["u32"; 2], "u32", |x| (x[0] >= x[1]) as u64);
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

fn bit(x: u64, at: u32) -> u64 {
    x >> at & 1
}

#[test]
fn logic_is_bitwise() {
    for kind in ["b16", "b32", "b64"] {
        check(&format!("and.{kind}"), &[kind, kind], kind, |x| x[0] & x[1]);
        check(&format!("or.{kind}"), &[kind, kind], kind, |x| x[0] | x[1]);
        check(&format!("xor.{kind}"), &[kind, kind], kind, |x| x[0] ^ x[1]);
        check(&format!("not.{kind}"), &[kind], kind, |x| low(!x[0] as i128, kind));
        check(&format!("cnot.{kind}"), &[kind], kind, |x| (x[0] == 0) as u64);
        check(&format!("mov.{kind}"), &[kind], kind, |x| x[0]);
    }
    for table in [0u64, 0x80, 0xfe, 0x96, 0xe8, 0xca, 0x1b, 0xff] {
        check_body(&format!("lop3.b32 %out, %a, %b, %c, {table:#x};"), &["b32"; 3], "b32", |x| {
            (0..32)
                .map(|i| bit(table, (bit(x[0], i) << 2 | bit(x[1], i) << 1 | bit(x[2], i)) as u32) << i)
                .sum()
        });
    }
}

#[test]
fn logic_of_predicates() {
    let both = |op: &str, f: fn(u64, u64) -> u64| {
        let body = format!("setp.ne.b16 %q0, %a, 0; setp.ne.b16 %q1, %b, 0; {op} selp.b16 %out, 1, 0, %q2;");
        check_body(&body, &["b16", "b16"], "b16", |x| f((x[0] != 0) as u64, (x[1] != 0) as u64));
    };
    both("and.pred %q2, %q0, %q1;", |a, b| a & b);
    both("or.pred %q2, %q0, %q1;", |a, b| a | b);
    both("xor.pred %q2, %q0, %q1;", |a, b| a ^ b);
    both("not.pred %q2, %q0;", |a, _| 1 - a);
    both("mov.pred %q2, %q0;", |a, _| a);
}

#[test]
fn shifts_clamp_their_amount() {
    for kind in ["b16", "b32", "b64"] {
        let bits = size(kind) * 8;
        check(&format!("shl.{kind}"), &[kind, "u32"], kind, |x| {
            if x[1] >= bits as u64 { 0 } else { low((x[0] as u128).wrapping_shl(x[1] as u32) as i128, kind) }
        });
    }
    for kind in ["u16", "s16", "u32", "s32", "u64", "s64", "b32"] {
        let bits = size(kind) as u64 * 8;
        check(&format!("shr.{kind}"), &[kind, "u32"], kind, |x| {
            low(value(x[0], kind) >> x[1].min(bits), kind)
        });
    }
}

#[test]
fn funnel_shifts_take_32_of_64_bits() {
    let pair = |x: &[u64]| (x[1] << 32 | x[0]) as u128;
    check("shf.l.wrap.b32", &["b32", "b32", "u32"], "b32", |x| {
        low((pair(x) << (x[2] & 31) >> 32) as i128, "b32")
    });
    check("shf.l.clamp.b32", &["b32", "b32", "u32"], "b32", |x| {
        low((pair(x) << x[2].min(32) >> 32) as i128, "b32")
    });
    check("shf.r.wrap.b32", &["b32", "b32", "u32"], "b32", |x| low((pair(x) >> (x[2] & 31)) as i128, "b32"));
    check("shf.r.clamp.b32", &["b32", "b32", "u32"], "b32", |x| {
        low((pair(x) >> x[2].min(32)) as i128, "b32")
    });
}

#[test]
fn fields_are_extracted_and_inserted() {
    for kind in ["u32", "s32", "u64", "s64"] {
        let msb = size(kind) * 8 - 1;
        check(&format!("bfe.{kind}"), &[kind, "u32", "u32"], kind, |x| {
            let (pos, len) = ((x[1] & 0xff) as u32, (x[2] & 0xff) as u32);
            let sign =
                if kind.starts_with('u') || len == 0 { 0 } else { bit(x[0], (pos + len - 1).min(msb)) };
            (0..=msb).map(|i| (if i < len && pos + i <= msb { bit(x[0], pos + i) } else { sign }) << i).sum()
        });
    }
    for kind in ["b32", "b64"] {
        let msb = size(kind) * 8 - 1;
        check(&format!("bfi.{kind}"), &[kind, kind, "u32", "u32"], kind, |x| {
            let (pos, len) = ((x[2] & 0xff) as u32, (x[3] & 0xff) as u32);
            let mut f = x[1];
            for i in (0..len).take_while(|i| pos + i <= msb) {
                f = f & !(1 << (pos + i)) | bit(x[0], i) << (pos + i);
            }
            f
        });
    }
}

#[test]
fn bits_are_counted_found_and_reversed() {
    for kind in ["b32", "b64"] {
        let bits = size(kind) * 8;
        check(&format!("popc.{kind}"), &[kind], "u32", |x| (0..bits).map(|i| bit(x[0], i)).sum());
        check(&format!("clz.{kind}"), &[kind], "u32", |x| {
            (0..bits).rev().take_while(|&i| bit(x[0], i) == 0).count() as u64
        });
        check(&format!("brev.{kind}"), &[kind], kind, |x| {
            (0..bits).map(|i| bit(x[0], i) << (bits - 1 - i)).sum()
        });
    }
    for kind in ["u32", "s32", "u64", "s64"] {
        let msb = size(kind) * 8 - 1;
        let find = |x: u64| {
            let x = if kind.starts_with('s') && bit(x, msb) == 1 { !x } else { x };
            (0..=msb).rev().find(|&i| bit(x, i) == 1)
        };
        check(&format!("bfind.{kind}"), &[kind], "u32", |x| find(x[0]).map_or(0xffff_ffff, |i| i as u64));
        check(&format!("bfind.shiftamt.{kind}"), &[kind], "u32", |x| {
            find(x[0]).map_or(0xffff_ffff, |i| (msb - i) as u64)
        });
    }
}

#[test]
fn masks_and_extensions() {
    check("bmsk.clamp.b32", &["b32", "b32"], "b32", |x| {
        (0..32).map(|i: u64| ((i >= x[0] && i < x[0] + x[1]) as u64) << i).sum()
    });
    check("bmsk.wrap.b32", &["b32", "b32"], "b32", |x| {
        (0..32).map(|i: u64| ((i >= x[0] & 31 && i < (x[0] & 31) + (x[1] & 31)) as u64) << i).sum()
    });
    for (mode, wrap) in [("clamp", false), ("wrap", true)] {
        for kind in ["u32", "s32"] {
            check(&format!("szext.{mode}.{kind}"), &[kind, "u32"], kind, |x| {
                let n = if wrap { x[1] & 31 } else { x[1] };
                if n == 0 {
                    return 0;
                }
                let sign = if kind == "s32" && n < 32 { bit(x[0], n as u32 - 1) } else { 0 };
                (0..32).map(|i: u64| (if i < n { bit(x[0], i as u32) } else { sign }) << i).sum()
            });
        }
    }
}

#[test]
fn bytes_are_permuted() {
    let byte = |x: &[u64], i: u64| (if i < 4 { x[0] >> (8 * i) } else { x[1] >> (8 * (i - 4)) }) & 0xff;
    check("prmt.b32", &["b32", "b32", "b32"], "b32", |x| {
        (0..4)
            .map(|i| {
                let s = x[2] >> (4 * i) & 15;
                let b = byte(x, s & 7);
                (if s & 8 == 0 { b } else { (b >> 7) * 0xff }) << (8 * i)
            })
            .sum()
    });
    // The tables of the ISA, most significant byte first, for selectors 0 to 3.
    let tables: [(&str, [[u64; 4]; 4]); 6] = [
        ("f4e", [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]),
        ("b4e", [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]]),
        ("rc8", [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecl", [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecr", [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]]),
        ("rc16", [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]]),
    ];
    for (mode, table) in tables {
        check(&format!("prmt.b32.{mode}"), &["b32", "b32", "b32"], "b32", |x| {
            let row = table[(x[2] & 3) as usize];
            (0..4).map(|i| byte(x, row[3 - i as usize]) << (8 * i)).sum()
        });
    }
}

#[test]
fn registers_are_packed_and_unpacked() {
    check_body("mov.b32 %out, {%a, %b};", &["b16", "b16"], "b32", |x| x[0] | x[1] << 16);
    check_body("mov.b64 %out, {%a, %b};", &["b32", "b32"], "b64", |x| x[0] | x[1] << 32);
    check_body("mov.b64 %out, {%a, %b, %c, %e};", &["b16"; 4], "b64", |x| {
        x[0] | x[1] << 16 | x[2] << 32 | x[3] << 48
    });
    check_body("mov.b32 {%h1, %out}, %a;", &["b32"], "b16", |x| x[0] >> 16);
    check_body("mov.b32 {%out, _}, %a;", &["b32"], "b16", |x| x[0] & 0xffff);
    check_body("mov.b64 {_, %out}, %a;", &["b64"], "b32", |x| x[0] >> 32);
    check_body("mov.b64 {%h1, %h2, %out, %h3}, %a;", &["b64"], "b16", |x| x[0] >> 32 & 0xffff);
}
