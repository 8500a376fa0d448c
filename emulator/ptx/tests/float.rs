//! Arithmetic of f32 and f64. Where hardware's result is the nearest the reference is Rust's own operator; other
//! directions are found from exact whole-number arithmetic.

mod common;
use common::{check, check_float};

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}
fn b(x: f32) -> u64 {
    x.to_bits() as u64
}
fn g(x: u64) -> f64 {
    f64::from_bits(x)
}
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
fn sat(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 }
}

/// Rounds an exact value, which is `mantissa * 2^exponent`, to f32 in a direction.
fn directed(mantissa: i128, exponent: i32, mode: &str, zero: f32) -> f32 {
    if mantissa == 0 {
        return zero;
    }
    let negative = mantissa < 0;
    let m = mantissa.unsigned_abs();
    let bits = 128 - m.leading_zeros() as i32;
    let least = (exponent + bits - 24).max(-149);
    let shift = least - exponent;
    let (mut kept, rest) = if shift <= 0 {
        (m << -shift, false)
    } else if shift > 127 {
        (0, true)
    } else {
        (m >> shift, m & ((1 << shift) - 1) != 0)
    };
    let away = match mode {
        "rz" => false,
        "rm" => negative,
        _ => !negative,
    };
    if rest && away {
        kept += 1;
    }
    let size = kept as f64 * 2f64.powi(least);
    let size = if size > f32::MAX as f64 { if away { f32::INFINITY } else { f32::MAX } } else { size as f32 };
    if negative { -size } else { size }
}

/// The whole number and the exponent that a finite f32 is.
fn parts(x: f32) -> (i128, i32) {
    let bits = x.to_bits();
    let (exponent, fraction) = ((bits >> 23 & 255) as i32, (bits & 0x7fffff) as i128);
    let (m, e) = if exponent == 0 { (fraction, -149) } else { (fraction | 1 << 23, exponent - 150) };
    (if x < 0.0 { -m } else { m }, e)
}

/// An exact sum of two numbers, if their exponents are near enough for 128 bits; a far smaller one only leaves a trace.
fn sum((a, ea): (i128, i32), (c, ec): (i128, i32)) -> (i128, i32) {
    let ((a, ea), (c, ec)) = if ea >= ec { ((a, ea), (c, ec)) } else { ((c, ec), (a, ea)) };
    if a == 0 {
        return (c, ec);
    }
    let apart = ea - ec;
    if apart <= 70 { ((a << apart) + c, ec) } else { ((a << 70) + c.signum(), ea - 70) }
}

#[test]
fn nearest_results_are_ieee() {
    check_float("add.f32", &["f32", "f32"], "f32", |x| b(f(x[0]) + f(x[1])));
    check_float("sub.rn.f32", &["f32", "f32"], "f32", |x| b(f(x[0]) - f(x[1])));
    check_float("mul.f32", &["f32", "f32"], "f32", |x| b(f(x[0]) * f(x[1])));
    check_float("fma.rn.f32", &["f32"; 3], "f32", |x| b(f(x[0]).mul_add(f(x[1]), f(x[2]))));
    check_float("mad.rn.f32", &["f32"; 3], "f32", |x| b(f(x[0]).mul_add(f(x[1]), f(x[2]))));
    check_float("div.rn.f32", &["f32", "f32"], "f32", |x| b(f(x[0]) / f(x[1])));
    check_float("rcp.rn.f32", &["f32"], "f32", |x| b(1.0 / f(x[0])));
    check_float("sqrt.rn.f32", &["f32"], "f32", |x| b(f(x[0]).sqrt()));
    check_float("add.f64", &["f64", "f64"], "f64", |x| (g(x[0]) + g(x[1])).to_bits());
    check_float("sub.f64", &["f64", "f64"], "f64", |x| (g(x[0]) - g(x[1])).to_bits());
    check_float("mul.rn.f64", &["f64", "f64"], "f64", |x| (g(x[0]) * g(x[1])).to_bits());
    check_float("fma.rn.f64", &["f64"; 3], "f64", |x| g(x[0]).mul_add(g(x[1]), g(x[2])).to_bits());
    check_float("div.rn.f64", &["f64", "f64"], "f64", |x| (g(x[0]) / g(x[1])).to_bits());
    check_float("rcp.rn.f64", &["f64"], "f64", |x| (1.0 / g(x[0])).to_bits());
    check_float("sqrt.rn.f64", &["f64"], "f64", |x| g(x[0]).sqrt().to_bits());
}

