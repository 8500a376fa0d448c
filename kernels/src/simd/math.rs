//! The transcendental functions, each written once for every vector and both element types.
//!
//! All reduce their argument with fused multiply-adds, evaluate a polynomial and patch the ends. No lane ever takes
//! another path because of its neighbours: the rare arguments that need one (huge angles, `pow` of infinities) are
//! redone lane by lane, and only those. Measured errors: f32 within 2 units in the last place everywhere (erfc 6),
//! f64 within 1e-14 relative; the tests hold both.

use super::tables::Tables;
use super::vector::{Float, LANES_MAX, Mask, Vector};

/// A constant in every lane.
#[inline(always)]
fn c<V: Vector>(x: f64) -> V {
    V::splat(V::Elem::from_f64(x))
}

/// The polynomial with these coefficients, lowest power first, by Horner's rule.
#[inline(always)]
fn polynomial<V: Vector>(x: V, coefficients: &[V::Elem]) -> V {
    let mut sum = V::splat(coefficients[coefficients.len() - 1]);
    for &coefficient in coefficients[..coefficients.len() - 1].iter().rev() {
        sum = sum.mul_add(x, V::splat(coefficient));
    }
    sum
}

/// `(r, q, n)` with `e^(x + low) = (1 + r + q) 2^n`, q small beside 1 and n integral, for x within the exponential's
/// range and a low part of at most `x`'s last digits.
#[inline(always)]
fn exp_parts<V: Vector>(x: V, low: Option<V>) -> (V, V, V) {
    let [ln_2, ln_2_low] = V::Elem::LN_2;
    let n = (x * c(std::f64::consts::LOG2_E)).round_even();
    // The first step is exact: n ln_2 has few enough bits beyond x's.
    let r = n.mul_add(V::splat(-ln_2), x);
    let r = n.mul_add(V::splat(-ln_2_low), r);
    let Some(low) = low else {
        return (r, r * r * polynomial(r, V::Elem::EXP), n);
    };
    let sum = r + low;
    let lost = low - (sum - r);
    (sum, (sum * sum).mul_add(polynomial(sum, V::Elem::EXP), lost), n)
}

/// `1 + r + q`, rounded nearly once: what `1 + r` rounds off joins q.
#[inline(always)]
fn one_plus<V: Vector>(r: V, q: V) -> V {
    let one = c::<V>(1.0);
    let sum = one + r;
    sum + (q + (r - (sum - one)))
}

/// `numerator / (large + small)` for `large >= small >= 0`, with the sum's and the quotient's rounding errors put back.
#[inline(always)]
fn divide_by_sum<V: Vector>(numerator: V, large: V, small: V) -> V {
    let sum = large + small;
    let lost = small - (sum - large);
    let inverse = c::<V>(1.0) / sum;
    let quotient = numerator * inverse;
    let remainder = quotient.mul_add(-sum, numerator) - quotient * lost;
    remainder.mul_add(inverse, quotient)
}

/// Two-step clamp that lets NaN through.
#[inline(always)]
fn clamp<V: Vector>(x: V, low: V::Elem, high: V::Elem) -> V {
    V::splat(high).min(V::splat(low).max(x))
}

#[inline(always)]
pub(super) fn exp<V: Vector>(x: V) -> V {
    let (r, q, n) = exp_parts(clamp(x, V::Elem::EXP_LOW, V::Elem::EXP_HIGH), None);
    one_plus(r, q).scale_by_power(n)
}

#[inline(always)]
pub(super) fn exp_m1<V: Vector>(x: V) -> V {
    let (r, q, n) = exp_parts(clamp(x, V::Elem::EXP_M1_LOW, V::Elem::EXP_HIGH), None);
    // (1 + r + q) 2^n - 1, at half size so that 2^n does not overflow before the end.
    let half_power = c::<V>(0.5).scale_by_power(n);
    let half = (r + q).mul_add(half_power, half_power - c(0.5));
    (half + half).copysign(x)
}

/// `ln(2^e (1 + f))` for `1 + f` from `sqrt(1/2)` to `sqrt(2)`.
#[inline(always)]
fn ln_parts<V: Vector>(f: V, e: V) -> V {
    let [ln_2, ln_2_low] = V::Elem::LN_2;
    let s = f / (f + c(2.0));
    let z = s * s;
    let half_square = c::<V>(0.5) * f * f;
    let rest = z.mul_add(polynomial(z, V::Elem::LN), half_square);
    // ln(1 + f) = f - (f^2/2 - s (f^2/2 + R)): the large terms are f, exact, and e ln_2.
    let correction = half_square - s.mul_add(rest, e * V::splat(ln_2_low));
    e.mul_add(V::splat(ln_2), f - correction)
}

/// `(m, e)` with `x = m 2^e` and m from `sqrt(1/2)` to `sqrt(2)`, for x positive and finite.
#[inline(always)]
fn split_near_one<V: Vector>(x: V) -> (V, V) {
    let (m, e) = x.split();
    let high = m.gt(c(std::f64::consts::SQRT_2));
    (V::select(high, m * c(0.5), m), V::select(high, e + c(1.0), e))
}

