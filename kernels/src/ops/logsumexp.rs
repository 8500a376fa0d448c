//! Logarithms of sums of exponentials.

use phalanx_tensor::{Dim, Result, Tensor};

use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::reduce::cuda::{self, Finish, Precision, Target};
use crate::reduce::{ExpAbove, Frame, Itself, Largest, Total, fold, fold_tensor};
use crate::simd::Float;

/// `log(sum(e^x))` over `dims`, which stay with size 1 if `keepdim`; -inf over nothing. The largest element is
/// subtracted first, so that no exponential overflows.
///
/// # Errors
/// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
pub fn logsumexp<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    check::float(OP, x)?;
    logsumexp_over(&Frame::new(OP, x, dims, keepdim)?)
}

const OP: &str = "logsumexp";

fn logsumexp_over(frame: &Frame) -> Result<Tensor> {
    let (mut out, computes) = frame.output(OP, frame.view.dtype())?;
    if computes {
        LOG_SUM.run(out.device(), |log_sum| log_sum(frame, &mut out))?;
    }
    Ok(out)
}

const LOG_SUM: Kernels<LogSum> = Kernels { cpu: log_sum_on_cpu, cuda: log_sum_on_gpu };

type LogSum = fn(&Frame, &mut Tensor) -> Result<()>;

fn log_sum_on_cpu(frame: &Frame, out: &mut Tensor) -> Result<()> {
    for_real!(OP, out.dtype(), T => log_sum::<T>(OP, frame, out))
}

fn log_sum<T: Real>(op: &'static str, frame: &Frame, out: &mut Tensor) -> Result<()> {
    let mut tops = vec![T::Wide::ZERO; out.numel()];
    // Nothing is to be subtracted of an infinite one: the sum says the same.
    let top = |_: usize, [x]: [f64; 1]| T::Wide::from_f64(if x.is_infinite() { 0.0 } else { x });
    let term = Itself { neutral: f64::NEG_INFINITY };
    fold::<T, _, _, _, 1>(op, frame, (Largest, term), &[], &mut tops, top)?;
    let finish = |i: usize, [sum]: [f64; 1]| tops[i].to_f64() + sum.ln();
    fold_tensor::<T, _, _, 1>(op, frame, (Total, ExpAbove), &tops, out, finish)
}

fn log_sum_on_gpu(frame: &Frame, out: &mut Tensor) -> Result<()> {
    let tops = cuda::numbers(OP, frame)?;
    let top = Finish { text: "set(out, o, isinf(x[0]) ? 0.0 : x[0])", numbers: [0.0; 2] };
    let with = (Largest, Itself { neutral: f64::NEG_INFINITY });
    cuda::fold(OP, frame, with, Precision::Plain, None, Target::Scratch(&tops), &top)?;
    let finish = Finish { text: "set(out, o, shift + log(x[0]))", numbers: [0.0; 2] };
    let target = Target::Tensor(out);
    cuda::fold(OP, frame, (Total, ExpAbove), Precision::Plain, Some(&tops), target, &finish)
}

#[cfg(test)]
mod tests {
    use super::logsumexp;
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

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
