//! Functions of elements: those that are computed on vectors, and those that are computed one by one.

use phalanx_kernels as k;
use phalanx_tensor::{DType, Result, Scalar, Tensor};

use crate::case::{Case, FLOATS, make, spread, tolerance};

pub fn cases() -> Vec<Case> {
    let mut all = floats_cases();
    all.extend(functions_cases());
    all
}

type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

/// What an argument is for the functions' special cases.
const SPECIAL: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.0,
    3.0,
    100.0,
    -100.0,
    30000.0,
    -30000.0,
    1e-4,
    -1e-4,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

/// Name, function, bounds of ordinary arguments.
const UNARY: &[(&str, Unary, f64, f64)] = &[
    ("abs", k::abs, -4.0, 4.0),
    ("neg", k::neg, -4.0, 4.0),
    ("square", k::square, -4.0, 4.0),
    ("sqrt", k::sqrt, 0.0, 9.0),
    ("rsqrt", k::rsqrt, 0.1, 9.0),
    ("reciprocal", k::reciprocal, 0.1, 9.0),
    ("exp", k::exp, -4.0, 4.0),
    ("exp_m1", k::exp_m1, -1.0, 1.0),
    ("log", k::log, 0.1, 9.0),
    ("ln_1p", k::ln_1p, -0.5, 2.0),
    ("sin", k::sin, -9.0, 9.0),
    ("cos", k::cos, -9.0, 9.0),
    ("tanh", k::tanh, -4.0, 4.0),
    ("sigmoid", k::sigmoid, -9.0, 9.0),
    ("erf", k::erf, -3.0, 3.0),
    ("relu", k::relu, -4.0, 4.0),
    ("silu", k::silu, -9.0, 9.0),
    ("gelu", |x| k::gelu(x, k::Gelu::Exact), -4.0, 4.0),
    ("gelu tanh", |x| k::gelu(x, k::Gelu::Tanh), -4.0, 4.0),
    ("elu", |x| k::elu(x, 0.7), -4.0, 4.0),
    ("leaky_relu", |x| k::leaky_relu(x, 0.1), -4.0, 4.0),
    ("softplus", |x| k::softplus(x, 1.5, 20.0), -30.0, 30.0),
    ("clamp", |x| k::clamp(x, Some(Scalar::Float(-1.0)), Some(Scalar::Float(2.0))), -4.0, 4.0),
    ("clamp below", |x| k::clamp(x, None, Some(Scalar::Float(0.5))), -4.0, 4.0),
    ("pow 2.5", |x| k::pow_scalar(x, Scalar::Float(2.5)), 0.0, 4.0),
    ("pow 3", |x| k::pow_scalar(x, Scalar::Int(3)), -4.0, 4.0),
    ("pow 7", |x| k::pow_scalar(x, Scalar::Int(7)), -2.0, 2.0),
    ("2 pow", |x| k::rpow_scalar(x, Scalar::Float(2.0)), -4.0, 4.0),
    ("add number", |x| k::add_scalar(x, Scalar::Float(0.3)), -4.0, 4.0),
    ("number minus", |x| k::rsub_scalar(x, Scalar::Float(0.3)), -4.0, 4.0),
    ("mul number", |x| k::mul_scalar(x, Scalar::Float(-0.3)), -4.0, 4.0),
    ("div number", |x| k::div_scalar(x, Scalar::Float(0.3)), -4.0, 4.0),
    ("number over", |x| k::rdiv_scalar(x, Scalar::Float(0.3)), 0.1, 4.0),
];

