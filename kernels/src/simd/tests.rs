//! Every function on every instruction set this CPU has, against a twin: a scalar reference in f64 written from the
//! formula.

#![allow(unsafe_code)]

use super::vector::Mask;
use super::*;

/// What a case does to a vector of any kind: `f(a, b)`.
trait Function {
    fn call<V: Vector>(a: V, b: V) -> V;
}

/// Runs a [`Function`] over slices the way kernels do: whole vectors, then a partial one.
struct Map<'a, T, F> {
    a: &'a [T],
    b: &'a [T],
    function: std::marker::PhantomData<F>,
}

impl<T: Float, F: Function> Kernel for Map<'_, T, F> {
    type Output = Vec<T>;

    #[inline(always)]
    fn run<S: Isa>(self) -> Vec<T> {
        let mut out = vec![T::ZERO; self.a.len()];
        let lanes = T::Vec::<S>::LANES;
        for (i, out) in out.chunks_mut(lanes).enumerate() {
            let (a, b) = (&self.a[i * lanes..], &self.b[i * lanes..]);
            if out.len() == lanes {
                F::call(T::Vec::<S>::load(a), T::Vec::<S>::load(b)).store(out);
            } else {
                let a = T::Vec::<S>::load_partial(a, T::ONE);
                F::call(a, T::Vec::<S>::load_partial(b, T::ONE)).store_partial(out);
            }
        }
        out
    }
}

fn map_on<T: Float, F: Function>(isa: IsaName, a: &[T], b: &[T]) -> Vec<T> {
    dispatch_on(isa, Map { a, b, function: std::marker::PhantomData::<F> }).expect("only available ones")
}

macro_rules! function {
    ($name:ident, $a:ident $b:ident, $body:expr) => {
        struct $name;
        impl Function for $name {
            #[inline(always)]
            fn call<V: Vector>($a: V, $b: V) -> V {
                $body
            }
        }
    };
}

/// A tiny generator, enough to spread arguments (multiplicative congruential, high bits).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 ^ (self.0 >> 29)
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn special<T: Float>() -> Vec<T> {
    let mut values = Vec::new();
    for x in [
        0.0, 1.0, 0.5, 2.0, 3.0, 1.5, 1e-3, 1e-8, 1e-20, 1e-38, 1e-45, 1e-310, 5e-324, 1e20, 1e38, 1e300,
        88.7, 88.73, 89.0, 103.9, 104.1, 709.7, 709.8, 745.2, 1e6, 1048577.0, 32769.0, 0.4399, 0.46,
        0.9999999, 1.0000001,
    ] {
        values.extend([T::from_f64(x), T::from_f64(-x)]);
    }
    values.extend([T::INFINITY, -T::INFINITY, T::NAN, T::MAX, -T::MAX]);
    values
}

/// Evenly spread over `low..=high` and, with logarithmic spacing, over every magnitude within.
fn sweep<T: Float>(low: f64, high: f64) -> Vec<T> {
    let mut draws = Draws(7);
    let mut values = special::<T>();
    for _ in 0..200_001 {
        values.push(T::from_f64(draws.between(low, high)));
        let magnitude = draws.between(-150.0, low.abs().max(high).log2()).exp2();
        let x = if draws.next().is_multiple_of(2) { magnitude } else { -magnitude };
        values.push(T::from_f64(x.clamp(low, high)));
    }
    values
}

