//! Instructions on parts of words (`vadd`, `vset2`, `vabsdiff4`), and whole-number instructions of the same age: products
//! of 24 bits, the n-th set bit, logic with a test.

mod common;
use common::{check, check_body, low, value};

/// Part `at` of a word, of so many bits.
fn part(word: u64, at: usize, bits: usize, signed: bool) -> i128 {
    let field = (word >> (at * bits)) as i128 & ((1 << bits) - 1);
    if signed && field >> (bits - 1) == 1 { field - (1 << bits) } else { field }
}

type Join = fn(i128, i128) -> i128;

const JOINS: [(&str, Join); 6] = [
    ("add", |a, b| a + b),
    ("sub", |a, b| a - b),
    ("absdiff", |a, b| (a - b).abs()),
    ("min", i128::min),
    ("max", i128::max),
    ("avrg", |a, b| (a + b + (a + b >= 0) as i128).div_euclid(2)),
];

type Test = fn(i128, i128) -> bool;

const TESTS: [(&str, Test); 6] = [
    ("lt", |a, b| a < b),
    ("le", |a, b| a <= b),
    ("gt", |a, b| a > b),
    ("ge", |a, b| a >= b),
    ("eq", |a, b| a == b),
    ("ne", |a, b| a != b),
];

fn clamp(x: i128, bits: usize, signed: bool) -> i128 {
    match signed {
        true => x.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        false => x.clamp(0, (1 << bits) - 1),
    }
}

#[test]
fn halves_and_bytes_are_joined_saturated_and_added_up() {
    for (number, bits) in [(2, 16), (4, 8)] {
        for kind in ["u32", "s32"] {
            let signed = kind == "s32";
            for (name, join) in JOINS {
                let stem = format!("v{name}{number}.{kind}.{kind}.{kind}");
                let parts = move |x: &[u64]| -> Vec<i128> {
                    (0..number)
                        .map(|i| join(part(x[0], i, bits, signed), part(x[1], i, bits, signed)))
                        .collect()
                };
                let placed = move |parts: Vec<i128>| {
                    let fields = parts.iter().enumerate();
                    fields.fold(0, |word, (i, x)| word | (*x as u64 & ((1 << bits) - 1)) << (i * bits))
                };
                check(&stem, &["u32"; 3], "u32", |x| placed(parts(x)));
                let sum = |x: &[u64]| low(x[2] as i128 + parts(x).iter().sum::<i128>(), "u32");
                check(&format!("{stem}.add"), &["u32"; 3], "u32", sum);
                if name == "add" || name == "sub" {
                    let near = |x: &[u64]| placed(parts(x).iter().map(|x| clamp(*x, bits, signed)).collect());
                    check(&format!("{stem}.sat"), &["u32"; 3], "u32", near);
                }
            }
            for (name, test) in TESTS {
                check(&format!("vset{number}.{kind}.{kind}.{name}"), &["u32"; 3], "u32", |x| {
                    let one = |i| test(part(x[0], i, bits, signed), part(x[1], i, bits, signed)) as u64;
                    (0..number).fold(0, |word, i| word | one(i) << (i * bits))
                });
            }
        }
    }
    // Only the upper half has a result; its sources are B's lower half and A's lower half.
    check_body("vadd2.s32.s32.s32 %out.h1, %a.h20, %b.h03, %c;", &["u32"; 3], "u32", |x| {
        let sum = part(x[1], 0, 16, true) + part(x[0], 0, 16, true);
        x[2] & 0xffff | (sum as u64 & 0xffff) << 16
    });
    check_body("vmax4.u32.u32.u32 %out.b20, %a.b7654, %b.b0123, %c;", &["u32"; 3], "u32", |x| {
        let most = |i| part(x[1], i, 8, false).max(part(x[1 - 1], 3 - i, 8, false)) as u64;
        x[2] & 0xff00_ff00 | most(0) | most(2) << 16
    });
}

