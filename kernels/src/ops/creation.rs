//! New tensors of constants and of evenly spaced numbers, and triangles of matrices.

use phalanx_tensor::{DType, Device, Element, Error, Result, Scalar, Tensor, bf16, f16};

use super::cast::{cast, to_odd};
use crate::block_reader::BlockReader;
use crate::data_movement;
use crate::dispatch::by_device;
use crate::pointwise::cuda::{self, Expression, Numbers};
use crate::pointwise::{evaluate, refuse_overlap, update};
use crate::real::for_element;
use crate::simd::{Isa, Kernel, dispatch};

/// A tensor of `shape` with `value` everywhere.
///
/// # Errors
/// If it cannot be allocated, or an integer dtype cannot hold the value.
pub fn full(shape: &[usize], value: impl Into<Scalar>, dtype: DType, device: Device) -> Result<Tensor> {
    full_for("full", shape, value.into(), dtype, device)
}

/// [`full`] for an operation, which errors name.
pub(crate) fn full_for(
    op: &'static str,
    shape: &[usize],
    value: Scalar,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let value = value.fitting(op, dtype)?;
    let mut out = Tensor::empty_for(op, shape, dtype, device)?;
    fill_(&mut out, value)?;
    Ok(out)
}

/// Sets every element, in place: `out` may be any view that does not overlap itself.
///
/// # Errors
/// If the destination overlaps itself, or an integer dtype cannot hold the value.
pub fn fill_(out: &mut Tensor, value: impl Into<Scalar>) -> Result<()> {
    fill_all(out, value.into())
}

fn fill_all(out: &mut Tensor, value: Scalar) -> Result<()> {
    let value = value.fitting("fill", out.dtype())?;
    refuse_overlap("fill", out)?;
    let x = Scalar::to_f64;
    match out.dtype() {
        DType::F64 => fill(out, x(value)),
        DType::F32 => fill(out, x(value) as f32),
        DType::BF16 => fill(out, bf16::from_f32(to_odd(x(value)))),
        DType::F16 => fill(out, f16::from_f32(to_odd(x(value)))),
        DType::I64 => fill(out, value.to_i64()),
        DType::I32 => fill(out, value.to_i64() as i32),
        DType::U8 => fill(out, value.to_i64() as u8),
        DType::Bool => fill(out, u8::from(x(value) != 0.0)),
    }
}

fn fill<T: Element>(out: &mut Tensor, value: T) -> Result<()> {
    by_device(
        out,
        |out| fill_on_cpu(out, value),
        |out| {
            let bits = [cuda::bits(value)];
            let constant = Expression::of_bits("k[0]", T::DTYPE, &bits);
            let before = out.clone();
            cuda::evaluate("fill", &constant, [&before], out)
        },
    )
}

fn fill_on_cpu<T: Element>(out: &mut Tensor, value: T) -> Result<()> {
    if out.is_contiguous() {
        return update("fill", out, |_, to| data_movement::fill(to, value));
    }
    let layout = out.layout().clone();
    let mut target = out.write::<T>("fill")?;
    crate::data_movement::for_each_run_mut(&mut target, &layout, |run| run.set(value));
    Ok(())
}

/// `start, start + step, ..` up to but not including `end`, on `device`. Computed in i64 or f64, each element apart,
/// and converted to `dtype`.
///
/// # Errors
/// If `step` is 0 or leads away from `end`, a bound is not finite, an integer dtype cannot hold a number, or there is no
/// memory for so many.
pub fn arange(
    start: impl Into<Scalar>,
    end: impl Into<Scalar>,
    step: impl Into<Scalar>,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    spaced([start.into(), end.into(), step.into()], dtype, device)
}

fn spaced([start, end, step]: [Scalar; 3], dtype: DType, device: Device) -> Result<Tensor> {
    let count = count(start, end, step).ok_or_else(|| {
        let why = format!("got {start} to {end} by {step}, wanted a finite step that leads to the end");
        Error::invalid("arange", why)
    })?;
    let (start, step) = hold(start, step, count, dtype)?;
    let exact = match (start, step) {
        (Scalar::Int(start), Scalar::Int(step)) => {
            let numbers = [start, step];
            let cuda = Expression::of_integers("wrapping_add(k[0], wrapping_mul(k[1], (i64)i))", &numbers);
            filled(count, device, |i| start.wrapping_add(step.wrapping_mul(i as i64)), &cuda)?
        }
        _ => {
            let (start, step) = (start.to_f64(), step.to_f64());
            let text = "__dadd_rn(k[0], __dmul_rn(k[1], (f64)i))";
            let cuda = Expression { text, value: "f64", numbers: Numbers::Floats(&[start, step]) };
            filled(count, device, |i| start + step * i as f64, &cuda)?
        }
    };
    cast(&exact, dtype)
}

