//! Derivatives, first and second, held against differences: the check that the tests of all operations use, and a table
//! of the operations that are formulas or compositions.

use phalanx_tensor::{DType, Device, Tensor};

use crate::{GradCheck, Outputs, Result, Var, grad, gradcheck, gradgradcheck};

/// Holds the first and second derivatives of `f`, at inputs of these shapes, against differences.
#[track_caller]
pub(crate) fn check_twice<O: Outputs>(shapes: &[&[usize]], f: impl Fn(&[Var]) -> Result<O>) {
    let input = |(i, shape): (usize, &&[usize])| {
        let value = |at: usize| 2.0 * (at as f64 * 0.618_033_988_749_894_9 + i as f64 * 0.37).fract() - 1.0;
        let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
        Tensor::from_slice(&values, shape, Device::CPU).unwrap()
    };
    let inputs: Vec<Tensor> = shapes.iter().enumerate().map(input).collect();
    gradcheck(&f, &inputs, GradCheck::default()).unwrap_or_else(|e| panic!("{shapes:?}: {e}"));
    gradgradcheck(&f, &inputs, GradCheck::default()).unwrap_or_else(|e| panic!("{shapes:?}: {e}"));
}

type Function = fn(&[Var]) -> Result<Var>;

/// On (-1, 1), none of them near a kink at the values that the tests choose.
const OF_ONE: &[(&str, Function)] = &[
    ("exp2", |v| v[0].exp2()),
    ("log2", |v| v[0].add_scalar(1.5)?.log2()),
    ("log10", |v| v[0].add_scalar(1.5)?.log10()),
    ("log1p", |v| v[0].mul_scalar(0.5)?.log1p()),
    ("expm1", |v| v[0].expm1()),
    ("tan", |v| v[0].tan()),
    ("sinh", |v| v[0].sinh()),
    ("cosh", |v| v[0].cosh()),
    ("asin", |v| v[0].mul_scalar(0.8)?.asin()),
    ("acos", |v| v[0].mul_scalar(0.8)?.acos()),
    ("atan", |v| v[0].atan()),
    ("asinh", |v| v[0].mul_scalar(3.0)?.asinh()),
    ("acosh", |v| v[0].add_scalar(2.5)?.acosh()),
    ("atanh", |v| v[0].mul_scalar(0.8)?.atanh()),
    ("erfc", |v| v[0].erfc()),
    ("hardtanh", |v| v[0].hardtanh(-0.55, 0.4)),
    ("relu6", |v| v[0].mul_scalar(9.0)?.add_scalar(0.1)?.relu6()),
    ("hardsigmoid", |v| v[0].mul_scalar(5.0)?.hardsigmoid()),
    ("hardswish", |v| v[0].mul_scalar(5.0)?.hardswish()),
    ("mish", |v| v[0].mul_scalar(4.0)?.mish()),
    ("selu", |v| v[0].selu()),
    ("celu", |v| v[0].celu(1.7)),
    ("logsigmoid", |v| v[0].mul_scalar(9.0)?.logsigmoid()),
    ("softsign", |v| v[0].softsign()),
    ("tanhshrink", |v| v[0].tanhshrink()),
    ("floor", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.floor()),
    ("ceil", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.ceil()),
    ("round", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.round()),
    ("trunc", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.trunc()),
    ("sign", |v| v[0].sign()),
    ("frac", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.frac()),
    ("fmod number", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.fmod_scalar(0.7)),
    ("remainder number", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.remainder_scalar(-0.7)),
    ("floor_divide number", |v| v[0].mul_scalar(3.1)?.add_scalar(0.05)?.floor_divide_scalar(0.7)),
    ("nansum", |v| v[0].nansum(&[-1], true)),
    ("cumprod", |v| v[0].cumprod(-1)),
    ("logcumsumexp", |v| v[0].mul_scalar(4.0)?.logcumsumexp(-1)),
    ("cummax", |v| Ok(v[0].cummax(-1)?.0)),
    ("cummin", |v| Ok(v[0].cummin(-1)?.0)),
    ("diff", |v| v[0].diff(2, -1)),
];

