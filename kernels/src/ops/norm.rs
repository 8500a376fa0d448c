//! Vector norms over dimensions ([`norm`]), of any order.

use phalanx_tensor::{DType, Dim, Error, Result, Tensor};

use super::extremum::refuse_empty;
use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::reduce::cuda::{self, Destination, Finish, Precision};
use crate::reduce::{
    Combine, Largest, Magnitude, NonZero, Power, ReduceView, Relative, Smallest, Square, Term, Total, fold,
    fold_tensor,
};
use crate::simd::Float;

/// `sum(|x|^p)^(1/p)` over `dims`, which stay with size 1 if `keepdim`; the largest magnitude for an infinite `p`
/// (the smallest for `-inf`), the number of elements that are not 0 for `p = 0`. Where the sum would leave the
/// dtype's range, the elements are taken relative to the largest.
///
/// # Errors
/// If the dtype is no floating-point one, a dimension does not exist or is named twice, or `p` is infinite and
/// there are no elements.
pub fn norm<D: Dim>(x: &Tensor, p: f64, dims: &[D], keepdim: bool) -> Result<Tensor> {
    check::float(OP, x)?;
    if p.is_nan() {
        return Err(Error::range(OP, "the order NaN", "a number"));
    }
    norm_over(&ReduceView::new(OP, x, dims, keepdim)?, p)
}

const OP: &str = "norm";

fn norm_over(view: &ReduceView, p: f64) -> Result<Tensor> {
    if p.is_infinite() {
        refuse_empty(OP, &view.input, view.n)?;
    }
    let (mut out, computes) = view.output(OP, view.input.dtype())?;
    if computes {
        NORMS.run(out.device(), |norms| norms(view, p, &mut out))?;
    }
    Ok(out)
}

const NORMS: Kernels<Norms> = Kernels { cpu: norms_on_cpu, cuda: norms_on_gpu };

type Norms = fn(&ReduceView, f64, &mut Tensor) -> Result<()>;

fn norms_on_cpu(view: &ReduceView, p: f64, out: &mut Tensor) -> Result<()> {
    for_real!(OP, out.dtype(), T => norms::<T>(OP, view, p, out))
}

fn norms<T: Real>(op: &'static str, view: &ReduceView, p: f64, out: &mut Tensor) -> Result<()> {
    let sums = if p == f64::INFINITY {
        parts::<T, _, _>(op, view, Largest, Magnitude { neutral: 0.0 })?
    } else if p == f64::NEG_INFINITY {
        parts::<T, _, _>(op, view, Smallest, Magnitude { neutral: f64::INFINITY })?
    } else if p == 0.0 {
        parts::<T, _, _>(op, view, Total, NonZero)?
    } else if p == 1.0 {
        parts::<T, _, _>(op, view, Total, Magnitude { neutral: 0.0 })?
    } else if p == 2.0 {
        parts::<T, _, _>(op, view, Total, Square)?
    } else {
        parts::<T, _, _>(op, view, Total, Power(p))?
    };
    let rooted = p.is_finite() && p != 0.0;
    // Of f32's range, and of f64's.
    let (least, most) = if size_of::<T::Wide>() == 4 { (1e-24, 1e36) } else { (1e-270, 1e300) };
    let fits = |sum: &f64| sum.is_nan() || (least..=most).contains(sum);
    let root = |sum: f64| if p == 2.0 { sum.sqrt() } else { sum.powf(1.0 / p) };
    let numel = out.numel();
    if !rooted || sums.iter().all(fits) {
        let mut target = out.write::<T>(op)?;
        for (to, sum) in target[..numel].iter_mut().zip(sums) {
            *to = T::narrow(T::Wide::from_f64(if rooted { root(sum) } else { sum }));
        }
        return Ok(());
    }
    let tops = parts::<T, _, _>(op, view, Largest, Magnitude { neutral: 0.0 })?;
    let scale = |&top: &f64| T::Wide::from_f64(if top > 0.0 && top.is_finite() { top } else { 1.0 });
    let scales: Vec<T::Wide> = tops.iter().map(scale).collect();
    let finish = |i: usize, [sum]: [f64; 1]| scales[i].to_f64() * root(sum);
    fold_tensor::<T, _, _, 1>(op, view, (Total, Relative(p)), &scales, out, finish)
}