/// The distance of two f32 in units in the last place of the exact value, which is rounded to f64 only.
fn ulps_f32(got: f32, exact: f64) -> f64 {
    let rounded = exact as f32;
    if got.is_nan() || rounded.is_nan() {
        return if got.is_nan() && rounded.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if got == rounded {
        return if got == 0.0 && got.is_sign_negative() != rounded.is_sign_negative() {
            f64::INFINITY
        } else {
            0.0
        };
    }
    let magnitude = rounded.abs().clamp(f32::MIN_POSITIVE, f32::MAX);
    let ulp = (f64::from(magnitude).log2().floor() - 23.0).exp2();
    let got = if got.is_infinite() { f64::from(got.signum()) * 2f64.powi(128) } else { f64::from(got) };
    (got - exact).abs() / ulp
}

fn relative_f64(got: f64, exact: f64) -> f64 {
    if got.is_nan() || exact.is_nan() {
        return if got.is_nan() && exact.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if got == exact {
        return if got == 0.0 && got.is_sign_negative() != exact.is_sign_negative() {
            f64::INFINITY
        } else {
            0.0
        };
    }
    // Relative to the smallest normal number below it, where results lose digits by themselves.
    (got - exact).abs() / exact.abs().max(f64::MIN_POSITIVE)
}

struct Limits {
    f32_ulps: f64,
    f64_relative: f64,
}

const LIMITS: Limits = Limits { f32_ulps: 2.0, f64_relative: 1e-14 };

/// Holds `F` to the limits over the two ranges, and f32 lanes to equal bits wherever they stand.
fn check<F: Function>(name: &str, f32s: (f64, f64), f64s: (f64, f64), exact: impl Fn(f64) -> f64) {
    check_within::<F>(LIMITS, name, f32s, f64s, exact);
}

fn check_within<F: Function>(
    limits: Limits,
    name: &str,
    f32s: (f64, f64),
    f64s: (f64, f64),
    exact: impl Fn(f64) -> f64,
) {
    let narrow: Vec<f32> = sweep(f32s.0, f32s.1);
    let wide: Vec<f64> = sweep(f64s.0, f64s.1);
    for isa in available_isas() {
        let got = map_on::<f32, F>(isa, &narrow, &narrow);
        let worst = narrow.iter().zip(&got).map(|(&x, &y)| (ulps_f32(y, exact(f64::from(x))), x, y));
        let worst = worst.max_by(|a, b| a.0.total_cmp(&b.0)).expect("not empty");
        println!("{name} f32 {isa}: {:.3} ulp at {:e}", worst.0, worst.1);
        assert!(
            worst.0 <= limits.f32_ulps,
            "{name} f32 {isa}: {} ulp at {:e}: {:e}",
            worst.0,
            worst.1,
            worst.2
        );

        let wide_got = map_on::<f64, F>(isa, &wide, &wide);
        let worst = wide.iter().zip(&wide_got).map(|(&x, &y)| (relative_f64(y, exact(x)), x, y));
        let worst = worst.max_by(|a, b| a.0.total_cmp(&b.0)).expect("not empty");
        println!("{name} f64 {isa}: {:.2e} at {:e}", worst.0, worst.1);
        assert!(
            worst.0 <= limits.f64_relative,
            "{name} f64 {isa}: {} at {:e}: {:e}",
            worst.0,
            worst.1,
            worst.2
        );

        for start in 1..18 {
            let tail = &narrow[start..start + 37];
            let again = map_on::<f32, F>(isa, tail, tail);
            for (a, b) in again.iter().zip(&got[start..]) {
                assert_eq!(a.to_bits(), b.to_bits(), "{name} {isa}: bits depend on the position");
            }
        }
    }
}

function!(Exp, a _b, a.exp());
function!(ExpM1, a _b, a.exp_m1());
function!(Ln, a _b, a.ln());
function!(Ln1p, a _b, a.ln_1p());
function!(Tanh, a _b, a.tanh());
function!(Sigmoid, a _b, a.sigmoid());
function!(Erf, a _b, a.erf());
function!(Erfc, a _b, a.erfc());
function!(Sin, a _b, a.sin());
function!(Cos, a _b, a.cos());
function!(Pow, a b, a.pow(b));

#[test]
fn exp_is_close_to_the_exact_value() {
    check::<Exp>("exp", (-105.0, 90.0), (-746.0, 710.0), f64::exp);
}

#[test]
fn exp_m1_is_close_to_the_exact_value() {
    check::<ExpM1>("exp_m1", (-20.0, 90.0), (-40.0, 710.0), f64::exp_m1);
}

#[test]
fn ln_is_close_to_the_exact_value() {
    check::<Ln>("ln", (-1.0, 3e38), (-1.0, 1e308), f64::ln);
    check::<Ln>("ln near 1", (0.5, 2.0), (0.5, 2.0), f64::ln);
}

#[test]
fn ln_1p_is_close_to_the_exact_value() {
    check::<Ln1p>("ln_1p", (-1.0, 3e38), (-1.0, 1e308), f64::ln_1p);
    check::<Ln1p>("ln_1p near 0", (-0.9, 2.0), (-0.9, 2.0), f64::ln_1p);
}

#[test]
fn tanh_is_close_to_the_exact_value() {
    check::<Tanh>("tanh", (-10.0, 10.0), (-20.0, 20.0), f64::tanh);
    check::<Tanh>("tanh near 0", (-1.0, 1.0), (-1.0, 1.0), f64::tanh);
}

#[test]
fn sigmoid_is_close_to_the_exact_value() {
    let exact = |x: f64| if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) };
    check::<Sigmoid>("sigmoid", (-105.0, 105.0), (-750.0, 750.0), exact);
}