/// Broadcast.
const OF_SEVERAL: &[(&str, Function)] = &[
    ("atan2", |v| v[0].atan2(&v[1])),
    ("hypot", |v| v[0].hypot(&v[1])),
    ("logaddexp", |v| v[0].mul_scalar(4.0)?.logaddexp(&v[1])),
    ("xlogy", |v| v[0].xlogy(&v[1].add_scalar(1.5)?)),
    ("fmod", |v| v[0].mul_scalar(4.1)?.fmod(&v[1].add_scalar(1.9)?)),
    ("remainder", |v| v[0].mul_scalar(4.1)?.remainder(&v[1].sub_scalar(1.9)?)),
    ("floor_divide", |v| v[0].mul_scalar(4.1)?.floor_divide(&v[1].add_scalar(1.9)?)),
    ("lerp", |v| v[0].lerp(&v[1], &v[2])),
    ("lerp number", |v| v[0].lerp_scalar(&v[1], 0.3)),
    ("addcmul", |v| v[0].addcmul(&v[1], &v[2], 0.3)),
    ("addcdiv", |v| v[0].addcdiv(&v[1], &v[2].add_scalar(2.0)?, -1.5)),
    ("clamp_tensor", |v| v[0].clamp_tensor(Some(&v[1].mul_scalar(0.5)?), Some(&v[2].add_scalar(0.3)?))),
    ("clamp_tensor min", |v| v[0].clamp_tensor(Some(&v[1].mul_scalar(0.5)?), None)),
    ("clamp_tensor max", |v| v[0].clamp_tensor(None, Some(&v[2].mul_scalar(0.5)?))),
];

#[test]
fn functions_of_one_value_have_their_derivatives() {
    for (name, f) in OF_ONE {
        println!("{name}");
        check_twice(&[&[7]], f);
        check_twice(&[&[0, 3]], f);
        check_twice(&[&[3, 0]], f);
        check_twice(&[&[3, 2]], |v| f(&[v[0].transpose(0, 1)?]));
        check_twice(&[&[2, 9]], |v| f(&[v[0].slice(1, Some(1), None, 3)?]));
    }
}

#[test]
fn functions_of_several_values_have_their_derivatives() {
    let shapes: [&[&[usize]]; 5] = [
        &[&[5], &[5], &[5]],
        &[&[3, 4], &[4], &[3, 1]],
        &[&[1], &[2, 3], &[]],
        &[&[0, 3], &[3], &[1]],
        &[&[], &[], &[]],
    ];
    for (name, f) in OF_SEVERAL {
        for shapes in shapes {
            println!("{name} {shapes:?}");
            check_twice(shapes, f);
        }
        check_twice(&[&[2, 3], &[2, 3], &[2, 3]], |v| {
            let turned = v.iter().map(|x| x.transpose(0, 1)).collect::<Result<Vec<_>>>()?;
            f(&turned)
        });
    }
}