const BINARY: &[(&str, Binary, f64, f64)] = &[
    ("add", k::add, -4.0, 4.0),
    ("sub", k::sub, -4.0, 4.0),
    ("mul", k::mul, -4.0, 4.0),
    ("div", k::div, 0.2, 4.0),
    ("pow", k::pow, 0.2, 3.0),
    ("maximum", k::maximum, -4.0, 4.0),
    ("minimum", k::minimum, -4.0, 4.0),
    ("abs_backward", k::abs_backward, -4.0, 4.0),
    ("square_backward", k::square_backward, -4.0, 4.0),
    ("sqrt_backward", k::sqrt_backward, 0.2, 4.0),
    ("rsqrt_backward", k::rsqrt_backward, 0.2, 4.0),
    ("reciprocal_backward", k::reciprocal_backward, 0.2, 4.0),
    ("sin_backward", k::sin_backward, -4.0, 4.0),
    ("cos_backward", k::cos_backward, -4.0, 4.0),
    ("tanh_backward", k::tanh_backward, -1.0, 1.0),
    ("sigmoid_backward", k::sigmoid_backward, 0.0, 1.0),
    ("erf_backward", k::erf_backward, -3.0, 3.0),
    ("relu_backward", k::relu_backward, -4.0, 4.0),
    ("silu_backward", k::silu_backward, -4.0, 4.0),
    ("silu_mul", k::silu_mul, -4.0, 4.0),
    ("gelu_backward", |x, dy| k::gelu_backward(x, dy, k::Gelu::Exact), -4.0, 4.0),
    ("gelu_backward tanh", |x, dy| k::gelu_backward(x, dy, k::Gelu::Tanh), -4.0, 4.0),
    ("elu_backward", |x, dy| k::elu_backward(x, dy, 0.7), -4.0, 4.0),
    ("leaky_relu_backward", |x, dy| k::leaky_relu_backward(x, dy, 0.1), -4.0, 4.0),
    ("softplus_backward", |x, dy| k::softplus_backward(x, dy, 1.5, 20.0), -9.0, 9.0),
    ("clamp_backward", |x, dy| k::clamp_backward(x, dy, Some(Scalar::Float(-1.0)), None), -4.0, 4.0),
    ("pow_backward 2.5", |x, dy| k::pow_scalar_backward(x, dy, 2.5), 0.2, 4.0),
    ("pow_backward 0", |x, dy| k::pow_scalar_backward(x, dy, 0.0), 0.2, 4.0),
    ("pow_backward of", |y, dy| k::rpow_scalar_backward(y, dy, 2.0), 0.2, 4.0),
    ("div_backward of", |a, dy| k::rdiv_backward(a, dy, Scalar::Float(2.0)), 0.2, 4.0),
    ("mse_loss", k::mse_loss, -4.0, 4.0),
    ("l1_loss", k::l1_loss, -4.0, 4.0),
    ("smooth_l1_loss", |x, t| k::smooth_l1_loss(x, t, 1.5), -4.0, 4.0),
    ("huber_loss", |x, t| k::huber_loss(x, t, 1.5), -4.0, 4.0),
    ("kl_div", k::kl_div, 0.1, 1.0),
    ("kl_div_log_target", k::kl_div_log_target, -3.0, 0.0),
    ("kl_div_log_target_backward", k::kl_div_log_target_backward, -3.0, 0.0),
];

type Ternary = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

const TERNARY: &[(&str, Ternary)] = &[
    ("div_backward", k::div_backward_divisor),
    ("silu_mul_backward", k::silu_mul_backward),
    ("maximum_backward", k::maximum_backward),
    ("pow_backward base", k::pow_backward_base),
    ("pow_backward exponent", k::pow_backward_exponent),
    ("mse_loss_backward", k::mse_loss_backward),
    ("l1_loss_backward", k::l1_loss_backward),
    ("smooth_l1_loss_backward", |x, t, dy| k::smooth_l1_loss_backward(x, t, dy, 1.5)),
    ("huber_loss_backward", |x, t, dy| k::huber_loss_backward(x, t, dy, 1.5)),
    ("kl_div_backward", k::kl_div_backward_target),
    ("kl_div_log_target_backward target", k::kl_div_log_target_backward_target),
    ("bce", k::binary_cross_entropy_with_logits),
    ("bce_backward", |x, t, w| k::binary_cross_entropy_with_logits_backward(x, t, w, x)),
];

