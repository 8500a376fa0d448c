//! Sums and means over dimensions.

use phalanx_tensor::{DType, Dim, Result, Tensor};

use crate::check;
use crate::dispatch::Kernels;
use crate::real::{for_integer, for_real};
use crate::reduce::cuda::{self, Finish, Precision, Target};
use crate::reduce::{By, Frame, Itself, Kind, Sum, Total, each, fold_each, fold_tensor};
use crate::source::Source;

/// The sum over `dims`, which stay with size 1 if `keepdim`; 0 over nothing. Integers and bools are summed in i64
/// and wrap. Of floats a block's elements are added in the type that is computed in, over many chains side by side,
/// the blocks' sums in f64 by halves; one rounding at the end.
///
/// # Errors
/// If a dimension does not exist or is named twice.
pub fn sum<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    sum_over(&Frame::new("sum", x, dims, keepdim)?)
}

/// The mean over `dims`; NaN over nothing. Rounded once, so that a sum beyond the dtype does no harm.
///
/// # Errors
/// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
pub fn mean<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    check::float("mean", x)?;
    let frame = Frame::new("mean", x, dims, keepdim)?;
    scaled_sum("mean", &frame, frame.n as f64)
}

fn sum_over(frame: &Frame) -> Result<Tensor> {
    const OP: &str = "sum";
    let dtype = frame.view.dtype();
    if dtype.is_float() {
        return scaled_sum(OP, frame, 1.0);
    }
    let (mut out, computes) = frame.output(OP, DType::I64)?;
    if computes {
        INTEGERS.run(out.device(), |sum| sum(OP, frame, &mut out))?;
    }
    Ok(out)
}

const INTEGERS: Kernels<Integers> = Kernels { cpu: integers_on_cpu, cuda: integers_on_gpu };
/// The sums over a divisor.
const FLOATS: Kernels<Floats> = Kernels { cpu: floats_on_cpu, cuda: floats_on_gpu };

type Integers = fn(&'static str, &Frame, &mut Tensor) -> Result<()>;
type Floats = fn(&'static str, &Frame, f64, &mut Tensor) -> Result<()>;

fn integers_on_cpu(op: &'static str, frame: &Frame, out: &mut Tensor) -> Result<()> {
    let (numel, frame) = (out.numel(), frame.in_any_order()?);
    let mut target = out.write::<i64>(op)?;
    for_integer!(op, frame.view.dtype(), T => {
        let source = Source::<T>::open(op, &frame.view, frame.view.shape())?;
        fold_each::<T, i64>(&frame, &source, &By(Sum), &mut target[..numel])
    })
}

fn integers_on_gpu(op: &'static str, frame: &Frame, out: &mut Tensor) -> Result<()> {
    each(op, frame, Kind::Add, out, None)
}

fn scaled_sum(op: &'static str, frame: &Frame, divisor: f64) -> Result<Tensor> {
    let (mut out, computes) = frame.output(op, frame.view.dtype())?;
    if computes {
        FLOATS.run(out.device(), |sum| sum(op, frame, divisor, &mut out))?;
    }
    Ok(out)
}

const SUM: (Total, Itself) = (Total, Itself { neutral: 0.0 });

fn floats_on_cpu(op: &'static str, frame: &Frame, divisor: f64, out: &mut Tensor) -> Result<()> {
    for_real!(op, out.dtype(), T => {
        fold_tensor::<T, _, _, 1>(op, frame, SUM, &[], out, |_, [sum]| match divisor == 1.0 {
            true => sum, // a division takes as long as some of the additions
            false => sum / divisor,
        })
    })
}

fn floats_on_gpu(op: &'static str, frame: &Frame, divisor: f64, out: &mut Tensor) -> Result<()> {
    let finish = Finish { text: "set(out, o, x[0] / a)", numbers: [divisor, 0.0] };
    cuda::fold(op, frame, SUM, Precision::Plain, None, Target::Tensor(out), &finish)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{mean, sum};
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
            let turned = x.permute(&order).unwrap().copy().unwrap().permute(&order).unwrap();
            assert_eq!(
                values(&sum(&turned, &dims, false).unwrap()),
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
}
