//! Arithmetic of f16 and bf16, alone and packed: exact in wider numbers and rounded once, with `half`'s rounding from
//! f64 where one operation is exact there.

mod common;
use common::{check, check_body, check_float};
use half::{bf16, f16};

fn h(x: u64) -> f64 {
    f16::from_bits(x as u16).to_f64()
}
fn hb(x: f64) -> u64 {
    f16::from_f64(x).to_bits() as u64
}
fn r(x: u64) -> f64 {
    bf16::from_bits(x as u16).to_f64()
}

/// A sum as a whole number times a power of two, rounded to a format with so many bits of a fraction, half to even.
fn exact_sum(a: f64, b: f64, fraction: i32, least: i32, most: f64) -> f64 {
    if !a.is_finite() || !b.is_finite() || a + b == 0.0 {
        return a + b;
    }
    let parts = |x: f64| {
        let bits = x.to_bits();
        let e = (bits >> 52 & 0x7ff) as i32;
        let m = (bits & ((1 << 52) - 1)) as i128 | if e == 0 { 0 } else { 1 << 52 };
        let m = if x < 0.0 { -m } else { m };
        let zeros = if m == 0 { 0 } else { m.trailing_zeros() };
        (m >> zeros, e.max(1) - 1075 + zeros as i32)
    };
    let ((mut m, mut e), (mut n, mut o)) = (parts(a), parts(b));
    if m == 0 {
        (m, e, n, o) = (n, o, 0, 0);
    }
    if n != 0 && (e < o) {
        ((m, e), (n, o)) = ((n, o), (m, e));
    }
    if n != 0 {
        let apart = (e - o).min(70);
        if e - o > 70 {
            n = n.signum();
            o = e - 70;
        }
        (m, e) = ((m << apart) + n, o);
    }
    let bits = 128 - m.unsigned_abs().leading_zeros() as i32;
    let quantum = (e + bits - 1 - fraction).max(least);
    let shift = quantum - e;
    let kept = if shift <= 0 {
        (m.unsigned_abs() as f64) * 2f64.powi(-shift)
    } else if shift > 126 {
        0.0
    } else {
        let (kept, rest, half) =
            (m.unsigned_abs() >> shift, m.unsigned_abs() & ((1 << shift) - 1), 1u128 << (shift - 1));
        (kept + (rest > half || rest == half && kept & 1 == 1) as u128) as f64
    };
    let size = kept * 2f64.powi(quantum);
    let size = if size > most { f64::INFINITY } else { size };
    if m < 0 { -size } else { size }
}

fn brain(x: f64) -> u64 {
    // Exact by now.
    bf16::from_f64(x).to_bits() as u64
}
fn brain_sum(a: f64, b: f64) -> u64 {
    brain(exact_sum(a, b, 7, -133, 3.3895313892515355e38))
}
fn half_sum(a: f64, b: f64) -> u64 {
    hb(exact_sum(a, b, 10, -24, 65504.0))
}
fn flush(x: f64) -> f64 {
    if x.abs() < 6.103515625e-5 { 0f64.copysign(x) } else { x }
}

#[test]
fn f16_is_rounded_once() {
    check_float("add.f16", &["f16", "f16"], "f16", |x| half_sum(h(x[0]), h(x[1])));
    check_float("sub.f16", &["f16", "f16"], "f16", |x| half_sum(h(x[0]), -h(x[1])));
    check_float("mul.f16", &["f16", "f16"], "f16", |x| hb(h(x[0]) * h(x[1])));
    check_float("fma.rn.f16", &["f16"; 3], "f16", |x| half_sum(h(x[0]) * h(x[1]), h(x[2])));
    check_float("fma.rn.relu.f16", &["f16"; 3], "f16", |x| {
        let sum = half_sum(h(x[0]) * h(x[1]), h(x[2]));
        if sum & 0x8000 != 0 && !h(sum).is_nan() { 0 } else { sum }
    });
    check_float("add.ftz.f16", &["f16", "f16"], "f16", |x| {
        hb(flush(h(half_sum(flush(h(x[0])), flush(h(x[1]))))))
    });
    check("mul.sat.f16", &["f16", "f16"], "f16", |x| {
        let product = h(x[0]) * h(x[1]);
        if product.is_nan() || product <= 0.0 { 0 } else { hb(product.min(1.0)) }
    });
}

#[test]
fn bf16_is_rounded_once() {
    check_float("add.rn.bf16", &["bf16", "bf16"], "bf16", |x| brain_sum(r(x[0]), r(x[1])));
    check_float("sub.rn.bf16", &["bf16", "bf16"], "bf16", |x| brain_sum(r(x[0]), -r(x[1])));
    check_float("mul.rn.bf16", &["bf16", "bf16"], "bf16", |x| {
        brain_sum(r(x[0]) * r(x[1]), 0f64.copysign(r(x[0]) * r(x[1])))
    });
    check_float("fma.rn.bf16", &["bf16"; 3], "bf16", |x| brain_sum(r(x[0]) * r(x[1]), r(x[2])));
}