fn floats_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        functions(dtype, &mut all);
        shapes(dtype, &mut all);
        places(dtype, &mut all);
    }
    all
}

/// Every function of a few ordinary elements, and the unary ones and pairs of special ones. Halves are computed in f32, so
/// that a few functions tell.
fn functions(dtype: DType, all: &mut Vec<Case>) {
    let few = if dtype.size() == 2 { 4 } else { usize::MAX };
    for &(name, f, low, high) in UNARY.iter().rev().take(few) {
        all.push(Case::new(format!("float {name} {dtype}"), dtype, move |d| {
            Ok(vec![f(&make(&[37], dtype, d, spread(1, low, high)))?])
        }));
        all.push(Case::new(format!("float {name} {dtype} special"), dtype, move |d| {
            Ok(vec![f(&make(&[SPECIAL.len()], dtype, d, |i| SPECIAL[i]))?])
        }));
    }
    for &(name, f, low, high) in BINARY.iter().take(few) {
        all.push(Case::new(format!("float {name} {dtype}"), dtype, move |d| {
            let x = make(&[37], dtype, d, spread(1, low, high));
            Ok(vec![f(&x, &make(&[37], dtype, d, spread(2, low, high)))?])
        }));
    }
    for &(name, f, ..) in
        BINARY.iter().take(few.max(7)).filter(|(name, ..)| ["pow", "maximum", "minimum"].contains(name))
    {
        let n = SPECIAL.len();
        all.push(Case::new(format!("float {name} {dtype} special"), dtype, move |d| {
            let x = make(&[n, 1], dtype, d, |i| SPECIAL[i]);
            Ok(vec![f(&x, &make(&[n], dtype, d, |i| SPECIAL[i]))?])
        }));
    }
    for &(name, f) in TERNARY.iter().take(few) {
        all.push(Case::new(format!("float {name} {dtype}"), dtype, move |d| {
            let input = |seed, low| make(&[37], dtype, d, spread(seed, low, 2.0));
            Ok(vec![f(&input(1, 0.2), &input(2, 0.2), &input(3, -2.0))?])
        }));
    }
}

/// One function of every shape, contiguous and not.
fn shapes(dtype: DType, all: &mut Vec<Case>) {
    for shape in
        [&[][..], &[0], &[1], &[7], &[33], &[129], &[3, 0, 2], &[7, 33], &[2, 3, 64], &[4, 40], &[5000]]
    {
        let made = move |d, seed| make(shape, dtype, d, spread(seed, -2.0, 2.0));
        let add = format!("float shapes {dtype} {shape:?}");
        all.push(Case::new(format!("{add} whole"), dtype, move |d| {
            Ok(vec![k::add(&made(d, 1), &made(d, 2))?])
        }));
        if shape.len() < 2 {
            continue;
        }
        all.push(Case::new(format!("{add} transposed"), dtype, move |d| {
            let a = made(d, 1).transpose(0, -1)?;
            let b = made(d, 2).transpose(0, -1)?;
            Ok(vec![k::add(&a, &b)?, k::add(&a, &b.contiguous()?)?, k::exp(&a)?])
        }));
        all.push(Case::new(format!("{add} cut"), dtype, move |d| {
            let cut = |t: Tensor| t.slice(-1, 0, shape[shape.len() - 1], 2);
            let rows = |t: Tensor| t.narrow(0, shape[0] / 2, shape[0] - shape[0] / 2);
            Ok(vec![
                k::mul(&cut(made(d, 1))?, &cut(made(d, 2))?)?,
                k::mul(&rows(made(d, 1))?, &rows(made(d, 2))?)?,
            ])
        }));
        all.push(Case::new(format!("{add} broadcast"), dtype, move |d| {
            let a = made(d, 1);
            let row = a.narrow(0, 0, shape[0].min(1))?;
            let column = a.narrow(-1, 0, 1)?;
            let one = make(&[], dtype, d, |_| 0.75);
            Ok(vec![k::sub(&a, &row)?, k::sub(&column, &a)?, k::mul(&row, &column)?, k::div(&a, &one)?])
        }));
    }
}