#[test]
fn a_result_that_is_no_number_is_the_canonical_one() {
    check("add.f32", &["f32", "f32"], "f32", |x| {
        let sum = f(x[0]) + f(x[1]);
        if sum.is_nan() { 0x7fff_ffff } else { b(sum) }
    });
}

#[test]
fn ftz_flushes_sources_and_results_and_sat_clamps() {
    check_float("add.ftz.f32", &["f32", "f32"], "f32", |x| b(flush(flush(f(x[0])) + flush(f(x[1])))));
    check_float("mul.ftz.f32", &["f32", "f32"], "f32", |x| b(flush(flush(f(x[0])) * flush(f(x[1])))));
    check_float("fma.rn.ftz.f32", &["f32"; 3], "f32", |x| {
        b(flush(flush(f(x[0])).mul_add(flush(f(x[1])), flush(f(x[2])))))
    });
    check_float("div.rn.ftz.f32", &["f32", "f32"], "f32", |x| b(flush(flush(f(x[0])) / flush(f(x[1])))));
    check_float("sqrt.rn.ftz.f32", &["f32"], "f32", |x| b(flush(flush(f(x[0])).sqrt())));
    check("add.sat.f32", &["f32", "f32"], "f32", |x| b(sat(f(x[0]) + f(x[1]))));
    check("fma.rn.sat.f32", &["f32"; 3], "f32", |x| b(sat(f(x[0]).mul_add(f(x[1]), f(x[2])))));
    check("mul.ftz.sat.f32", &["f32", "f32"], "f32", |x| b(sat(flush(flush(f(x[0])) * flush(f(x[1]))))));
}

#[test]
fn directions_of_f32_are_those_of_the_exact_value() {
    for mode in ["rz", "rm", "rp"] {
        let zero = |a: f32, c: f32| {
            if mode == "rm" && (a.is_sign_negative() || c.is_sign_negative())
                || (a.is_sign_negative() && c.is_sign_negative())
            {
                -0.0
            } else {
                0.0
            }
        };
        check_float(&format!("add.{mode}.f32"), &["f32", "f32"], "f32", |x| {
            let (p, q) = (f(x[0]), f(x[1]));
            if !p.is_finite() || !q.is_finite() {
                return b(p + q);
            }
            let (m, e) = sum(parts(p), parts(q));
            b(directed(m, e, mode, zero(p, q)))
        });
        check_float(&format!("mul.{mode}.f32"), &["f32", "f32"], "f32", |x| {
            let (p, q) = (f(x[0]), f(x[1]));
            if !p.is_finite() || !q.is_finite() {
                return b(p * q);
            }
            let ((m, e), (n, o)) = (parts(p), parts(q));
            b(directed(m * n, e + o, mode, p * q))
        });
        check_float(&format!("fma.{mode}.f32"), &["f32"; 3], "f32", |x| {
            let (p, q, r) = (f(x[0]), f(x[1]), f(x[2]));
            if !p.is_finite() || !q.is_finite() || !r.is_finite() {
                return b(p.mul_add(q, r));
            }
            let ((m, e), (n, o)) = (parts(p), parts(q));
            let (s, se) = sum((m * n, e + o), parts(r));
            let product = 0f32.copysign(p) * 1f32.copysign(q);
            b(directed(s, se, mode, zero(product, r)))
        });
        check_float(&format!("div.{mode}.f32"), &["f32", "f32"], "f32", |x| {
            let (p, q) = (f(x[0]), f(x[1]));
            if !p.is_finite() || !q.is_finite() || q == 0.0 || p == 0.0 {
                return b(p / q);
            }
            let ((m, e), (n, o)) = (parts(p), parts(q));
            let (quotient, rest) = ((m.abs() << 80) / n.abs(), (m.abs() << 80) % n.abs());
            let sign = if (m < 0) != (n < 0) { -1 } else { 1 };
            // One more bit that is set where something is left.
            b(directed(sign * (quotient << 1 | (rest != 0) as i128), e - o - 81, mode, 0.0))
        });
        check_float(&format!("sqrt.{mode}.f32"), &["f32"], "f32", |x| {
            let p = f(x[0]);
            if !p.is_finite() || p <= 0.0 {
                return b(p.sqrt());
            }
            let (m, e) = parts(p);
            let (m, e) = if (e & 1) == 0 { (m << 80, e - 80) } else { (m << 81, e - 81) };
            let root = m.isqrt();
            b(directed(root << 1 | (root * root != m) as i128, e / 2 - 1, mode, 0.0))
        });
    }
}