#[test]
fn sin_and_cos_are_close_to_the_exact_value() {
    for reach in [1.0, 100.0, 32768.0, 1e9, 1e30] {
        check::<Sin>("sin", (-reach, reach), (-reach, reach), f64::sin);
        check::<Cos>("cos", (-reach, reach), (-reach, reach), f64::cos);
    }
}

/// erfc for x >= 0: the alternating series for erf below 1, the continued fraction above.
fn erfc_oracle(x: f64) -> f64 {
    if x > 30.0 {
        return 0.0;
    }
    if x > 1.0 {
        // erfc(x) = e^(-x^2) / sqrt(pi) / (x + (1/2) / (x + 1 / (x + (3/2) / (x + ...)))), from the far end.
        let tail = (1..400).rev().fold(x, |below, k| x + 0.5 * f64::from(k) / below);
        let square = x * x;
        let lost = x.mul_add(x, -square);
        return (-square).exp() * (1.0 - lost) / (std::f64::consts::PI.sqrt() * tail);
    }
    1.0 - erf_series(x)
}

/// erf(x) = 2 / sqrt(pi) e^(-x^2) sum of 2^n x^(2n+1) / (1 3 5 ..), whose terms are all positive.
fn erf_series(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

fn erf_oracle(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let a = x.abs();
    (if a < 1.0 { erf_series(a) } else { 1.0 - erfc_oracle(a) }).copysign(x)
}

#[test]
fn erf_is_close_to_the_exact_value() {
    check::<Erf>("erf", (-10.0, 10.0), (-28.0, 28.0), erf_oracle);
    check::<Erf>("erf near 0", (-1.5, 1.5), (-1.5, 1.5), erf_oracle);
}

#[test]
fn erfc_is_close_to_the_exact_value() {
    // A product of four rounded factors, so a wider limit in f32.
    let limits = || Limits { f32_ulps: 6.0, ..LIMITS };
    let exact = |x: f64| {
        if x < 0.0 {
            1.0 + erf_oracle(-x)
        } else if x.is_nan() {
            x
        } else {
            erfc_oracle(x)
        }
    };
    check_within::<Erfc>(limits(), "erfc", (-10.0, 10.5), (0.0, 26.5), exact);
    check_within::<Erfc>(limits(), "erfc centre", (-1.5, 2.5), (-2.0, 0.6), exact);
}

#[test]
fn erfc_agrees_with_values_from_tables() {
    // To 17 digits, from the series in 60.
    let table = TABLE_OF_ERFC;
    for isa in available_isas() {
        let x: Vec<f64> = table.iter().map(|row| row.0).collect();
        for ((x, exact), got) in table.iter().zip(map_on::<f64, Erfc>(isa, &x, &x)) {
            assert!(relative_f64(got, *exact) < 1e-14, "{isa}: erfc({x}) = {got:e}, not {exact:e}");
        }
    }
}

#[test]
fn pow_is_close_to_the_exact_value_and_keeps_ieee_special_cases() {
    let mut draws = Draws(11);
    let (mut bases, mut exponents) = (Vec::new(), Vec::new());
    for x in special::<f64>() {
        for y in special::<f64>() {
            bases.push(x);
            exponents.push(y);
        }
    }
    for _ in 0..200_003 {
        let base = draws.between(-40.0, 40.0).exp2();
        bases.push(if draws.next().is_multiple_of(4) { -base } else { base });
        let reach = 130.0 / base.log2().abs().max(0.01);
        let exponent = draws.between(-reach, reach);
        exponents.push(if draws.next().is_multiple_of(2) { exponent.round() } else { exponent });
    }
    for isa in available_isas() {
        let wide = map_on::<f64, Pow>(isa, &bases, &exponents);
        let (mut worst, mut worst_wide) = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0));
        for ((&x, &y), &got) in bases.iter().zip(&exponents).zip(&wide) {
            let error = relative_f64(got, x.powf(y));
            worst_wide = if error > worst_wide.0 { (error, x, y) } else { worst_wide };
        }
        let x32: Vec<f32> = bases.iter().map(|&x| x as f32).collect();
        let y32: Vec<f32> = exponents.iter().map(|&y| y as f32).collect();
        let narrow = map_on::<f32, Pow>(isa, &x32, &y32);
        for ((&x, &y), &got) in x32.iter().zip(&y32).zip(&narrow) {
            let error = ulps_f32(got, f64::from(x).powf(f64::from(y)));
            worst = if error > worst.0 { (error, f64::from(x), f64::from(y)) } else { worst };
        }
        println!(
            "pow {isa}: f32 {:.3} ulp at {:e}^{:e}; f64 {:.2e} at {:e}^{:e}",
            worst.0, worst.1, worst.2, worst_wide.0, worst_wide.1, worst_wide.2
        );
        assert!(worst.0 <= LIMITS.f32_ulps && worst_wide.0 <= LIMITS.f64_relative);
    }
}