/// Name, shapes, function.
const OF_SHAPES: &[(&str, &[&[usize]], Function)] = &[
    ("std", &[&[3, 5]], |v| v[0].std(&[1], 1.0, false)),
    ("std of all", &[&[3, 5]], |v| v[0].transpose(0, 1)?.std(&[0, 1], 0.0, true)),
    ("glu", &[&[3, 4]], |v| v[0].glu(-1)),
    ("glu first", &[&[6, 3]], |v| v[0].glu(0)),
    ("glu of nothing", &[&[0, 3]], |v| v[0].glu(0)),
    ("prelu", &[&[2, 3, 2], &[3]], |v| v[0].prelu(&v[1])),
    ("prelu of one", &[&[5], &[1]], |v| v[0].prelu(&v[1])),
    ("prelu of a number", &[&[], &[1]], |v| v[0].prelu(&v[1])),
    ("median", &[&[3, 4]], |v| Ok(v[0].median(1, false)?.0)),
    ("median of all", &[&[3, 4]], |v| v[0].median_all()),
    ("kthvalue", &[&[5, 2]], |v| Ok(v[0].kthvalue(2, 0, true)?.0)),
    ("quantile", &[&[3, 5]], |v| v[0].quantile(0.3, Some(1), false)),
    ("quantile of all", &[&[3, 5]], |v| v[0].quantile(0.71, None, true)),
    ("quantiles", &[&[3, 5]], |v| v[0].quantiles(&[0.0, 0.4, 1.0], Some(-2), false)),
    ("cumprod inside", &[&[2, 5, 3]], |v| v[0].cumprod(1)),
    ("diff inside", &[&[2, 5, 3]], |v| v[0].diff(1, 1)),
    ("diff of too few", &[&[2, 3]], |v| v[0].diff(5, 1)),
    ("trace", &[&[3, 4]], |v| v[0].trace()),
    ("cosine_similarity", &[&[3, 4], &[4]], |v| v[0].cosine_similarity(&v[1], 1, 1e-8)),
    ("cdist", &[&[4, 3], &[2, 3]], |v| v[0].cdist(&v[1], 2.0)),
    ("cdist 1", &[&[2, 4, 3], &[5, 3]], |v| v[0].cdist(&v[1], 1.0)),
    ("cdist 2.5", &[&[4, 3], &[2, 3]], |v| v[0].cdist(&v[1], 2.5)),
    // Bent, so that no two coordinates are equally far.
    ("cdist inf", &[&[4, 3], &[2, 3]], |v| v[0].tanh()?.cdist(&v[1].exp()?, f64::INFINITY)),
    ("cdist of nothing", &[&[4, 0], &[2, 0]], |v| v[0].cdist(&v[1], 2.0)),
    ("dot", &[&[5], &[5]], |v| v[0].dot(&v[1])),
    ("dot of nothing", &[&[0], &[0]], |v| v[0].dot(&v[1])),
    ("mv", &[&[5, 3], &[5]], |v| v[0].transpose(0, 1)?.mv(&v[1])),
    ("bmm", &[&[2, 3, 4], &[2, 4, 5]], |v| v[0].bmm(&v[1])),
    ("addmm", &[&[5], &[3, 4], &[4, 5]], |v| v[0].addmm(&v[1], &v[2], 0.5, 2.0)),
    ("addmm beta 0", &[&[5], &[3, 4], &[4, 5]], |v| v[0].addmm(&v[1], &v[2], 0.0, 1.0)),
    ("baddbmm", &[&[2, 1, 5], &[2, 3, 4], &[2, 4, 5]], |v| v[0].baddbmm(&v[1], &v[2], 1.0, -1.0)),
    ("outer", &[&[3], &[4]], |v| v[0].outer(&v[1])),
    ("kron", &[&[2, 3], &[2, 1, 2]], |v| v[0].kron(&v[1])),
    ("cross", &[&[4, 3], &[1, 3]], |v| v[0].cross(&v[1], None)),
    ("cross first", &[&[3, 2], &[3, 2]], |v| v[0].cross(&v[1], Some(-2))),
    ("bilinear", &[&[2, 3, 4], &[2, 3, 5], &[2, 4, 5], &[2]], |v| v[0].bilinear(&v[1], &v[2], Some(&v[3]))),
    ("bilinear without bias", &[&[4], &[5], &[2, 4, 5]], |v| v[0].bilinear(&v[1], &v[2], None)),
];

#[test]
fn reductions_orders_and_products_have_their_derivatives() {
    for (name, shapes, f) in OF_SHAPES {
        println!("{name}");
        check_twice(shapes, f);
    }
}

/// `y` and `dx` of the sum, as f64.
fn slope(f: Function, x: Tensor) -> [Vec<f64>; 2] {
    let x = Var::leaf(x).unwrap();
    let y = f(std::slice::from_ref(&x)).unwrap();
    let values = |v: &Var| v.to(DType::F64).unwrap().to_vec::<f64>().unwrap();
    let dx = grad(&[(y.sum_all().unwrap(), None)], &[&x], Default::default()).unwrap().remove(0).unwrap();
    [values(&y), values(&dx)]
}