/// How many numbers there are, if the step leads to the end.
fn count(start: Scalar, end: Scalar, step: Scalar) -> Option<usize> {
    if let (Scalar::Int(start), Scalar::Int(end), Scalar::Int(step)) = (start, end, step) {
        let (way, step) = (i128::from(end) - i128::from(start), i128::from(step));
        let steps = way.checked_div(step)? + i128::from(way.checked_rem(step)? != 0);
        return usize::try_from(steps).ok().filter(|_| way.signum() * step.signum() >= 0);
    }
    let count = ((end.to_f64() - start.to_f64()) / step.to_f64()).ceil();
    let fits = step.to_f64() != 0.0 && (0.0..=isize::MAX as f64).contains(&count);
    fits.then_some(count as usize)
}

/// Start and step, if the dtype holds all numbers.
fn hold(start: Scalar, step: Scalar, count: usize, dtype: DType) -> Result<(Scalar, Scalar)> {
    if dtype.integers().is_none() {
        return Ok((start, step));
    }
    let (start, step) = (start.fitting("arange", dtype)?, step.fitting("arange", DType::I64)?);
    let last = i128::from(start.to_i64()) + i128::from(step.to_i64()) * (count.max(1) - 1) as i128;
    let last = i64::try_from(last).map_or(Scalar::Float(last as f64), Scalar::Int);
    last.fitting("arange", dtype)?;
    Ok((start, step))
}

fn filled<T: Element>(
    count: usize,
    device: Device,
    value: impl Fn(usize) -> T + Sync,
    expression: &Expression<'_>,
) -> Result<Tensor> {
    let mut out = Tensor::empty_for("arange", &[count], T::DTYPE, device)?;
    by_device(
        &mut out,
        |out| update("arange", out, |start, to: &mut [T]| dispatch(Filled { start, to, value: &value })),
        |out| {
            let before = out.clone();
            cuda::evaluate("arange", expression, [&before], out)
        },
    )?;
    Ok(out)
}

/// Sets element `i` of a piece that begins at number `start` to `value(start + i)`.
struct Filled<'a, T, F> {
    start: usize,
    to: &'a mut [T],
    value: &'a F,
}

impl<T, F: Fn(usize) -> T> Kernel for Filled<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (i, to) in self.to.iter_mut().enumerate() {
            *to = (self.value)(self.start + i);
        }
    }
}

/// The elements of each matrix (the last two dimensions) on and below a diagonal, zero above it. Diagonal 0 is the
/// main one, positive ones lie above it.
///
/// # Errors
/// If there are fewer than two dimensions.
pub fn tril(x: &Tensor, diagonal: isize) -> Result<Tensor> {
    let cuda = "(i64)(i % k[0]) - (i64)(i / k[0] % k[1]) <= k[2] ? x[0] : X(0)";
    triangle("tril", x, (diagonal, cuda), |row, columns| {
        (0, (row + 1).saturating_add(diagonal).clamp(0, columns))
    })
}

/// The elements of each matrix on and above a diagonal, zero below it.
///
/// # Errors
/// If there are fewer than two dimensions.
pub fn triu(x: &Tensor, diagonal: isize) -> Result<Tensor> {
    let cuda = "(i64)(i % k[0]) - (i64)(i / k[0] % k[1]) >= k[2] ? x[0] : X(0)";
    triangle("triu", x, (diagonal, cuda), |row, columns| {
        (row.saturating_add(diagonal).clamp(0, columns), columns)
    })
}