#[test]
fn words_are_made_of_parts_and_merged() {
    for (kind, signed) in [("u32", false), ("s32", true)] {
        for (name, join) in &JOINS[..5] {
            let stem = format!("v{name}.{kind}.{kind}.{kind}");
            let word = |x: &[u64]| join(value(x[0], kind), value(x[1], kind));
            check(&stem, &["u32", "u32"], "u32", |x| low(word(x), "u32"));
            check(&format!("{stem}.sat"), &["u32", "u32"], "u32", |x| low(clamp(word(x), 32, signed), "u32"));
            check(&format!("{stem}.add"), &["u32"; 3], "u32", |x| low(word(x) + x[2] as i128, "u32"));
            let as_kind = |x: &[u64]| value(low(word(x), "u32"), kind);
            check(&format!("{stem}.min"), &["u32"; 3], "u32", |x| {
                low(as_kind(x).min(value(x[2], kind)), "u32")
            });
            check(&format!("{stem}.max"), &["u32"; 3], "u32", |x| {
                low(as_kind(x).max(value(x[2], kind)), "u32")
            });
            check_body(&format!("{stem} %out, %a.b2, %b.h1;"), &["u32", "u32"], "u32", |x| {
                low(join(part(x[0], 2, 8, signed), part(x[1], 1, 16, signed)), "u32")
            });
            check_body(&format!("{stem}.sat %out.b1, %a, %b, %c;"), &["u32"; 3], "u32", |x| {
                x[2] & 0xffff_00ff | (clamp(word(x), 8, signed) as u64 & 0xff) << 8
            });
            check_body(&format!("{stem} %out.h1, %a, %b, %c;"), &["u32"; 3], "u32", |x| {
                x[2] & 0xffff | (word(x) as u64 & 0xffff) << 16
            });
        }
        for (name, test) in TESTS {
            check(&format!("vset.{kind}.{kind}.{name}"), &["u32", "u32"], "u32", |x| {
                test(value(x[0], kind), value(x[1], kind)) as u64
            });
        }
        check(&format!("vshr.{kind}.{kind}.u32.clamp"), &["u32", "u32"], "u32", |x| {
            low(value(x[0], kind) >> x[1].min(32), "u32")
        });
        check(&format!("vshr.{kind}.{kind}.u32.wrap"), &["u32", "u32"], "u32", |x| {
            low(value(x[0], kind) >> (x[1] & 31), "u32")
        });
        check(&format!("vshl.{kind}.{kind}.u32.clamp"), &["u32", "u32"], "u32", |x| {
            low(value(x[0], kind) << x[1].min(32), "u32")
        });
    }
}

#[test]
fn products_of_24_bits() {
    let signed = |x: u64| part(x, 0, 24, true);
    let unsigned = |x: u64| part(x, 0, 24, false);
    check("mul24.hi.s32", &["s32", "s32"], "s32", |x| low((signed(x[0]) * signed(x[1])) >> 16, "s32"));
    check("mul24.hi.u32", &["u32", "u32"], "u32", |x| low((unsigned(x[0]) * unsigned(x[1])) >> 16, "u32"));
    check("mad24.hi.s32", &["s32"; 3], "s32", |x| {
        low(((signed(x[0]) * signed(x[1])) >> 16) + x[2] as i128, "s32")
    });
    check("mad24.hi.u32", &["u32"; 3], "u32", |x| {
        low(((unsigned(x[0]) * unsigned(x[1])) >> 16) + x[2] as i128, "u32")
    });
    check("mad24.hi.sat.s32", &["s32"; 3], "s32", |x| {
        low(
            clamp(
                low((signed(x[0]) * signed(x[1])) >> 16, "s32") as u32 as i32 as i128 + value(x[2], "s32"),
                32,
                true,
            ),
            "s32",
        )
    });
}

#[test]
fn the_nth_set_bit_is_found_upwards_and_downwards() {
    let body = "and.b32 %r1, %b, 31; fns.b32 %out, %a, %r1, %c;";
    check_body(body, &["b32", "b32", "s32"], "b32", |x| {
        let (bits, base, n) = (x[0], (x[1] & 31) as i64, value(x[2], "s32") as i64);
        let set = |at: i64| bits >> at & 1 == 1;
        let (mut at, mut left) = (base, n.abs().max(1));
        while (0..32).contains(&at) {
            left -= set(at) as i64;
            if left == 0 {
                return at as u64;
            }
            if n == 0 {
                break;
            }
            at += n.signum();
        }
        0xffff_ffff
    });
}

#[test]
fn halves_are_bounded_below_by_zero() {
    for (name, join) in [("min", i128::min as Join), ("max", i128::max)] {
        check(&format!("{name}.relu.s16x2"), &["s16x2", "s16x2"], "s16x2", |x| {
            let half = |i| join(part(x[0], i, 16, true), part(x[1], i, 16, true)).max(0) as u64;
            half(0) | half(1) << 16
        });
    }
}

#[test]
fn a_table_of_logic_tests_its_result() {
    for (name, join) in [("or", (|p, q| p | q) as fn(bool, bool) -> bool), ("and", |p, q| p & q)] {
        let body = format!(
            "setp.gt.s32 %q0, %e, 5; lop3.{name}.b32 %r1|%q1, %a, %b, %c, 0x80, %q0; and.b32 %r1, %r1, -2; selp.u32 %out, 1, 0, %q1; or.b32 %out, %out, %r1;"
        );
        check_body(&body, &["b32", "b32", "b32", "s32"], "b32", |x| {
            let all = x[0] & x[1] & x[2];
            all & 0xffff_fffe | join(all != 0, value(x[3], "s32") > 5) as u64
        });
    }
}