#[test]
fn directions_of_f64_bracket_the_nearest() {
    for (op, n) in [("add", 2), ("mul", 2), ("fma", 3), ("div", 2)] {
        let kinds = vec!["f64"; n];
        let rows: Vec<Vec<u64>> = common::combinations(&kinds)
            .into_iter()
            .filter(|row| row.iter().all(|&x| g(x) == 0.0 || g(x).abs() > 1e-100 && g(x).abs() < 1e100))
            .collect();
        let sources = ["%a", "%b", "%c"][..n].join(", ");
        let of =
            |mode: &str| common::compute(&format!("{op}.{mode}.f64 %out, {sources};"), &kinds, "f64", &rows);
        let [near, down, up, zero] = ["rn", "rm", "rp", "rz"].map(of);
        for i in 0..rows.len() {
            let [near, down, up, zero] = [near[i], down[i], up[i], zero[i]].map(g);
            if near.is_nan() || near.is_infinite() {
                continue;
            }
            assert!(near == down || near == up, "{op} {:x?}: {near} is neither {down} nor {up}", rows[i]);
            assert!(
                down == up || down.next_up() == up,
                "{op} {:x?}: {down} and {up} are not neighbours",
                rows[i]
            );
            assert_eq!(zero, if near > 0.0 { down } else { up }, "{op} {:x?}", rows[i]);
        }
        let exact = |x: &[u64]| match op {
            // These are exact in 53 bits, so all directions agree.
            "add" => g(x[0]) + g(x[1]) - g(x[0]) == g(x[1]) && g(x[0]) + g(x[1]) - g(x[1]) == g(x[0]),
            _ => false,
        };
        for (i, row) in rows.iter().enumerate().filter(|(_, row)| exact(row)) {
            assert_eq!(g(down[i]), g(up[i]), "{row:x?}");
        }
    }
    let thirds = common::compute(
        "div.rm.f64 %out, %a, %b;",
        &["f64", "f64"],
        "f64",
        &[vec![1f64.to_bits(), 3f64.to_bits()]],
    );
    assert_eq!(thirds, [0x3fd5555555555555]);
    let thirds = common::compute(
        "div.rp.f64 %out, %a, %b;",
        &["f64", "f64"],
        "f64",
        &[vec![1f64.to_bits(), 3f64.to_bits()]],
    );
    assert_eq!(thirds, [0x3fd5555555555556]);
    let root = common::compute("sqrt.rp.f64 %out, %a;", &["f64"], "f64", &[vec![2f64.to_bits()]]);
    assert_eq!(root, [2f64.sqrt().to_bits()], "the nearest root of 2 is above it");
}

fn least(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        return b;
    }
    if b.is_nan() {
        return a;
    }
    if a == b {
        if a.is_sign_negative() { a } else { b }
    } else if a < b {
        a
    } else {
        b
    }
}
fn most(a: f64, b: f64) -> f64 {
    -least(-a, -b)
}

#[test]
fn smaller_and_larger_know_signed_zeros_and_nan() {
    let l = |x: &[u64]| least(f(x[0]) as f64, f(x[1]) as f64) as f32;
    let m = |x: &[u64]| most(f(x[0]) as f64, f(x[1]) as f64) as f32;
    check_float("min.f32", &["f32", "f32"], "f32", |x| b(l(x)));
    check_float("max.f32", &["f32", "f32"], "f32", |x| b(m(x)));
    check_float("min.ftz.f32", &["f32", "f32"], "f32", |x| b(l(&[b(flush(f(x[0]))), b(flush(f(x[1])))])));
    let nan = |x: &[u64]| f(x[0]).is_nan() || f(x[1]).is_nan();
    check_float("min.NaN.f32", &["f32", "f32"], "f32", |x| b(if nan(x) { f32::NAN } else { l(x) }));
    check_float("max.NaN.f32", &["f32", "f32"], "f32", |x| b(if nan(x) { f32::NAN } else { m(x) }));
    check_float("min.f64", &["f64", "f64"], "f64", |x| least(g(x[0]), g(x[1])).to_bits());
    check_float("max.f64", &["f64", "f64"], "f64", |x| most(g(x[0]), g(x[1])).to_bits());
    check_float("max.xorsign.abs.f32", &["f32", "f32"], "f32", |x| {
        let sign = (x[0] ^ x[1]) & 0x8000_0000;
        let size = m(&[x[0] & 0x7fff_ffff, x[1] & 0x7fff_ffff]);
        if size.is_nan() { b(size) } else { b(size) | sign }
    });
}