/// Changes in place, whole and through views.
fn places(dtype: DType, all: &mut Vec<Case>) {
    let close = 3.0 * tolerance(dtype);
    for shape in [&[0][..], &[1], &[33], &[4, 40], &[7, 33]] {
        let run = move |d| {
            let larger: Vec<usize> = shape.iter().map(|n| n + 2).collect();
            let whole = make(&larger, dtype, d, spread(1, -1.0, 1.0));
            let view = |t: &Tensor| (0..shape.len()).try_fold(t.clone(), |t, d| t.narrow(d, 1, shape[d]));
            let x = make(shape, DType::F32, d, spread(2, -1.0, 1.0));
            k::accumulate_(&mut view(&whole)?, &x)?;
            k::add_scaled_(&mut view(&whole)?, &x, -2.5)?;
            k::scale_(&mut view(&whole)?, 0.75)?;
            let mut other = make(shape, dtype, d, spread(3, -1.0, 1.0));
            k::accumulate_(&mut other, &x)?;
            let over = k::silu_backward_over(&other, other.copy()?)?;
            let over = k::gelu_backward_over(&other, over, k::Gelu::Tanh)?;
            let over = k::mul_over(&other, k::gelu_backward_over(&other, over, k::Gelu::Exact)?)?;
            let same = other.clone();
            k::add_scaled_(&mut other, &same, 0.25)?;
            Ok(vec![whole, other, over])
        };
        all.push(Case::new(format!("float in place {dtype} {shape:?}"), dtype, run).within(close));
    }
    all.push(Case::new(format!("float in place overlapping {dtype}"), dtype, move |d| {
        let mut expanded = make(&[1], dtype, d, |_| 1.0).broadcast_to(&[4])?;
        k::scale_(&mut expanded, 2.0)?;
        Ok(vec![expanded])
    }));
}

/// Name, function, bounds of ordinary arguments.
const RARE_UNARY: &[(&str, Unary, f64, f64)] = &[
    ("exp2", k::exp2, -4.0, 4.0),
    ("log2", k::log2, 0.1, 9.0),
    ("log10", k::log10, 0.1, 9.0),
    ("tan", k::tan, -1.4, 1.4),
    ("asin", k::asin, -1.0, 1.0),
    ("acos", k::acos, -1.0, 1.0),
    ("atan", k::atan, -9.0, 9.0),
    ("sinh", k::sinh, -4.0, 4.0),
    ("cosh", k::cosh, -4.0, 4.0),
    ("asinh", k::asinh, -9.0, 9.0),
    ("acosh", k::acosh, 1.0, 9.0),
    ("atanh", k::atanh, -0.99, 0.99),
    ("erfc", k::erfc, -3.0, 6.0),
    ("tanhshrink", k::tanhshrink, -4.0, 4.0),
    ("frac", k::frac, -4.0, 4.0),
    ("floor", k::floor, -4.0, 4.0),
    ("ceil", k::ceil, -4.0, 4.0),
    ("round", k::round, -4.0, 4.0),
    ("trunc", k::trunc, -4.0, 4.0),
    ("sign", k::sign, -4.0, 4.0),
];

const RARE_BINARY: &[(&str, Binary)] = &[
    ("atan2", k::atan2),
    ("hypot", k::hypot),
    ("logaddexp", k::logaddexp),
    ("xlogy", k::xlogy),
    ("fmod", k::fmod),
    ("remainder", k::remainder),
    ("floor_divide", k::floor_divide),
    ("trunc_divide", k::trunc_divide),
];

const INTEGER: &[(&str, Binary)] = &[
    ("fmod", k::fmod),
    ("remainder", k::remainder),
    ("floor_divide", k::floor_divide),
    ("bitwise_and", k::bitwise_and),
    ("bitwise_or", k::bitwise_or),
    ("bitwise_xor", k::bitwise_xor),
];