/// Keeps columns `keep(row, columns)` of each row; on a GPU, what the text says for the columns, the rows and the
/// diagonal.
fn triangle(
    op: &'static str,
    x: &Tensor,
    (diagonal, text): (isize, &'static str),
    keep: impl Fn(isize, isize) -> (isize, isize) + Sync,
) -> Result<Tensor> {
    let &[.., rows, columns] = x.shape() else {
        return Err(Error::shape(op, format!("{:?}", x.shape()), "at least two dimensions"));
    };
    let mut out = x.empty_like_for(op)?;
    let numbers = [columns as i64, rows as i64, (diagonal as i64).clamp(-(rows as i64), columns as i64)];
    evaluate(op, &Expression::of_bits(text, x.dtype(), &numbers), [x], &mut out, |out| {
        if out.numel() == 0 {
            return Ok(());
        }
        let keep = |row: usize| {
            let (start, end) = keep((row % rows) as isize, columns as isize);
            start as usize..end as usize
        };
        for_element!(x.dtype(), T => cut::<T>(op, x, columns, keep, out))
    })?;
    Ok(out)
}

fn cut<T: Element>(
    op: &'static str,
    x: &Tensor,
    columns: usize,
    keep: impl Fn(usize) -> std::ops::Range<usize> + Sync,
    out: &mut Tensor,
) -> Result<()> {
    let (source, pool, numel) = (BlockReader::<T>::open(op, x, x.shape())?, x.device().pool()?, out.numel());
    let mut target = out.write::<T>(op)?;
    let rows_a_piece = crate::pointwise::PIECE.div_ceil(columns);
    pool.for_each_chunk(&mut target[..numel], rows_a_piece * columns, |piece, target| {
        for (i, target) in target.chunks_mut(columns).enumerate() {
            let row = piece * rows_a_piece + i;
            let kept = keep(row);
            target.fill(T::zeroed());
            source.copy_to(row * columns + kept.start, &mut target[kept]);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::testing::{tensors, values};

    #[test]
    fn a_value_that_the_dtype_cannot_hold_is_refused_and_not_wrapped() {
        let refused = |value: Scalar, dtype| {
            let error = full(&[2], value, dtype, Device::CPU).unwrap_err().to_string();
            assert!(error.starts_with("full: got the number") && error.contains(dtype.name()), "{error}");
            let mut held = Tensor::zeros(&[2], dtype, Device::CPU).unwrap();
            assert!(fill_(&mut held, value).is_err());
            let mut meta = Tensor::zeros(&[2], dtype, Device::Meta(0)).unwrap();
            assert!(fill_(&mut meta, value).is_err());
        };
        refused(Scalar::Int(300), DType::U8);
        refused(Scalar::Int(-1), DType::U8);
        refused(Scalar::Int(1 << 40), DType::I32);
        for value in [1.5, f64::NAN, f64::INFINITY, 1e30] {
            refused(Scalar::Float(value), DType::I64);
        }
        assert_eq!(full(&[], 255, DType::U8, Device::CPU).unwrap().item::<u8>().unwrap(), 255);
        assert_eq!(full(&[], -2.0, DType::I32, Device::CPU).unwrap().item::<i32>().unwrap(), -2);
        assert!(full(&[], f64::NAN, DType::Bool, Device::CPU).unwrap().item::<bool>().unwrap());
    }

    #[test]
    fn a_destination_that_overlaps_itself_is_refused() {
        let zero = Tensor::zeros(&[1], DType::F32, Device::CPU).unwrap();
        let error = fill_(&mut zero.broadcast_to(&[3]).unwrap(), 1).unwrap_err().to_string();
        assert!(error.starts_with("fill: the destination overlaps itself"), "{error}");
    }

    #[test]
    fn numbers_that_the_dtype_cannot_hold_are_refused() {
        let run = |start: f64, end: i64, step: f64, dtype| arange(start, end, step, dtype, Device::CPU);
        assert_eq!(values(&run(250.0, 256, 5.0, DType::U8).unwrap()), [250.0, 255.0]);
        for (start, end, step) in [(250.0, 258, 1.0), (-1.0, 3, 1.0), (0.5, 3, 1.0), (0.0, 3, 0.5)] {
            let error = run(start, end, step, DType::U8).unwrap_err().to_string();
            assert!(error.starts_with("arange: got the number"), "{error}");
        }
        let far = 1i64 << 60;
        let near = arange(far, far + 2, 1, DType::I64, Device::CPU).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(near, [far, far + 1], "the count is not rounded");
        assert_eq!(arange(3, 0, -2, DType::I32, Device::CPU).unwrap().to_vec::<i32>().unwrap(), [3, 1]);
        for (start, end, step) in [(0, 3, -1), (3, 0, 1), (0, 3, 0)] {
            assert!(arange(start, end, step, DType::I64, Device::CPU).is_err());
        }
    }

    #[test]
    fn counts_are_whole_and_what_has_no_memory_is_refused() {
        let run = |end: i64, device| arange(0, end, 1, DType::F32, device);
        assert_eq!(values(&run(4, Device::CPU).unwrap()), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(values(&arange(1.0, 0.0, -0.5, DType::F64, Device::CPU).unwrap()), [1.0, 0.5]);
        assert!(run(i64::MAX, Device::CPU).is_err());
        assert!(run(i64::MAX, Device::Meta(0)).is_err());
        assert_eq!(run(1 << 43, Device::Meta(0)).unwrap().shape(), [1 << 43]);
    }

    #[test]
    fn triangles_are_cut_at_the_diagonal() {
        for x in tensors(&|i| i as f64 % 50.0 + 1.0).iter().filter(|x| x.rank() > 1) {
            let [.., rows, columns] = *x.shape() else { unreachable!() };
            for diagonal in [isize::MIN, -200, -1, 0, 2, 200, isize::MAX] {
                let (low, high) = (values(&tril(x, diagonal).unwrap()), values(&triu(x, diagonal).unwrap()));
                for (at, x) in values(x).into_iter().enumerate() {
                    let above = (at % columns) as isize - (at / columns % rows) as isize;
                    assert_eq!(low[at], if above <= diagonal { x } else { 0.0 });
                    assert_eq!(high[at], if above >= diagonal { x } else { 0.0 });
                }
            }
        }
    }
}