function!(Min, a b, a.min(b));
function!(Max, a b, a.max(b));
function!(NanMin, a b, a.nan_min(b));
function!(NanMax, a b, a.nan_max(b));
function!(Abs, a _b, a.abs());
function!(Negate, a _b, -a);
function!(Sqrt, a _b, a.sqrt());
function!(Floor, a _b, a.floor());
function!(Trunc, a _b, a.trunc());
function!(RoundEven, a _b, a.round_even());
function!(Copysign, a b, a.copysign(b));
function!(MulAdd, a b, a.mul_add(b, a - b));
function!(Arithmetic, a b, (a + b) * (a - b) / b);
function!(Compare, a b, {
    let (one, none) = (V::splat(V::Elem::ONE), V::zero());
    let digit = |mask| V::select(mask, one, none);
    let two = one + one;
    let mut sum = none;
    for mask in [a.lt(b), a.le(b), a.gt(b), a.ge(b), a.eq(b), a.ne(b), a.is_nan(), !a.lt(b) & b.gt(none) | a.gt(two)] {
        sum = sum * two + digit(mask);
    }
    sum
});

#[test]
fn exact_operations_have_the_bits_of_plain_arithmetic() {
    fn holds<F: Function>(name: &str, exact: impl Fn(f64, f64) -> f64, exact_f32: impl Fn(f32, f32) -> f32) {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for x in special::<f64>().into_iter().chain([2.5, -2.5, 3.5, 0.49999997, 8388607.5]) {
            for y in special::<f64>() {
                a.push(x);
                b.push(y);
            }
        }
        let a32: Vec<f32> = a.iter().map(|&x| x as f32).collect();
        let b32: Vec<f32> = b.iter().map(|&x| x as f32).collect();
        for isa in available_isas() {
            for ((x, y), got) in a.iter().zip(&b).zip(map_on::<f64, F>(isa, &a, &b)) {
                let want = exact(*x, *y);
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{name} {isa} ({x:e}, {y:e}): {got:e}, not {want:e}");
            }
            for ((x, y), got) in a32.iter().zip(&b32).zip(map_on::<f32, F>(isa, &a32, &b32)) {
                let want = exact_f32(*x, *y);
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{name} {isa} f32 ({x:e}, {y:e}): {got:e}, not {want:e}");
            }
        }
    }
    macro_rules! holds {
        ($function:ident, |$a:ident, $b:ident| $body:expr) => {
            holds::<$function>(stringify!($function), |$a, $b| $body, |$a, $b| $body)
        };
    }
    holds!(Min, |a, b| if a < b { a } else { b });
    holds!(Max, |a, b| if a > b { a } else { b });
    holds!(NanMin, |a, b| if a.is_nan() || a < b { a } else { b });
    holds!(NanMax, |a, b| if a.is_nan() || a > b { a } else { b });
    holds!(Abs, |a, _b| a.abs());
    holds!(Negate, |a, _b| -a);
    holds!(Sqrt, |a, _b| a.sqrt());
    holds!(Floor, |a, _b| a.floor());
    holds!(Trunc, |a, _b| a.trunc());
    holds!(RoundEven, |a, _b| a.round_ties_even());
    holds!(Copysign, |a, b| a.copysign(b));
    holds!(MulAdd, |a, b| a.mul_add(b, a - b));
    holds!(Arithmetic, |a, b| (a + b) * (a - b) / b);
    holds!(Compare, |a, b| {
        let bits = [
            a < b,
            a <= b,
            a > b,
            a >= b,
            a == b,
            a != b,
            a.is_nan(),
            (a >= b || a.is_nan() || b.is_nan()) && b > 0.0 || a > 2.0,
        ];
        bits.iter().fold(0.0, |sum, &bit| sum * 2.0 + if bit { 1.0 } else { 0.0 })
    });
}