#[test]
fn packed_halves_are_two_of_the_same() {
    for kind in ["f16", "bf16"] {
        for (op, n) in [
            ("add", 2),
            ("sub", 2),
            ("mul", 2),
            ("fma.rn", 3),
            ("min", 2),
            ("max", 2),
            ("min.NaN", 2),
            ("max.NaN", 2),
        ] {
            let halves = vec!["b32"; n];
            let sources = ["%a", "%b", "%c"];
            let rows: Vec<Vec<u64>> = common::combinations(&vec![kind; n])
                .chunks_exact(2)
                .map(|two| two[0].iter().zip(&two[1]).map(|(low, high)| low | high << 16).collect())
                .collect();
            let packed = common::compute(
                &format!("{op}.{kind}x2 %out, {};", sources[..n].join(", ")),
                &halves,
                "b32",
                &rows,
            );
            for shift in [0, 16] {
                let parts: Vec<Vec<u64>> =
                    rows.iter().map(|row| row.iter().map(|x| x >> shift & 0xffff).collect()).collect();
                let alone = common::compute(
                    &format!("{op}.{kind} %out, {};", sources[..n].join(", ")),
                    &vec![kind; n],
                    kind,
                    &parts,
                );
                for (i, alone) in alone.iter().enumerate() {
                    assert_eq!(packed[i] >> shift & 0xffff, *alone, "{op}.{kind}x2 of {:x?}", rows[i]);
                }
            }
        }
        check(&format!("neg.{kind}x2"), &["b32"], "b32", |x| x[0] ^ 0x8000_8000);
        check(&format!("abs.{kind}x2"), &["b32"], "b32", |x| x[0] & 0x7fff_7fff);
        check(&format!("neg.{kind}"), &[kind], kind, |x| x[0] ^ 0x8000);
        check(&format!("abs.{kind}"), &[kind], kind, |x| x[0] & 0x7fff);
    }
}

#[test]
fn smaller_and_larger_of_halves() {
    let least = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    };
    check_float("min.f16", &["f16", "f16"], "f16", |x| hb(least(h(x[0]), h(x[1]))));
    check_float("max.f16", &["f16", "f16"], "f16", |x| hb(-least(-h(x[0]), -h(x[1]))));
    check_float("min.bf16", &["bf16", "bf16"], "bf16", |x| brain(least(r(x[0]), r(x[1]))));
    check_float("max.bf16", &["bf16", "bf16"], "bf16", |x| brain(-least(-r(x[0]), -r(x[1]))));
    check_float("max.NaN.bf16", &["bf16", "bf16"], "bf16", |x| {
        let (a, b) = (r(x[0]), r(x[1]));
        if a.is_nan() || b.is_nan() { 0x7fff } else { brain(-least(-a, -b)) }
    });
}

#[test]
fn approximations_of_halves_are_rounded_once() {
    check_float("ex2.approx.f16", &["f16"], "f16", |x| hb(h(x[0]).exp2()));
    check_float("tanh.approx.f16", &["f16"], "f16", |x| hb(h(x[0]).tanh()));
}

#[test]
fn both_halves_are_compared() {
    let body = "set.gt.f16x2.f16x2 %out, %a, %b;";
    check_body(body, &["b32", "b32"], "b32", |x| {
        let one = |s: u32| if h(x[0] >> s & 0xffff) > h(x[1] >> s & 0xffff) { 0x3c00 << s } else { 0 };
        one(0) | one(16)
    });
    let body = "setp.lt.f16x2 %q0|%q1, %a, %b; selp.b32 %r1, 1, 0, %q0; selp.b32 %r2, 2, 0, %q1; or.b32 %out, %r1, %r2;";
    check_body(body, &["b32", "b32"], "b32", |x| {
        let one = |s: u32| (h(x[0] >> s & 0xffff) < h(x[1] >> s & 0xffff)) as u64;
        one(0) | one(16) << 1
    });
}

#[test]
fn sizes_with_the_exclusive_or_of_signs() {
    for kind in ["f16", "bf16"] {
        for (name, larger) in [("min", false), ("max", true)] {
            for nan in ["", ".NaN"] {
                check_float(&format!("{name}{nan}.xorsign.abs.{kind}"), &[kind, kind], kind, |x| {
                    let (a, b) = (x[0] & 0x7fff, x[1] & 0x7fff);
                    let infinity = if kind == "f16" { 0x7c00 } else { 0x7f80 };
                    let size = match (a > infinity, b > infinity, nan) {
                        (true, true, _) | (true, _, ".NaN") | (_, true, ".NaN") => 0x7fff,
                        (true, ..) => b,
                        (_, true, _) => a,
                        // Sizes are in the order of their bits.
                        _ if larger => a.max(b),
                        _ => a.min(b),
                    };
                    size | (x[0] ^ x[1]) & 0x8000
                });
            }
        }
    }
}

#[test]
fn what_is_too_large_becomes_the_largest_number() {
    for (kind, most) in [("f16", 0x7bff), ("bf16", 0x7f7f)] {
        check_body(&format!("cvt.rn.{kind}.f32 %h1, %a; cvt.rn.satfinite.{kind}.f32 %h2, %a; and.b16 %out, %h1, 0x7fff;
            setp.gt.u16 %q0, %out, {}; selp.b16 %out, %h2, 1, %q0; setp.ne.b16 %q1, %h1, %h2; and.pred %q1, %q1, !%q0; selp.b16 %out, 2, %out, %q1;", most), &["f32"], "b16", |x| {
            // 1 where both forms agree, as they must for what is not too large; else the largest number.
            let (value, limit) = (f32::from_bits(x[0] as u32), if kind == "f16" { 65520.0 } else { 3.3961775e38 });
            match value.abs() >= limit {
                true => most | (value.is_sign_negative() as u64) << 15,
                false if value.is_nan() => 0x7fff,
                false => 1,
            }
        });
    }
}