fn parts<T: Real, C: Combine, F: Term<1>>(
    op: &'static str,
    view: &ReduceView,
    combine: C,
    term: F,
) -> Result<Vec<f64>> {
    let mut parts = vec![0.0; view.outputs()];
    fold::<T, C, F, f64, 1>(op, view, (combine, term), &[], &mut parts, |_, [x]| x)?;
    Ok(parts)
}

/// Squares of narrow floats are added in f64, whose range they do not leave; other powers are taken relative to the
/// largest element.
fn norms_on_gpu(view: &ReduceView, p: f64, out: &mut Tensor) -> Result<()> {
    const AS_IS: Finish = Finish { text: "set(out, o, x[0])", numbers: [0.0; 2] };
    let wide = out.dtype() == DType::F64;
    let magnitude = Magnitude { neutral: 0.0 };
    if p.abs() == f64::INFINITY || p == 0.0 || p == 1.0 {
        let (precision, target) = (Precision::Double, Destination::Tensor(out));
        return if p == f64::INFINITY {
            cuda::fold(OP, view, (Largest, magnitude), Precision::Plain, None, target, &AS_IS)
        } else if p == f64::NEG_INFINITY {
            cuda::fold(OP, view, (Smallest, magnitude), Precision::Plain, None, target, &AS_IS)
        } else if p == 0.0 {
            cuda::fold(OP, view, (Total, NonZero), Precision::Plain, None, target, &AS_IS)
        } else {
            cuda::fold(OP, view, (Total, magnitude), precision, None, target, &AS_IS)
        };
    }
    if p == 2.0 && !wide {
        let finish = Finish { text: "set(out, o, sqrt(x[0]))", numbers: [0.0; 2] };
        let target = Destination::Tensor(out);
        return cuda::fold(OP, view, (Total, Square), Precision::Double, None, target, &finish);
    }
    let tops = cuda::numbers(OP, view)?;
    let text = "set(out, o, x[0] > 0.0 && isfinite(x[0]) ? x[0] : 1.0)";
    let (top, target) = (Finish { text, numbers: [0.0; 2] }, Destination::Scratch(&tops));
    cuda::fold(OP, view, (Largest, magnitude), Precision::Plain, None, target, &top)?;
    let finish = Finish { text: "set(out, o, shift * pow(x[0], a))", numbers: [1.0 / p, 0.0] };
    let target = Destination::Tensor(out);
    cuda::fold(OP, view, (Total, Relative(p)), Precision::Plain, Some(&tops), target, &finish)
}

#[cfg(test)]
mod tests {
    use super::norm;
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    #[test]
    fn equals_the_formula_for_every_order() {
        for dtype in FLOATS {
            let x = make(&[37, 50], dtype, &floats(-2.0, 2.0));
            for p in [0.0, 0.5, 1.0, 2.0, 3.0, -1.0, f64::INFINITY, f64::NEG_INFINITY] {
                let rows: Vec<f64> = values(&x).iter().map(|x| x.abs()).collect();
                for (row, &got) in rows.chunks(50).zip(&values(&norm(&x, p, &[1], false).unwrap())) {
                    let want = match p {
                        f64::INFINITY => row.iter().copied().fold(0.0, f64::max),
                        f64::NEG_INFINITY => row.iter().copied().fold(9.0, f64::min),
                        0.0 => row.iter().filter(|&&x| x != 0.0).count() as f64,
                        _ => row.iter().map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
                    };
                    assert_close(got / want, 1.0, 4.0 * tolerance(dtype));
                }
            }
        }
    }

    #[test]
    fn squares_beyond_the_range_do_no_harm() {
        for (size, zero) in [(1e30, 0.0), (1e-30, 0.0), (1e300, 0.0), (0.0, 0.0)] {
            let dtype = if size > 1e100 { phalanx_tensor::DType::F64 } else { phalanx_tensor::DType::F32 };
            let x = make(&[2, 2], dtype, &|i| [3.0 * size, 4.0 * size, zero, zero][i]);
            let got = values(&norm(&x, 2.0, &[1], false).unwrap());
            assert!((got[0] - 5.0 * size).abs() <= 1e-6 * size && got[1] == 0.0, "{got:?}");
        }
    }
}