/// A logarithm's value at the ends of its domain: `x` is the argument of `ln`, `value` what the formula gave.
#[inline(always)]
fn ln_ends<V: Vector>(x: V, value: V) -> V {
    let infinity = V::splat(V::Elem::INFINITY);
    let value = V::select(x.lt(infinity), value, x); // infinity and NaN
    let value = V::select(x.eq(V::zero()), -infinity, value);
    V::select(x.lt(V::zero()), V::splat(V::Elem::NAN), value)
}

#[inline(always)]
pub(super) fn ln<V: Vector>(x: V) -> V {
    let (m, e) = split_near_one(x);
    ln_ends(x, ln_parts(m - c(1.0), e))
}

#[inline(always)]
pub(super) fn ln_1p<V: Vector>(x: V) -> V {
    let one = c::<V>(1.0);
    let u = x + one;
    // What the sum rounded off, exactly: from the smaller term's side.
    let lost = V::select(x.lt(one), x - (u - one), one - (u - x));
    let (m, e) = split_near_one(u);
    let f = (m - one) + lost.scale_by_power(-e);
    let value = ln_ends(u, ln_parts(f, e));
    // The sign is x's except for NaN; for -0 and results that vanish it has to be put back.
    V::select(x.eq(V::zero()), x, value)
}

#[inline(always)]
pub(super) fn tanh<V: Vector>(x: V) -> V {
    let a = clamp(x.abs(), V::Elem::ZERO, V::Elem::TANH_HIGH);
    // t / (t + 2); which of the two is larger decides how the sum's rounding error is found.
    let t = exp_m1(a + a);
    let two = c::<V>(2.0);
    let large = t.gt(two);
    divide_by_sum(t, V::select(large, t, two), V::select(large, two, t)).copysign(x)
}

/// `e^-x` is `(1 + r + q) 2^n`, so that `1 / (1 + e^-x)` is `2^-n / (1 + 2^-n + r + q)`: both tails keep their digits, and what `1 + 2^-n` rounds off,
/// which is nothing for most n, joins `r + q`.
#[inline(always)]
pub(super) fn sigmoid<V: Vector>(x: V) -> V {
    let one = c::<V>(1.0);
    let (r, q, n) = exp_parts(clamp(-x, V::Elem::EXP_M1_LOW, -V::Elem::EXP_LOW), None);
    let power = one.scale_by_power(-n);
    let sum = one + power;
    power / (sum + ((r + q) + (power - (sum - one))))
}

/// `erf(x)` for `|x| <= 1`.
#[inline(always)]
fn erf_centre<V: Vector>(x: V) -> V {
    x.mul_add(polynomial(x * x, V::Elem::ERF), x)
}

/// `erfc(a)` for a from 0.44 up.
#[inline(always)]
fn erfc_tail<V: Vector>(a: V) -> V {
    let a = clamp(a, V::Elem::from_f64(0.44), V::Elem::ERFC_HIGH);
    let w = c::<V>(1.0) / (a + c(2.0));
    let u = c::<V>(-4.0).mul_add(w, c(1.0)); // (a - 2) / (a + 2)
    let scaled = polynomial(u, V::Elem::ERFC) * w;
    let square = a * a;
    let lost = a.mul_add(a, -square);
    let (r, q, n) = exp_parts(-square, Some(-lost));
    (one_plus(r, q) * scaled).scale_by_power(n)
}

#[inline(always)]
pub(super) fn erf<V: Vector>(x: V) -> V {
    let a = x.abs();
    let tail = c::<V>(1.0) - erfc_tail(a);
    V::select(a.le(c(1.0)), erf_centre(x), tail.copysign(x))
}

#[inline(always)]
pub(super) fn erfc<V: Vector>(x: V) -> V {
    let a = x.abs();
    let tail = erfc_tail(a);
    let tail = V::select(x.lt(V::zero()), c::<V>(2.0) - tail, tail);
    V::select(a.lt(c(0.46)), c::<V>(1.0) - erf_centre(x), tail)
}

#[inline(always)]
pub(super) fn sin<V: Vector>(x: V) -> V {
    let value = sine_of_quadrant(x, V::Elem::ZERO);
    // -0 loses its sign in the reduction.
    let value = V::select(x.eq(V::zero()), x, value);
    with_huge_angles(x, value, V::Elem::sin_slow)
}

#[inline(always)]
pub(super) fn cos<V: Vector>(x: V) -> V {
    with_huge_angles(x, sine_of_quadrant(x, V::Elem::ONE), V::Elem::cos_slow)
}