/// The three reductions, a square of all elements transposed, half of one interleaved where that can be, some lanes loaded alone, and the masks'
/// `any` and `all`.
struct Lanes<'a, T>(&'a [T]);

struct LanesOutput<T> {
    lanes: usize,
    sum: T,
    max: T,
    transposed: Vec<T>,
    interleaved: Option<Vec<T>>,
    any: bool,
    all: bool,
    /// Every second lane.
    some: Vec<T>,
}

impl<T: Float> Kernel for Lanes<'_, T> {
    type Output = LanesOutput<T>;

    #[inline(always)]
    fn run<S: Isa>(self) -> LanesOutput<T> {
        let lanes = T::Vec::<S>::LANES;
        let v = T::Vec::<S>::load(self.0);
        let mut square = [v; LANES_MAX];
        for (row, values) in square.iter_mut().zip(self.0.chunks_exact(lanes)) {
            *row = T::Vec::<S>::load(values);
        }
        T::Vec::<S>::transpose(&mut square);
        let mut transposed = vec![T::ZERO; lanes * lanes];
        for (row, transposed) in square.iter().zip(transposed.chunks_exact_mut(lanes)) {
            row.store(transposed);
        }
        let interleaved =
            const { T::Vec::<S>::LANES == LANES_MAX && T::Vec::<S>::PARTS == PARTS_MAX }.then(|| {
                let rows = each(|i| T::Vec::<S>::load(&self.0[i * lanes..]));
                let mut interleaved = vec![T::ZERO; lanes * lanes / 2];
                for (to, row) in interleaved.chunks_exact_mut(lanes).zip(T::Vec::<S>::interleave(rows)) {
                    row.store(to);
                }
                interleaved
            });
        let mut some = vec![T::ONE; lanes];
        // SAFETY: `self.0` has these lanes and more.
        unsafe { T::Vec::<S>::load_where(self.0.as_ptr(), 0x5555 & ((1 << lanes) - 1)) }.store(&mut some);
        let nan = v.is_nan();
        LanesOutput {
            lanes,
            sum: v.reduce_sum(),
            max: v.reduce_max(),
            transposed,
            interleaved,
            any: nan.any(),
            all: nan.all(),
            some,
        }
    }
}

