//! Sums over dimensions, and what is made of them: means, variances, logarithms of sums of exponentials.

use phalanx_tensor::{DType, Dim, Result, Tensor};

use crate::block_reader::BlockReader;
use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_integer, for_real};
use crate::reduce::cuda::{self, Destination, Finish, Precision};
use crate::reduce::{
    By, Deviation, ExpAbove, Itself, Largest, MergeKind, ReduceView, Sum, Total, each, fold, fold_each,
    fold_tensor,
};
use crate::simd::Float;

/// The sum over `dims`, which stay with size 1 if `keepdim`; 0 over nothing. Integers and bools are summed in i64
/// and wrap. Of floats a block's elements are added in the type that is computed in, over many chains side by side,
/// the blocks' sums in f64 by halves; one rounding at the end.
///
/// # Errors
/// If a dimension does not exist or is named twice.
pub fn sum<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    sum_over(&ReduceView::new("sum", x, dims, keepdim)?)
}

/// The mean over `dims`; NaN over nothing. Rounded once, so that a sum beyond the dtype does no harm.
///
/// # Errors
/// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
pub fn mean<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    check::float("mean", x)?;
    let view = ReduceView::new("mean", x, dims, keepdim)?;
    scaled_sum("mean", &view, view.n as f64)
}

fn sum_over(view: &ReduceView) -> Result<Tensor> {
    const OP: &str = "sum";
    let dtype = view.input.dtype();
    if dtype.is_float() {
        return scaled_sum(OP, view, 1.0);
    }
    let (mut out, computes) = view.output(OP, DType::I64)?;
    if computes {
        INTEGERS.run(out.device(), |sum| sum(OP, view, &mut out))?;
    }
    Ok(out)
}

const INTEGERS: Kernels<Integers> = Kernels { cpu: integers_on_cpu, cuda: integers_on_gpu };
/// The sums over a divisor.
const FLOATS: Kernels<Floats> = Kernels { cpu: floats_on_cpu, cuda: floats_on_gpu };

