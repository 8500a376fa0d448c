//! Functions that are computed one element by one, running values, recurrences.

use phalanx_kernels as k;
use phalanx_tensor::{DType, Result, Tensor};

use crate::case::{Case, FLOATS, make, spread};

type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

/// Name, function, bounds of ordinary arguments.
const UNARY: &[(&str, Unary, f64, f64)] = &[
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

const BINARY: &[(&str, Binary)] = &[
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

const SPECIAL: [f64; 10] = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e4, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        functions(dtype, &mut all);
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
fn functions(dtype: DType, all: &mut Vec<Case>) {
    let few = if dtype.size() == 2 { 3 } else { usize::MAX };
    for &(name, f, low, high) in UNARY.iter().take(few) {
        all.push(Case::new(format!("function {name} {dtype}"), dtype, move |d| {
            let special = make(&[SPECIAL.len()], dtype, d, |i| SPECIAL[i]);
            Ok(vec![f(&make(&[37], dtype, d, spread(1, low, high)))?, f(&special)?])
        }));
    }
    for &(name, f) in BINARY.iter().take(few) {
        all.push(Case::new(format!("function {name} {dtype}"), dtype, move |d| {
            let (a, b) =
                (make(&[5, 9], dtype, d, spread(1, -9.0, 9.0)), make(&[9], dtype, d, spread(2, 0.3, 3.0)));
            let special = make(&[SPECIAL.len()], dtype, d, |i| SPECIAL[i]);
            let column = special.with_shape(&[SPECIAL.len(), 1])?;
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