#[test]
fn signs_are_set_without_arithmetic() {
    check("abs.f32", &["f32"], "f32", |x| x[0] & 0x7fff_ffff);
    check("neg.f32", &["f32"], "f32", |x| x[0] ^ 0x8000_0000);
    check("abs.f64", &["f64"], "f64", |x| x[0] & !(1 << 63));
    check("neg.f64", &["f64"], "f64", |x| x[0] ^ 1 << 63);
    check("copysign.f32", &["f32", "f32"], "f32", |x| x[1] & 0x7fff_ffff | x[0] & 0x8000_0000);
    check("copysign.f64", &["f64", "f64"], "f64", |x| x[1] & !(1 << 63) | x[0] & 1 << 63);
    check_float("neg.ftz.f32", &["f32"], "f32", |x| b(-flush(f(x[0]))));
    check_float("abs.ftz.f32", &["f32"], "f32", |x| b(flush(f(x[0])).abs()));
}

#[test]
fn approximations_are_within_the_bounds_of_the_isa() {
    let within = |name: &str, f64s: fn(f64) -> f64, relative: f64, absolute: f64, range: fn(f32) -> bool| {
        let rows: Vec<Vec<u64>> =
            common::combinations(&["f32"]).into_iter().filter(|x| range(f(x[0]))).collect();
        let found = common::compute(&format!("{name} %out, %a;"), &["f32"], "f32", &rows);
        for (row, found) in rows.iter().zip(found) {
            let (wanted, found) = (f64s(f(row[0]) as f64), f(found) as f64);
            let near = (found - wanted).abs() <= wanted.abs() * relative + absolute;
            assert!(
                near || wanted.is_nan() && found.is_nan() || wanted as f32 as f64 == found,
                "{name} {:?}: {found} for {wanted}",
                f(row[0])
            );
        }
    };
    let all = |_: f32| true;
    let ulp = 2f64.powi(-22);
    within("ex2.approx.f32", f64::exp2, ulp, 1e-45, all);
    within("lg2.approx.f32", f64::log2, ulp, ulp, all);
    within("rcp.approx.f32", |x| 1.0 / x, ulp, 0.0, all);
    within("sqrt.approx.f32", f64::sqrt, ulp, 0.0, all);
    within("rsqrt.approx.f32", |x| 1.0 / x.sqrt(), ulp, 0.0, all);
    within("sin.approx.f32", f64::sin, 0.0, 2f64.powf(-20.9), |x| x.abs() < 100.0);
    within("cos.approx.f32", f64::cos, 0.0, 2f64.powf(-20.9), |x| x.abs() < 100.0);
    within("tanh.approx.f32", f64::tanh, 2f64.powi(-11), 0.0, |x| x.abs() < 100.0);
    check_float("ex2.approx.ftz.f32", &["f32"], "f32", |x| b(flush((flush(f(x[0])) as f64).exp2() as f32)));
    check_float("div.full.f32", &["f32", "f32"], "f32", |x| b(f(x[0]) / f(x[1])));
    check_float("div.approx.f32", &["f32", "f32"], "f32", |x| {
        let (p, q) = (f(x[0]), f(x[1]));
        // For divisors above 2^126 the quotient is zero, of an infinite dividend NaN.
        if q.is_finite() && q.abs() > 2f32.powi(126) { b(p * 0f32.copysign(q)) } else { b(p / q) }
    });
    check_float("rcp.approx.ftz.f64", &["f64"], "f64", |x| {
        let flush = |x: f64| if x.is_subnormal() { 0f64.copysign(x) } else { x };
        let upper = |x: f64| f64::from_bits(x.to_bits() >> 32 << 32);
        upper(flush(1.0 / upper(flush(g(x[0]))))).to_bits()
    });
    check_float("rsqrt.approx.f64", &["f64"], "f64", |x| (1.0 / g(x[0]).sqrt()).to_bits());
    check_float("rsqrt.approx.ftz.f64", &["f64"], "f64", |x| {
        let v = if g(x[0]).is_subnormal() { 0f64.copysign(g(x[0])) } else { g(x[0]) };
        (1.0 / v.sqrt()).to_bits() >> 32 << 32
    });
}