const RARE_SPECIAL: [f64; 10] =
    [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e4, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];

fn functions_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        rare_functions(dtype, &mut all);
    }
    for dtype in [DType::I64, DType::I32, DType::U8] {
        for &(name, f) in INTEGER {
            all.push(Case::new(format!("function {name} {dtype}"), dtype, move |d| {
                let low = if dtype == DType::U8 { 0.0 } else { 20.0 };
                let a = make(&[7, 33], dtype, d, move |i| (i * 7 % 41) as f64 - low);
                let b = make(&[33], dtype, d, move |i| (i * 5 % 23) as f64 - low / 2.0);
                Ok(vec![f(&a, &b)?])
            }));
        }
    }
    for dtype in [DType::F64, DType::F32, DType::F16, DType::I64, DType::U8, DType::Bool] {
        for (shape, dim) in [(&[33][..], 0), (&[3, 2500], 1), (&[40, 9], 0), (&[3, 7, 10], 1)] {
            all.push(running(dtype, shape, dim));
        }
    }
    for dtype in FLOATS {
        for (shape, dim) in [(&[33][..], 0), (&[300, 5], 0), (&[3, 7, 10], 1)] {
            all.push(Case::new(format!("recurrence {dtype} {shape:?}"), dtype, move |d| {
                let (a, b) = (
                    make(shape, dtype, d, spread(1, -1.0, 1.0)),
                    make(shape, dtype, d, spread(2, -1.0, 1.0)),
                );
                Ok(vec![k::recurrence(&a, &b, dim, false)?, k::recurrence(&a, &b, dim, true)?])
            }));
        }
    }
    all
}

/// Of ordinary elements and of special ones, broadcast.
fn rare_functions(dtype: DType, all: &mut Vec<Case>) {
    let few = if dtype.size() == 2 { 3 } else { usize::MAX };
    for &(name, f, low, high) in RARE_UNARY.iter().take(few) {
        all.push(Case::new(format!("function {name} {dtype}"), dtype, move |d| {
            let special = make(&[RARE_SPECIAL.len()], dtype, d, |i| RARE_SPECIAL[i]);
            Ok(vec![f(&make(&[37], dtype, d, spread(1, low, high)))?, f(&special)?])
        }));
    }
    for &(name, f) in RARE_BINARY.iter().take(few) {
        all.push(Case::new(format!("function {name} {dtype}"), dtype, move |d| {
            let (a, b) =
                (make(&[5, 9], dtype, d, spread(1, -9.0, 9.0)), make(&[9], dtype, d, spread(2, 0.3, 3.0)));
            let special = make(&[RARE_SPECIAL.len()], dtype, d, |i| RARE_SPECIAL[i]);
            let column = special.with_shape(&[RARE_SPECIAL.len(), 1])?;
            Ok(vec![f(&a, &b)?, f(&column, &special)?])
        }));
    }
    all.push(Case::new(format!("function lerp {dtype}"), dtype, move |d| {
        let input = |seed| make(&[37], dtype, d, spread(seed, -2.0, 2.0));
        Ok(vec![k::lerp(&input(1), &input(2), &input(3))?])
    }));
}

fn running(dtype: DType, shape: &'static [usize], dim: usize) -> Case {
    Case::new(format!("running {dtype} {shape:?} along {dim}"), dtype, move |d| {
        let x = make(shape, dtype, d, |i| match dtype.is_float() {
            true => 0.9 + 0.2 * (i as f64 * 0.618).fract(),
            false => (i * 7 % 5) as f64,
        });
        let mut made = vec![k::cumprod(&x, dim)?, k::cummax(&x, dim)?, k::cummin(&x, dim)?];
        if dtype.is_float() {
            made.push(k::logcumsumexp(&x, dim)?);
        }
        Ok(made)
    })
}