/// `sin(x + turn pi/2)` for moderate x.
#[inline(always)]
fn sine_of_quadrant<V: Vector>(x: V, turn: V::Elem) -> V {
    let [high, middle, low] = V::Elem::PI_2;
    let n = (x * c(std::f64::consts::FRAC_2_PI)).round_even();
    let r = n.mul_add(V::splat(-high), x); // exact, like the exponential's
    let r = n.mul_add(V::splat(-middle), r);
    let r = n.mul_add(V::splat(-low), r);

    let z = r * r;
    let sine = (z * r).mul_add(polynomial(z, V::Elem::SIN), r);
    let half_square = z * c(-0.5);
    let cosine = (z * z).mul_add(polynomial(z, V::Elem::COS), half_square) + c(1.0);

    // The quadrant as a float, 0 to 3; its low bit chooses the function, its high bit the sign.
    let quadrant = n + V::splat(turn);
    let quadrant = (quadrant * c(0.25)).floor().mul_add(c(-4.0), quadrant);
    let odd = quadrant.eq(c(1.0)) | quadrant.eq(c(3.0));
    let value = V::select(odd, cosine, sine);
    V::select(quadrant.ge(c(2.0)), -value, value)
}

/// Redoes the lanes of `value` whose angle is beyond the reduction above.
#[inline(always)]
fn with_huge_angles<V: Vector>(x: V, value: V, slow: impl Fn(V::Elem) -> V::Elem) -> V {
    let huge = !x.abs().le(V::splat(V::Elem::ANGLE_MAX)); // NaN too
    if !huge.any() {
        return value;
    }
    let mut angles = [V::Elem::ZERO; LANES_MAX];
    x.store(&mut angles);
    value.map_where(huge, |lane| slow(angles[lane]))
}

/// `(high, low)` with `high + low = ln(x)` to about a quarter more digits than `high` has, for x positive and finite.
#[inline(always)]
fn ln_extended<V: Vector>(x: V) -> (V, V) {
    let [ln_2, ln_2_low] = V::Elem::LN_2;
    let one = c::<V>(1.0);
    let (m, e) = split_near_one(x);
    // s = (m - 1) / (m + 1) with the division's remainder, and the sum's.
    let numerator = m - one;
    let denominator = m + one;
    let denominator_low = m - (denominator - one);
    let s = numerator / denominator;
    let remainder = (-s).mul_add(denominator_low, (-s).mul_add(denominator, numerator));
    let s_low = remainder / denominator;

    // ln(m) = 2 s + s^3 (2/3 + s^2 ..), the cube and the coefficient with what their roundings lose.
    let z = s * s;
    let z_low = s.mul_add(s, -z) + (s + s) * s_low;
    let cube = s * z;
    let cube_low = s.mul_add(z, -cube) + s.mul_add(z_low, s_low * z);
    let leading = V::splat(V::Elem::LN[0]);
    let leading_low = c::<V>(2.0 / 3.0 - V::Elem::LN[0].to_f64());
    let rest = z * polynomial(z, &V::Elem::LN[1..]);
    let factor = leading + rest;
    let factor_low = rest - (factor - leading) + leading_low;
    let series = cube * factor;
    let series_low = cube.mul_add(factor, -series) + cube.mul_add(factor_low, cube_low * factor);

    // Each of the short sums' terms is larger than the one after it (or the larger one is zero).
    let twice = s + s;
    let exponent = e * V::splat(ln_2);
    let exponent_low = e.mul_add(V::splat(ln_2), -exponent) + e * V::splat(ln_2_low);
    let sum = exponent + twice;
    let lost = V::select(e.eq(V::zero()), V::zero(), twice - (sum - exponent));
    let high = sum + series;
    let lost = lost + (series - (high - sum));
    let low = lost + ((s_low + s_low) + (exponent_low + series_low));
    let sum = high + low;
    (sum, low - (sum - high))
}

#[inline(always)]
pub(super) fn pow<V: Vector>(x: V, y: V) -> V {
    let (zero, one) = (V::zero(), c::<V>(1.0));
    let infinity = V::splat(V::Elem::INFINITY);
    let base = x.abs();

    let (high, low) = ln_extended(base);
    let product = y * high;
    let product_low = y.mul_add(high, -product) + y * low;
    let clamped = clamp(product, V::Elem::EXP_LOW, V::Elem::EXP_HIGH);
    let product_low = V::select(clamped.eq(product), product_low, zero);
    let (r, q, n) = exp_parts(clamped, Some(product_low));
    let value = one_plus(r, q).scale_by_power(n);

    let of_zero = V::select(y.gt(zero), zero, infinity);
    let value = V::select(base.eq(zero), of_zero, value);
    let value = V::select(y.eq(zero), one, value);
    // A negative base: NaN unless y is an integer, negative if it is odd.
    let integral = y.trunc().eq(y);
    let half = y * c(0.5);
    let odd = integral & half.trunc().ne(half);
    let value = V::select(odd, value.copysign(x), value);
    let value = V::select(x.lt(zero) & !integral, V::splat(V::Elem::NAN), value);

    let ordinary = base.lt(infinity) & y.abs().lt(infinity);
    if ordinary.all() {
        return value;
    }
    let mut bases = [V::Elem::ZERO; LANES_MAX];
    let mut exponents = [V::Elem::ZERO; LANES_MAX];
    x.store(&mut bases);
    y.store(&mut exponents);
    value.map_where(!ordinary, |lane| bases[lane].pow_slow(exponents[lane]))
}
