//! What the unit tests of operations share: shapes, strides and dtypes to run over, and the tolerance of each.

use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::ops::cast;

/// A deterministic spread of numbers between two bounds.
pub(crate) fn floats(low: f64, high: f64) -> impl Fn(usize) -> f64 {
    move |i| low + (high - low) * ((i as f64 * 0.618_033_988_749_894_9).fract())
}

/// The relative tolerance of a result computed in one rounding's reach.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

pub(crate) const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// Tensors of every dtype over odd, empty and scalar shapes, contiguous and not.
pub(crate) fn tensors(value: &dyn Fn(usize) -> f64) -> Vec<Tensor> {
    let mut all = Vec::new();
    for shape in [&[][..], &[0], &[1], &[7], &[33], &[129], &[3, 0, 2], &[7, 33], &[2, 3, 129], &[5000]] {
        for dtype in FLOATS {
            let base = make(shape, dtype, value);
            if shape.len() > 1 {
                all.push(base.transpose(0, -1).unwrap());
                all.push(base.narrow(0, shape[0] / 2, shape[0] - shape[0] / 2).unwrap());
                all.push(base.slice(-1, 0, shape[shape.len() - 1], 2).unwrap());
            }
            all.push(base);
        }
    }
    all
}

/// A tensor of `value(0), value(1), ..` rounded to the dtype.
pub(crate) fn make(shape: &[usize], dtype: DType, value: &dyn Fn(usize) -> f64) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    cast(&Tensor::from_slice(&values, shape, Device::CPU).unwrap(), dtype).unwrap()
}

/// All elements as f64.
pub(crate) fn values(x: &Tensor) -> Vec<f64> {
    cast(x, DType::F64).unwrap().to_vec().unwrap()
}

/// Holds a unary operation against its formula in f64, over [`tensors`].
pub(crate) fn assert_unary(
    op: impl Fn(&Tensor) -> Result<Tensor>,
    formula: impl Fn(f64) -> f64,
    value: &dyn Fn(usize) -> f64,
) {
    for x in tensors(value) {
        let x_dtype = x.dtype();
        let y = op(&x).unwrap();
        assert_eq!((y.shape(), y.dtype()), (x.shape(), x.dtype()));
        for (&got, x) in values(&y).iter().zip(values(&x)) {
            assert_close(got, formula(x), tolerance(x_dtype));
        }
    }
}

/// Fails unless `got` is `want` within a relative tolerance (absolute below 1), or both are NaN, or equal.
#[track_caller]
pub(crate) fn assert_close(got: f64, want: f64, tolerance: f64) {
    let close = (got - want).abs() <= tolerance * want.abs().max(1.0);
    assert!(close || got == want || (got.is_nan() && want.is_nan()), "got {got}, wanted {want}");
}

/// The error function, by its series with positive terms.
pub(crate) fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..400 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Holds an operation on the rows along a dimension against its formula in f64, over [`tensors`] and all dimensions.
pub(crate) fn assert_along(
    op: fn(&Tensor, isize) -> Result<Tensor>,
    value: &dyn Fn(usize) -> f64,
    formula: fn(&[f64]) -> Vec<f64>,
) {
    for x in tensors(value) {
        for dim in 0..x.rank().max(1) as isize {
            let y = op(&x, dim).unwrap();
            assert_eq!((y.shape(), y.dtype()), (x.shape(), x.dtype()));
            let transpose =
                |t: &Tensor| if t.rank() == 0 { t.clone() } else { t.transpose(dim, -1).unwrap() };
            let width = if x.rank() == 0 { 1 } else { x.shape()[dim as usize].max(1) };
            let (xs, ys) = (values(&transpose(&x)), values(&transpose(&y)));
            for (x_row, y_row) in xs.chunks(width).zip(ys.chunks(width)) {
                for (&got, want) in y_row.iter().zip(formula(x_row)) {
                    assert_close(got, want, tolerance(x.dtype()));
                }
            }
        }
    }
}
