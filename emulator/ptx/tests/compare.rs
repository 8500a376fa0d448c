//! Comparisons and selections, held against the tables of the PTX ISA.

mod common;
use common::{check, check_body, value};

fn real(x: u64, kind: &str) -> f64 {
    match kind {
        "f16" => half::f16::from_bits(x as u16).to_f64(),
        "bf16" => half::bf16::from_bits(x as u16).to_f64(),
        "f32" => f32::from_bits(x as u32) as f64,
        _ => f64::from_bits(x),
    }
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
