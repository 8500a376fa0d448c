//! Variances over dimensions.

use phalanx_tensor::{Dim, Result, Tensor};

use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::reduce::cuda::{self, Finish, Precision, Target};
use crate::reduce::{Deviation, Frame, Itself, Total, fold, fold_tensor};
use crate::simd::Float;

/// `sum((x - mean)²) / (n - correction)` over `dims`, which stay with size 1 if `keepdim`. In two passes: the
/// deviations are taken from the rounded mean, and what its rounding adds to their squares is taken off again.
///
/// # Errors
/// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
pub fn var<D: Dim>(x: &Tensor, dims: &[D], correction: f64, keepdim: bool) -> Result<Tensor> {
    check::float(OP, x)?;
    check::from_zero(OP, "a correction of", correction)?;
    var_over(&Frame::new(OP, x, dims, keepdim)?, correction)
}

const OP: &str = "var";

fn var_over(frame: &Frame, correction: f64) -> Result<Tensor> {
    let (mut out, computes) = frame.output(OP, frame.view.dtype())?;
    if computes {
        VARIANCE.run(out.device(), |variance| variance(frame, correction, &mut out))?;
    }
    Ok(out)
}

const VARIANCE: Kernels<Variance> = Kernels { cpu: variance_on_cpu, cuda: variance_on_gpu };

type Variance = fn(&Frame, f64, &mut Tensor) -> Result<()>;

fn variance_on_cpu(frame: &Frame, correction: f64, out: &mut Tensor) -> Result<()> {
    for_real!(OP, out.dtype(), T => variance::<T>(OP, frame, correction, out))
}

fn variance<T: Real>(op: &'static str, frame: &Frame, correction: f64, out: &mut Tensor) -> Result<()> {
    let n = frame.n as f64;
    let mut means = vec![T::Wide::ZERO; out.numel()];
    let mean = |_: usize, [sum]: [f64; 1]| T::Wide::from_f64(sum / n);
    fold::<T, _, _, _, 1>(op, frame, (Total, Itself { neutral: 0.0 }), &[], &mut means, mean)?;
    let divisor = (n - correction).max(0.0);
    fold_tensor::<T, _, _, 2>(op, frame, (Total, Deviation), &means, out, |_, [sum, squares]| {
        let rest = squares - sum * sum / n;
        if rest < 0.0 { 0.0 } else { rest / divisor }
    })
}

fn variance_on_gpu(frame: &Frame, correction: f64, out: &mut Tensor) -> Result<()> {
    let (n, divisor) = (frame.n as f64, (frame.n as f64 - correction).max(0.0));
    let means = cuda::numbers(OP, frame)?;
    let mean = Finish { text: "set(out, o, x[0] / a)", numbers: [n, 0.0] };
    let with = (Total, Itself { neutral: 0.0 });
    cuda::fold(OP, frame, with, Precision::Plain, None, Target::Scratch(&means), &mean)?;
    let text = "const f64 rest = x[1] - x[0] * x[0] / a; set(out, o, rest < 0.0 ? 0.0 : rest / b)";
    let finish = Finish { text, numbers: [n, divisor] };
    let target = Target::Tensor(out);
    cuda::fold(OP, frame, (Total, Deviation), Precision::Plain, Some(&means), target, &finish)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::var;
    use crate::testing::{FLOATS, floats, make, tolerance, values};

    /// The variance of a line, in two passes in f64.
    fn twin(line: &[f64], correction: f64) -> f64 {
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
                    close(*got, twin(line, 1.0), dtype);
                }
                for (column, got) in values(&var(&x, &[0], 0.0, true).unwrap()).iter().enumerate() {
                    let line: Vec<f64> = all.iter().skip(column).step_by(3000).copied().collect();
                    close(*got, twin(&line, 0.0), dtype);
                }
            }
        }
        let one = make(&[1], FLOATS[0], &|_| 2.0);
        assert!(values(&var(&one, &[0], 1.0, false).unwrap())[0].is_nan());
    }
}