#[test]
fn reductions_follow_their_tree_and_propagate_nan() {
    fn holds<T: Float>(isa: IsaName) {
        let mut draws = Draws(3);
        let values: Vec<T> =
            (0..LANES_MAX * LANES_MAX).map(|_| T::from_f64(draws.between(-1.0, 1.0))).collect();
        let got = dispatch_on(isa, Lanes(&values)).expect("available");
        let transposed =
            (0..got.lanes * got.lanes).map(|i| values[i % got.lanes * got.lanes + i / got.lanes]);
        assert_eq!(got.transposed, transposed.collect::<Vec<_>>());
        if let Some(interleaved) = got.interleaved {
            let half = got.lanes / 2;
            let wanted = (0..half * got.lanes).map(|i| values[i % half * got.lanes + i / half]);
            assert_eq!(interleaved, wanted.collect::<Vec<_>>());
        }
        let values = &values[..got.lanes];
        let mut tree = values.to_vec();
        while tree.len() > 1 {
            let (low, high) = tree.split_at(tree.len() / 2);
            tree = low.iter().zip(high).map(|(&a, &b)| a + b).collect();
        }
        assert_eq!(got.sum, tree[0]);
        assert!(values.iter().all(|&x| x <= got.max));
        assert!(values.contains(&got.max));
        let some = |i: usize| if i.is_multiple_of(2) { values[i] } else { T::ZERO };
        assert_eq!(got.some, (0..got.lanes).map(some).collect::<Vec<_>>());
        assert!(!got.any && !got.all);
        for lane in 0..got.lanes {
            let mut values = values.repeat(got.lanes);
            values[lane] = T::NAN;
            let got = dispatch_on(isa, Lanes(&values)).expect("available");
            assert!(got.max.is_nan() && got.any && got.all == (got.lanes == 1));
        }
        let got = dispatch_on(isa, Lanes(&[T::NAN; LANES_MAX * LANES_MAX])).expect("available");
        assert!(got.any && got.all);
    }
    for isa in available_isas() {
        holds::<f32>(isa);
        holds::<f64>(isa);
    }
}

const TABLE_OF_ERFC: &[(f64, f64)] = &[
    (-3.25, 1.9999956972205364),
    (-1.0, 1.8427007929497148),
    (-0.25, 1.276326390168237),
    (0.0, 1.0),
    (0.25, 0.7236736098317631),
    (0.4375, 0.536101864250067),
    (0.453125, 0.5216425479342446),
    (0.5, 0.4795001221869535),
    (0.625, 0.376759117811582),
    (0.75, 0.28884436634648486),
    (1.0, 0.15729920705028513),
    (1.25, 0.07709987174354177),
    (1.5, 0.033894853524689274),
    (1.75, 0.013328328780817557),
    (2.0, 0.004677734981047266),
    (2.25, 0.0014627165866811518),
    (2.5, 0.0004069520174449589),
    (3.0, 2.209049699858544e-05),
    (4.0, 1.541725790028002e-08),
    (5.5, 7.357847917974398e-15),
    (8.0, 1.1224297172982926e-29),
    (12.0, 1.3562611692059042e-64),
    (20.0, 5.395865611607901e-176),
    (26.0, 5.663192408856143e-296),
];