type Integers = fn(&'static str, &ReduceView, &mut Tensor) -> Result<()>;
type Floats = fn(&'static str, &ReduceView, f64, &mut Tensor) -> Result<()>;

fn integers_on_cpu(op: &'static str, view: &ReduceView, out: &mut Tensor) -> Result<()> {
    let (numel, view) = (out.numel(), view.in_any_order()?);
    let mut target = out.write::<i64>(op)?;
    for_integer!(op, view.input.dtype(), T => {
        let source = BlockReader::<T>::open(op, &view.input, view.input.shape())?;
        fold_each::<T, i64>(&view, &source, &By(Sum), &mut target[..numel])
    })
}

fn integers_on_gpu(op: &'static str, view: &ReduceView, out: &mut Tensor) -> Result<()> {
    each(op, view, MergeKind::Add, out, None)
}

fn scaled_sum(op: &'static str, view: &ReduceView, divisor: f64) -> Result<Tensor> {
    let (mut out, computes) = view.output(op, view.input.dtype())?;
    if computes {
        FLOATS.run(out.device(), |sum| sum(op, view, divisor, &mut out))?;
    }
    Ok(out)
}

const SUM: (Total, Itself) = (Total, Itself { neutral: 0.0 });

fn floats_on_cpu(op: &'static str, view: &ReduceView, divisor: f64, out: &mut Tensor) -> Result<()> {
    for_real!(op, out.dtype(), T => {
        fold_tensor::<T, _, _, 1>(op, view, SUM, &[], out, |_, [sum]| match divisor == 1.0 {
            true => sum, // a division takes as long as some of the additions
            false => sum / divisor,
        })
    })
}

fn floats_on_gpu(op: &'static str, view: &ReduceView, divisor: f64, out: &mut Tensor) -> Result<()> {
    let finish = Finish { text: "set(out, o, x[0] / a)", numbers: [divisor, 0.0] };
    cuda::fold(op, view, SUM, Precision::Plain, None, Destination::Tensor(out), &finish)
}

/// `sum((x - mean)²) / (n - correction)` over `dims`, which stay with size 1 if `keepdim`. In two passes: the
/// deviations are taken from the rounded mean, and what its rounding adds to their squares is taken off again.
///
/// # Errors
/// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
pub fn var<D: Dim>(x: &Tensor, dims: &[D], correction: f64, keepdim: bool) -> Result<Tensor> {
    check::float(VAR, x)?;
    check::from_zero(VAR, "a correction of", correction)?;
    var_over(&ReduceView::new(VAR, x, dims, keepdim)?, correction)
}

const VAR: &str = "var";

fn var_over(view: &ReduceView, correction: f64) -> Result<Tensor> {
    let (mut out, computes) = view.output(VAR, view.input.dtype())?;
    if computes {
        VARIANCE.run(out.device(), |variance| variance(view, correction, &mut out))?;
    }
    Ok(out)
}

const VARIANCE: Kernels<Variance> = Kernels { cpu: variance_on_cpu, cuda: variance_on_gpu };

type Variance = fn(&ReduceView, f64, &mut Tensor) -> Result<()>;

fn variance_on_cpu(view: &ReduceView, correction: f64, out: &mut Tensor) -> Result<()> {
    for_real!(VAR, out.dtype(), T => variance::<T>(VAR, view, correction, out))
}

fn variance<T: Real>(op: &'static str, view: &ReduceView, correction: f64, out: &mut Tensor) -> Result<()> {
    let n = view.n as f64;
    let mut means = vec![T::Wide::ZERO; out.numel()];
    let mean = |_: usize, [sum]: [f64; 1]| T::Wide::from_f64(sum / n);
    fold::<T, _, _, _, 1>(op, view, (Total, Itself { neutral: 0.0 }), &[], &mut means, mean)?;
    let divisor = (n - correction).max(0.0);
    fold_tensor::<T, _, _, 2>(op, view, (Total, Deviation), &means, out, |_, [sum, squares]| {
        let rest = squares - sum * sum / n;
        if rest < 0.0 { 0.0 } else { rest / divisor }
    })
}

fn variance_on_gpu(view: &ReduceView, correction: f64, out: &mut Tensor) -> Result<()> {
    let (n, divisor) = (view.n as f64, (view.n as f64 - correction).max(0.0));
    let means = cuda::numbers(VAR, view)?;
    let mean = Finish { text: "set(out, o, x[0] / a)", numbers: [n, 0.0] };
    let with = (Total, Itself { neutral: 0.0 });
    cuda::fold(VAR, view, with, Precision::Plain, None, Destination::Scratch(&means), &mean)?;
    let text = "const f64 rest = x[1] - x[0] * x[0] / a; set(out, o, rest < 0.0 ? 0.0 : rest / b)";
    let finish = Finish { text, numbers: [n, divisor] };
    let target = Destination::Tensor(out);
    cuda::fold(VAR, view, (Total, Deviation), Precision::Plain, Some(&means), target, &finish)
}

/// `log(sum(e^x))` over `dims`, which stay with size 1 if `keepdim`; -inf over nothing. The largest element is
/// subtracted first, so that no exponential overflows.
///
/// # Errors
/// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
pub fn logsumexp<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    check::float(LOGSUMEXP, x)?;
    logsumexp_over(&ReduceView::new(LOGSUMEXP, x, dims, keepdim)?)
}

const LOGSUMEXP: &str = "logsumexp";

fn logsumexp_over(view: &ReduceView) -> Result<Tensor> {
    let (mut out, computes) = view.output(LOGSUMEXP, view.input.dtype())?;
    if computes {
        LOG_SUM.run(out.device(), |log_sum| log_sum(view, &mut out))?;
    }
    Ok(out)
}

const LOG_SUM: Kernels<LogSum> = Kernels { cpu: log_sum_on_cpu, cuda: log_sum_on_gpu };

type LogSum = fn(&ReduceView, &mut Tensor) -> Result<()>;

fn log_sum_on_cpu(view: &ReduceView, out: &mut Tensor) -> Result<()> {
    for_real!(LOGSUMEXP, out.dtype(), T => log_sum::<T>(LOGSUMEXP, view, out))
}

fn log_sum<T: Real>(op: &'static str, view: &ReduceView, out: &mut Tensor) -> Result<()> {
    let mut tops = vec![T::Wide::ZERO; out.numel()];
    // Nothing is to be subtracted of an infinite one: the sum says the same.
    let top = |_: usize, [x]: [f64; 1]| T::Wide::from_f64(if x.is_infinite() { 0.0 } else { x });
    let term = Itself { neutral: f64::NEG_INFINITY };
    fold::<T, _, _, _, 1>(op, view, (Largest, term), &[], &mut tops, top)?;
    let finish = |i: usize, [sum]: [f64; 1]| tops[i].to_f64() + sum.ln();
    fold_tensor::<T, _, _, 1>(op, view, (Total, ExpAbove), &tops, out, finish)
}

fn log_sum_on_gpu(view: &ReduceView, out: &mut Tensor) -> Result<()> {
    let tops = cuda::numbers(LOGSUMEXP, view)?;
    let top = Finish { text: "set(out, o, isinf(x[0]) ? 0.0 : x[0])", numbers: [0.0; 2] };
    let with = (Largest, Itself { neutral: f64::NEG_INFINITY });
    cuda::fold(LOGSUMEXP, view, with, Precision::Plain, None, Destination::Scratch(&tops), &top)?;
    let finish = Finish { text: "set(out, o, shift + log(x[0]))", numbers: [0.0; 2] };
    let target = Destination::Tensor(out);
    cuda::fold(LOGSUMEXP, view, (Total, ExpAbove), Precision::Plain, Some(&tops), target, &finish)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{logsumexp, mean, sum, var};
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    /// Sums over `dims`, element by element in f64.
    pub(crate) fn twin(x: &Tensor, dims: &[usize]) -> Vec<f64> {
        let kept: Vec<usize> = (0..x.rank()).filter(|d| !dims.contains(d)).collect();
        let order: Vec<usize> = kept.iter().chain(dims).copied().collect();
        let outputs: usize = kept.iter().map(|&d| x.shape()[d]).product();
        let rows = values(&x.permute(&order).unwrap());
        let n = rows.len().checked_div(outputs).unwrap_or(0);
        (0..outputs).map(|i| rows[i * n..][..n].iter().sum()).collect()
    }

    fn shapes() -> Vec<(Vec<usize>, Vec<usize>)> {
        let table: &[(&[usize], &[usize])] = &[
            (&[], &[]),
            (&[7], &[0]),
            (&[5000], &[0]),
            (&[100, 33], &[1]),
            (&[3, 5000], &[1]),
            (&[1000, 3], &[0]),
            (&[203, 9], &[0]),
            (&[70, 1300], &[0]),
            (&[9, 70000], &[0]),
            (&[5000, 40], &[0]),
            (&[4, 70, 33], &[1]),
            (&[300, 5, 8], &[1]),
            (&[6, 7, 50], &[0, 2]),
            (&[33, 40, 50], &[0, 2]),
            (&[70, 130], &[0, 1]),
            (&[129, 33], &[0, 1]),
            (&[2, 3, 4, 5], &[1, 3]),
            (&[0, 3], &[0]),
            (&[3, 0], &[0]),
            (&[2, 0, 3], &[2]),
        ];
        table.iter().map(|(s, d)| (s.to_vec(), d.to_vec())).collect()
    }

    #[test]
    fn equals_plain_sums_on_every_shape_dtype_and_stride_with_the_same_bits() {
        for ((shape, dims), dtype) in shapes().into_iter().flat_map(|s| FLOATS.map(|d| (s.clone(), d))) {
            let x = make(&shape, dtype, &floats(-1.0, 3.0));
            let got = sum(&x, &dims, false).unwrap();
            for (got, want) in values(&got).into_iter().zip(twin(&x, &dims)) {
                assert_close(got, want, tolerance(dtype));
            }
            // The same values behind other strides.
            let order: Vec<usize> = (0..x.rank()).rev().collect();
            let transposed = x.permute(&order).unwrap().copy().unwrap().permute(&order).unwrap();
            assert_eq!(
                values(&sum(&transposed, &dims, false).unwrap()),
                values(&got),
                "{shape:?} {dims:?} {dtype}"
            );
            let means = mean(&x, &dims, true).unwrap();
            assert_eq!(means.rank(), x.rank());
            let n: usize = dims.iter().map(|&d| shape[d]).product();
            for (got, want) in values(&means).into_iter().zip(twin(&x, &dims)) {
                assert_close(got, want / n as f64, tolerance(dtype));
            }
        }
    }

    #[test]
    fn a_million_elements_lose_nothing_to_rounding_and_any_thread_count_gives_the_same_bits() {
        let value = |i: usize| 1.0 + (i as f64 * 0.618_033_988_749_894_9).fract();
        for shape in [&[1_000_000][..], &[1000, 1000], &[250_000, 4], &[20_000, 50]] {
            let x = make(shape, DType::F32, &value);
            let exact: f64 = twin(&x, &(0..shape.len()).collect::<Vec<_>>())[0];
            let all = sum(&x, &(0..shape.len()).collect::<Vec<_>>(), false).unwrap();
            assert_close(values(&all)[0], exact, 1e-7);
            let other = Device::Cpu(77);
            let y = x.to_device(other, true).unwrap();
            let first = sum(&x, &[0], false).unwrap();
            for threads in [1, 2, 5] {
                other.set_threads(threads).unwrap();
                assert_eq!(values(&sum(&y, &[0], false).unwrap()), values(&first));
            }
            for (got, want) in values(&first).into_iter().zip(twin(&x, &[0])) {
                assert_close(got, want, 2e-7);
            }
        }
    }

    #[test]
    fn integers_and_bools_are_summed_in_i64() {
        let x = Tensor::from_slice(&[200u8, 100, 255, 1, 2, 3], &[2, 3], Device::CPU).unwrap();
        assert_eq!(sum(&x, &[1], false).unwrap().to_vec::<i64>().unwrap(), [555, 6]);
        let x = Tensor::from_slice(&[true, true, false, true], &[4], Device::CPU).unwrap();
        assert_eq!(sum(&x, &[0], false).unwrap().item::<i64>().unwrap(), 3);
        assert!(mean(&x, &[0], false).is_err());
    }

    #[test]
    fn the_mean_of_large_halves_is_finite() {
        let x = make(&[1000], DType::F16, &|_| 60000.0);
        assert_eq!(values(&mean(&x, &[0], false).unwrap()), [60000.0]);
    }

    /// The variance of a line, in two passes in f64.
    fn variance_twin(line: &[f64], correction: f64) -> f64 {
        let mean = line.iter().sum::<f64>() / line.len() as f64;
        line.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (line.len() as f64 - correction)
    }

    fn close(got: f64, want: f64, dtype: DType) {
        assert!((got - want).abs() <= 4.0 * tolerance(dtype) * want, "got {got}, wanted {want}");
    }

    #[test]
    fn equals_two_passes_in_f64_with_a_large_mean_too() {
        for dtype in FLOATS {
            for (mean, spread) in [(0.0, 1.0), (1e4, 0.1)] {
                let x = make(&[40, 3000], dtype, &floats(mean - spread, mean + spread));
                let all = values(&x);
                for (got, line) in values(&var(&x, &[1], 1.0, false).unwrap()).iter().zip(all.chunks(3000)) {
                    close(*got, variance_twin(line, 1.0), dtype);
                }
                for (column, got) in values(&var(&x, &[0], 0.0, true).unwrap()).iter().enumerate() {
                    let line: Vec<f64> = all.iter().skip(column).step_by(3000).copied().collect();
                    close(*got, variance_twin(&line, 0.0), dtype);
                }
            }
        }
        let one = make(&[1], FLOATS[0], &|_| 2.0);
        assert!(values(&var(&one, &[0], 1.0, false).unwrap())[0].is_nan());
    }

    #[test]
    fn equals_the_formula_and_bears_infinities() {
        for dtype in FLOATS {
            let x = make(&[30, 2000], dtype, &floats(-5.0, 5.0));
            let all = values(&x);
            let twin = |line: &mut dyn Iterator<Item = f64>| line.map(f64::exp).sum::<f64>().ln();
            for (got, line) in values(&logsumexp(&x, &[1], false).unwrap()).iter().zip(all.chunks(2000)) {
                assert_close(*got, twin(&mut line.iter().copied()), tolerance(dtype));
            }
            for (column, got) in values(&logsumexp(&x, &[0], false).unwrap()).iter().enumerate() {
                assert_close(
                    *got,
                    twin(&mut all.iter().skip(column).step_by(2000).copied()),
                    tolerance(dtype),
                );
            }
            let inf = f64::INFINITY;
            for (line, want) in [([-inf, -inf], -inf), ([inf, 0.0], inf), ([f64::NAN, inf], f64::NAN)] {
                let got = values(&logsumexp(&make(&[2], dtype, &|i| line[i]), &[0], false).unwrap())[0];
                assert!(got == want || got.is_nan() && want.is_nan(), "{line:?}: {got}");
            }
            let large = make(&[2], dtype, &|_| 6e4);
            let want = values(&large)[0] + 2f64.ln();
            assert_close(values(&logsumexp(&large, &[0], false).unwrap())[0], want, tolerance(dtype));
        }
    }
}