#[test]
fn halves_are_computed_in_f32_and_rounded_once() {
    // The functions themselves, without arithmetic in halves before them.
    let functions: [(&str, Function); 12] = [
        ("exp2", |v| v[0].exp2()),
        ("sinh", |v| v[0].sinh()),
        ("atan", |v| v[0].atan()),
        ("asinh", |v| v[0].asinh()),
        ("mish", |v| v[0].mish()),
        ("hardswish", |v| v[0].hardswish()),
        ("selu", |v| v[0].selu()),
        ("celu", |v| v[0].celu(0.7)),
        ("logsigmoid", |v| v[0].logsigmoid()),
        ("softsign", |v| v[0].softsign()),
        ("cumprod", |v| v[0].cumprod(0)),
        ("logcumsumexp", |v| v[0].logcumsumexp(0)),
    ];
    for (dtype, ulp) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        let values: Vec<f64> = (0..9).map(|i| 0.3 + 0.19 * f64::from(i)).collect();
        let half =
            phalanx_kernels::cast(&Tensor::from_slice(&values, &[9], Device::CPU).unwrap(), dtype).unwrap();
        let exact = phalanx_kernels::cast(&half, DType::F64).unwrap();
        for (name, f) in functions {
            let (got, want) = (slope(f, half.clone()), slope(f, exact.clone()));
            for (&got, &want) in got.iter().flatten().zip(want.iter().flatten()) {
                // Half a unit in the last place, and what f32 leaves.
                assert!((got - want).abs() <= 1.01 * ulp * want.abs(), "{name} {dtype}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn corners_and_special_values_are_as_in_pytorch() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let cases: &[(&str, Function, f64, f64, f64)] = &[
        // Name, function, x, y, dx.
        ("hardtanh", |v| v[0].hardtanh(-1.0, 1.0), 1.0, 1.0, 0.0),
        ("relu6", |v| v[0].relu6(), 6.0, 6.0, 0.0),
        ("hardsigmoid", |v| v[0].hardsigmoid(), -3.0, 0.0, 0.0),
        ("hardswish", |v| v[0].hardswish(), -3.0, 0.0, 0.0),
        ("hardswish", |v| v[0].hardswish(), 3.0, 3.0, 1.0),
        ("celu", |v| v[0].celu(2.0), 0.0, 0.0, 1.0),
        ("softsign", |v| v[0].softsign(), 0.0, 0.0, 1.0),
        ("prelu", |v| v[0].prelu(&Var::full(0.25, &v[0])?), 0.0, 0.0, 0.25),
        ("sign", |v| v[0].sign(), nan, 0.0, 0.0),
        ("sign", |v| v[0].sign(), -inf, -1.0, 0.0),
        ("round", |v| v[0].round(), 2.5, 2.0, 0.0),
        ("round", |v| v[0].round(), -1.5, -2.0, 0.0),
        ("frac", |v| v[0].frac(), -1.25, -0.25, 1.0),
        ("floor", |v| v[0].floor(), inf, inf, 0.0),
        ("logsigmoid", |v| v[0].logsigmoid(), -1e4, -1e4, 1.0),
        ("logsigmoid", |v| v[0].logsigmoid(), 1e4, 0.0, 0.0),
        ("asin", |v| v[0].asin(), 1.0, std::f64::consts::FRAC_PI_2, inf),
        ("atanh", |v| v[0].atanh(), 1.0, inf, inf),
        ("xlogy", |v| v[0].xlogy(&Var::full(0.0, &v[0])?), 0.0, 0.0, 0.0),
        ("remainder", |v| v[0].remainder_scalar(f64::INFINITY), -1.0, inf, 1.0),
        ("fmod", |v| v[0].fmod_scalar(0.0), 1.0, nan, 1.0),
        ("std", |v| v[0].std(&[0], 0.0, false), 3.0, 0.0, 0.0),
    ];
    for &(name, f, x, y, dx) in cases {
        let got = slope(f, Tensor::from_slice(&[x], &[1], Device::CPU).unwrap());
        let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan());
        assert!(same(got[0][0], y) && same(got[1][0], dx), "{name} of {x}: {got:?}, wanted {y} and {dx}");
    }
}

#[test]
fn integers_and_bools_are_taken_where_they_mean_something() {
    let ints = |x: &[i64]| Var::from_slice(x, &[x.len()], Device::CPU).unwrap();
    let (x, y) = (ints(&[-7, 7, 0]), ints(&[2, -2, 5]));
    let of = |v: Result<Var>| v.unwrap().to_vec::<i64>().unwrap();
    assert_eq!(of(x.floor()), [-7, 7, 0]);
    assert_eq!(of(x.sign()), [-1, 1, 0]);
    assert_eq!(of(x.fmod(&y)), [-1, 1, 0]);
    assert_eq!(of(x.remainder(&y)), [1, -1, 0]);
    assert_eq!(of(x.floor_divide(&y)), [-4, -4, 0]);
    assert_eq!(of(x.bitwise_and(&y)), [0, 6, 0]);
    assert_eq!(of(x.addcmul(&y, &y, 2)), [1, 15, 50]);
    assert_eq!(of(x.dot(&y)), [-28]);
    assert_eq!(of(x.diff(1, 0)), [14, -7]);
    assert_eq!(of(x.cumprod(0)), [-7, -49, 0]);
    assert_eq!(of(Ok(x.cummax(0).unwrap().1)), [0, 1, 1]);
    assert_eq!(of(x.count_nonzero_all()), [2]);
    let bools = |v: Result<Var>| v.unwrap().to_vec::<bool>().unwrap();
    assert_eq!(bools(x.isfinite()), [true; 3]);
    assert_eq!(bools(x.isinf()), [false; 3]);
    assert_eq!(bools(x.logical_and(&x.gt_scalar(0).unwrap())), [false, true, false]);
    assert_eq!((bools(x.any_all()), bools(x.all_all())), (vec![true], vec![false]));
    let none = ints(&[]);
    assert_eq!((bools(none.any_all()), bools(none.all_all())), (vec![false], vec![true]));
}

#[test]
fn errors_name_what_the_user_called() {
    let floats =
        |shape: &[usize]| Var::from_slice(&vec![1.0; shape.iter().product()], shape, Device::CPU).unwrap();
    let (x, y, ints) =
        (floats(&[2, 3]), floats(&[4]), Var::from_slice(&[1i64, 0], &[2], Device::CPU).unwrap());
    let single = x.to(DType::F32).unwrap();
    let wrong: Vec<(&str, Result<Var>)> = vec![
        ("exp2", ints.exp2()),
        ("mish", ints.mish()),
        ("log1p", ints.log1p()),
        ("hardtanh", x.hardtanh(1.0, -1.0)),
        ("celu", x.celu(0.0)),
        ("glu", x.glu(1)),
        ("glu", x.glu(2)),
        ("prelu", x.prelu(&y)),
        ("atan2", x.atan2(&y)),
        ("atan2", x.atan2(&single)),
        ("fmod", ints.fmod(&ints)),
        ("remainder", ints.remainder_scalar(0)),
        ("floor_divide", ints.floor_divide_scalar(1.5)),
        ("bitwise_and", x.bitwise_and(&x)),
        ("logical_or", x.logical_or(&y)),
        ("lerp", x.lerp(&y, &x)),
        ("addcmul", x.addcmul(&y, &x, 1)),
        ("addcdiv", x.addcdiv(&x, &single, 1.0)),
        ("clamp_tensor", x.clamp_tensor(None, None)),
        ("isclose", x.isclose(&x, -1.0, 0.0, false)),
        ("floor", x.gt_scalar(0.0).unwrap().floor()),
        ("std", ints.std(&[0], 1.0, false)),
        ("any", x.any(&[2], false)),
        ("cumprod", x.cumprod(2)),
        ("logcumsumexp", ints.logcumsumexp(0)),
        ("cummax", x.cummax(-3).map(|v| v.0)),
        ("diff", floats(&[]).diff(1, 0)),
        ("searchsorted", y.searchsorted(&single, false)),
        ("dot", x.dot(&y)),
        ("mv", x.mv(&y)),
        ("bmm", x.bmm(&x)),
        ("addmm", floats(&[5]).addmm(&x, &floats(&[3, 2]), 1.0, 1.0)),
        ("baddbmm", x.baddbmm(&x, &x, 1.0, 1.0)),
        ("outer", x.outer(&y)),
        ("cross", floats(&[2]).cross(&floats(&[2]), None)),
        ("bilinear", x.bilinear(&x, &x, None)),
        ("trace", y.trace()),
        ("cdist", x.cdist(&x, -1.0)),
        ("cdist", x.cdist(&y, 2.0)),
        ("cosine_similarity", x.cosine_similarity(&y, 1, 1e-8)),
    ];
    for (name, result) in wrong {
        let text = result.map(|_| ()).unwrap_err().to_string();
        assert!(text.starts_with(&format!("{name}:")), "{name}: {text}");
    }
}
