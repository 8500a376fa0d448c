//! Scans along a dimension: running sums, products, extrema and logarithms of sums, each with a merge of its own.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Dim, Element, Error, Result, Tensor};

use super::cast::{Number, to_odd};
use super::functions::add_logarithms;
use crate::block_reader::BLOCK;
use crate::cuda::{File, PRELUDE};
use crate::dispatch::by_device;
use crate::pointwise::PIECE;
use crate::real::{Real, for_element, for_integer, for_real};
use crate::reduce::{VALUE, stored};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, dispatch};

/// `y[i] = x[0] + .. + x[i]` along `dim`. Floats are summed in f64, each result rounded once; integers and bools in
/// i64. If the elements of a line lie together, runs of 32 of them are added by themselves, and the sum of what comes
/// before a run is added to each of its results.
///
/// # Errors
/// If there is no such dimension.
pub fn cumsum(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    running("cumsum", x, dim.resolve(x.rank().max(1), "cumsum")?, false)
}

/// `y[i] = x[i] + .. + x[n - 1]` along `dim`: [`cumsum`] from the end.
///
/// # Errors
/// As [`cumsum`].
pub fn cumsum_reversed(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    running("cumsum_reversed", x, dim.resolve(x.rank().max(1), "cumsum")?, true)
}

fn running(op: &'static str, x: &Tensor, dim: usize, reversed: bool) -> Result<Tensor> {
    let sums = Merge { text: "a + b", first: "0" };
    scanned(op, x, dim, reversed, sums, |scan, x, out| match x.dtype().is_float() {
        true => for_real!(op, x.dtype(), T => run_sums::<T>(scan, x, out)),
        false => for_integer!(op, x.dtype(), T => {
            scan.run::<T, i64, i64>(x, out, 0, |sum, x| sum.wrapping_add(x.to_i64()), |sum| sum)
        }),
    })
}

/// Makes the output, in `x`'s dtype or in i64 if that is no floating-point one, and hands what has elements to a GPU or to
/// `run`, with `x` contiguous.
fn scanned(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    reversed: bool,
    merge: Merge,
    run: impl FnOnce(&Scan, &Tensor, &mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let dtype = if x.dtype().is_float() { x.dtype() } else { DType::I64 };
    let mut out = Tensor::empty_for(op, x.shape(), dtype, x.device())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let scan = Scan {
        op,
        n: x.shape().get(dim).copied().unwrap_or(1),
        inner: x.shape().iter().skip(dim + 1).product(),
        reversed,
    };
    by_device(&mut out, |out| run(&scan, &x, out), |out| scan_on_gpu(&scan, merge, &x, out))?;
    Ok(out)
}

/// How a GPU merges the numbers `a` (of earlier elements) and `b`, as CUDA text, and the neutral element.
#[derive(Clone, Copy)]
struct Merge {
    text: &'static str,
    first: &'static str,
}

#[derive(Clone, Copy)]
struct Scan {
    op: &'static str,
    n: usize,
    inner: usize,
    reversed: bool,
}

impl Scan {
    fn run<T: Element, U: Element, A: Copy + Sync>(
        &self,
        x: &Tensor,
        out: &mut Tensor,
        start: A,
        add: impl Fn(A, T) -> A + Sync,
        narrow: impl Fn(A) -> U + Sync,
    ) -> Result<()> {
        let (inner, slab, numel) = (self.inner, self.n * self.inner, out.numel());
        let source = x.read::<T>(self.op)?;
        let source = &source[x.offset()..][..numel];
        let slabs_a_piece = PIECE.div_ceil(slab);
        let mut target = out.write::<U>(self.op)?;
        x.device().pool()?.for_each_chunk(&mut target[..numel], slabs_a_piece * slab, |piece, target| {
            let mut sums = vec![start; inner];
            let source = &source[piece * slabs_a_piece * slab..][..target.len()];
            for (x, to) in source.chunks(slab).zip(target.chunks_mut(slab)) {
                if inner == 1 {
                    let mut sum = start;
                    let mut next = |(&x, to): (&T, &mut U)| {
                        sum = add(sum, x);
                        *to = narrow(sum);
                    };
                    match self.reversed {
                        true => x.iter().zip(to).rev().for_each(&mut next),
                        false => x.iter().zip(to).for_each(&mut next),
                    }
                    continue;
                }
                sums.fill(start);
                for i in 0..self.n {
                    let row = if self.reversed { self.n - 1 - i } else { i } * inner;
                    for ((sum, &x), to) in sums.iter_mut().zip(&x[row..]).zip(&mut to[row..]) {
                        *sum = add(*sum, x);
                        *to = narrow(*sum);
                    }
                }
            }
        });
        Ok(())
    }
}

/// Elements of a run that is added by itself.
const RUN: usize = 32;
/// Runs that are added side by side.
const RUNS: usize = 8;

/// `x` is contiguous, and `out` new.
fn run_sums<T: Real>(scan: &Scan, x: &Tensor, out: &mut Tensor) -> Result<()> {
    let (inner, slab, numel) = (scan.inner, scan.n * scan.inner, out.numel());
    let source = x.read::<T>(scan.op)?;
    let source = &source[x.offset()..][..numel];
    let mut target = out.write::<T>(scan.op)?;
    let piece = PIECE.div_ceil(slab) * slab;
    x.device().pool()?.for_each_chunk(&mut target[..numel], piece, |i, to| {
        let x = &source[i * piece..][..to.len()];
        if inner == 1 {
            // Whole lines, as many as make a block.
            let lines = (BLOCK / slab).max(1) * slab;
            x.chunks(lines).zip(to.chunks_mut(lines)).for_each(|(x, to)| {
                rounded(x, to, |x, to, odd| match odd {
                    true => dispatch(Lines::<_, true> { x, to, n: slab, reversed: scan.reversed }),
                    false => dispatch(Lines::<_, false> { x, to, n: slab, reversed: scan.reversed }),
                });
            });
            return;
        }
        with_scratch(inner, |sums: &mut [f64]| {
            for (x, to) in x.chunks(slab).zip(to.chunks_mut(slab)) {
                sums.fill(0.0);
                for i in 0..scan.n {
                    let row = if scan.reversed { scan.n - 1 - i } else { i } * inner;
                    rounded(&x[row..][..inner], &mut to[row..][..inner], |x, to, odd| match odd {
                        true => dispatch(Row::<_, true> { x, to, sums: &mut *sums }),
                        false => dispatch(Row::<_, false> { x, to, sums: &mut *sums }),
                    });
                }
            }
        });
    });
    Ok(())
}

/// Calls `f` with what is computed with, and whether to round to odd as the results are rounded again.
fn rounded<T: Real>(x: &[T], to: &mut [T], f: impl FnOnce(&[T::Wide], &mut [T::Wide], bool)) {
    if let (Some(x), Some(to)) = (T::as_wide(x), T::as_wide_mut(to)) {
        return f(x, to, false);
    }
    with_scratch(2 * x.len(), |scratch| {
        let (wide, sums) = scratch.split_at_mut(x.len());
        T::widen_all(x, wide);
        f(wide, sums, true);
        T::narrow_all(sums, to);
    });
}

#[inline(always)]
fn narrow<W: Float, const ODD: bool>(x: f64) -> W {
    if ODD { W::from_f64(f64::from(to_odd(x))) } else { W::from_f64(x) }
}

/// Lines of `n` elements each.
struct Lines<'a, W, const ODD: bool> {
    x: &'a [W],
    to: &'a mut [W],
    n: usize,
    reversed: bool,
}

impl<W: Float, const ODD: bool> Kernel for Lines<'_, W, ODD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (x, to) in self.x.chunks_exact(self.n).zip(self.to.chunks_exact_mut(self.n)) {
            match self.reversed {
                true => line::<W, ODD, true>(x, to),
                false => line::<W, ODD, false>(x, to),
            }
        }
    }
}

#[inline(always)]
fn line<W: Float, const ODD: bool, const REVERSED: bool>(x: &[W], to: &mut [W]) {
    const TOGETHER: usize = RUN * RUNS;
    // The element that comes at some point of `len` elements.
    let at = |i: usize, len: usize| if REVERSED { len - 1 - i } else { i };
    let (blocks, rest) = (x.len() / TOGETHER, x.len() % TOGETHER);
    let mut before = 0.0;
    for block in 0..blocks {
        let start = if REVERSED { rest } else { 0 } + at(block, blocks) * TOGETHER;
        let (x, to) = (&x[start..][..TOGETHER], &mut to[start..][..TOGETHER]);
        let (mut sums, mut running) = ([0.0; RUNS], [0.0; TOGETHER]);
        for i in 0..RUN {
            for (run, sum) in sums.iter_mut().enumerate() {
                let place = run * RUN + at(i, RUN);
                *sum += x[place].to_f64();
                running[place] = *sum;
            }
        }
        for i in 0..RUNS {
            let run = at(i, RUNS);
            for (to, sum) in to[run * RUN..][..RUN].iter_mut().zip(&running[run * RUN..][..RUN]) {
                *to = narrow::<W, ODD>(before + sum);
            }
            before += sums[run];
        }
    }
    let start = if REVERSED { 0 } else { blocks * TOGETHER };
    for i in 0..rest {
        let place = start + at(i, rest);
        before += x[place].to_f64();
        to[place] = narrow::<W, ODD>(before);
    }
}

/// The next row of as many lines as there are sums.
struct Row<'a, W, const ODD: bool> {
    x: &'a [W],
    to: &'a mut [W],
    sums: &'a mut [f64],
}

impl<W: Float, const ODD: bool> Kernel for Row<'_, W, ODD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for ((x, to), sum) in self.x.iter().zip(self.to).zip(self.sums) {
            *sum += x.to_f64();
            *to = narrow::<W, ODD>(*sum);
        }
    }
}

/// `y[i] = x[0] x[1] .. x[i]` along `dim`. Floats are multiplied in f64, each result rounded once; integers and bools in
/// i64, wrapping.
///
/// # Errors
/// If there is no such dimension.
pub fn cumprod(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let merge = Merge { text: "a * b", first: "1" };
    let dim = dim.resolve(x.rank().max(1), "cumprod")?;
    running_by("cumprod", x, dim, merge, (|a, b| a * b, 1.0), (i64::wrapping_mul, 1))
}

/// The largest of `x[0]` .. `x[i]` along `dim`, or NaN from the first on; integers and bools as i64.
///
/// # Errors
/// If there is no such dimension.
pub fn cummax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let merge = Merge { text: "(a > b || a != a ? a : b)", first: "least<Value>()" };
    let larger = |a: f64, b: f64| if a > b || a.is_nan() { a } else { b };
    let dim = dim.resolve(x.rank().max(1), "cummax")?;
    running_by("cummax", x, dim, merge, (larger, f64::NEG_INFINITY), (i64::max, i64::MIN))
}

/// The smallest of `x[0]` .. `x[i]` along `dim`, or NaN from the first on; integers and bools as i64.
///
/// # Errors
/// If there is no such dimension.
pub fn cummin(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let merge = Merge { text: "(a < b || a != a ? a : b)", first: "most<Value>()" };
    let smaller = |a: f64, b: f64| if a < b || a.is_nan() { a } else { b };
    let dim = dim.resolve(x.rank().max(1), "cummin")?;
    running_by("cummin", x, dim, merge, (smaller, f64::INFINITY), (i64::min, i64::MAX))
}

/// `y[i] = ln(e^x[0] + .. + e^x[i])` along `dim`, without overflow on the way.
///
/// # Errors
/// If the dtype is no floating-point one, or there is no such dimension.
pub fn logcumsumexp(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    if !x.dtype().is_float() {
        return Err(Error::dtype("logcumsumexp", x.dtype(), "a floating-point dtype"));
    }
    let merge = Merge { text: "log_add(a, b)", first: "least<Value>()" };
    let dim = dim.resolve(x.rank().max(1), "logcumsumexp")?;
    running_by("logcumsumexp", x, dim, merge, (add_logarithms, f64::NEG_INFINITY), (i64::wrapping_add, 0))
}

/// How numbers are merged on a CPU, and the neutral element.
type With<T> = (fn(T, T) -> T, T);

fn running_by(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    merge: Merge,
    (float, nothing): With<f64>,
    (integer, none): With<i64>,
) -> Result<Tensor> {
    scanned(op, x, dim, false, merge, |scan: &Scan, x, out| {
        for_element!(x.dtype(), T => match out.dtype() {
            DType::I64 => scan.run::<T, i64, i64>(x, out, none, |sum, x| integer(sum, Number::to_i64(x)), |sum| sum),
            _ => scan.run::<T, T, f64>(x, out, nothing, |sum, x| float(sum, Number::to_f64(x)), <T as Number>::from_f64),
        })
    })
}

const FILES: &[File] = &[PRELUDE, VALUE, ("cumsum.cu", include_str!("cumsum.cu"))];

/// `x` lies together, and has elements.
fn scan_on_gpu(scan: &Scan, merge: Merge, x: &Tensor, out: &mut Tensor) -> Result<()> {
    let (gpu, Scan { op, n, inner, reversed }) = (x.device().gpu()?, *scan);
    let value = if x.dtype().is_float() { "f64" } else { "i64" };
    let types = [("STORED", stored(x.dtype())), ("VALUE", value), ("RESULT", stored(out.dtype()))];
    let defines = [types[0], types[1], types[2], ("MERGE", merge.text), ("FIRST", merge.first)];
    let program = Program { name: "cumsum.cu", files: FILES, defines: &defines };
    let lines = x.numel() / n;
    let args = Args::new(op, gpu).write(out)?.read(x)?.value(n as u64).value(u64::from(reversed));
    match inner {
        1 => gpu.kernel(op, &program, "rows")?.launch(Grid::new(lines, 256), args),
        _ => {
            let args = args.value(inner as u64).value(lines as u64);
            gpu.kernel(op, &program, "columns")?.launch(Grid::new(lines.div_ceil(256), 256), args)
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use super::*;
    use crate::testing::{assert_along, assert_close, floats, tensors, tolerance, values};

    #[test]
    fn equals_plain_running_sums_from_either_end() {
        for x in tensors(&floats(-1.0, 2.0)) {
            for dim in 0..x.rank().max(1) {
                let n = x.shape().get(dim).copied().unwrap_or(1);
                let inner: usize = x.shape().iter().skip(dim + 1).product();
                let mut wanted = values(&x);
                for i in inner..wanted.len() {
                    if !(i / inner).is_multiple_of(n) {
                        wanted[i] += wanted[i - inner];
                    }
                }
                let sums = values(&cumsum(&x, dim).unwrap());
                let back = if x.rank() == 0 {
                    sums.clone()
                } else {
                    let flipped = crate::ops::flip(&x, &[dim]).unwrap();
                    values(&crate::ops::flip(&cumsum_reversed(&flipped, dim).unwrap(), &[dim]).unwrap())
                };
                for ((&got, &back), want) in sums.iter().zip(&back).zip(wanted) {
                    assert_close(got, want, tolerance(x.dtype()));
                    assert_eq!(got, back);
                }
            }
        }
    }

    #[test]
    fn running_values_equal_the_formulas_on_every_shape_and_dtype() {
        fn each(x: &[f64], first: f64, f: fn(f64, f64) -> f64) -> Vec<f64> {
            let next = |y: &mut f64, x: &f64| {
                *y = f(*y, *x);
                Some(*y)
            };
            x.iter().scan(first, next).collect()
        }
        assert_along(cumprod, &floats(-1.2, 1.2), |x| each(x, 1.0, |y, x| y * x));
        assert_along(cummax, &floats(-3.0, 3.0), |x| each(x, f64::NEG_INFINITY, f64::max));
        assert_along(cummin, &floats(-3.0, 3.0), |x| each(x, f64::INFINITY, f64::min));
        assert_along(logcumsumexp, &floats(-3.0, 3.0), |x| {
            each(x, f64::NEG_INFINITY, |y, x| (y.exp() + x.exp()).ln())
        });
    }

    #[test]
    fn nan_stays_and_integers_are_exact() {
        let x = Tensor::from_slice(&[1.0, f64::NAN, 3.0], &[3], Device::CPU).unwrap();
        let y = values(&cummax(&x, 0).unwrap());
        assert!(y[0] == 1.0 && y[1].is_nan() && y[2].is_nan());
        let big = Tensor::from_slice(&[i64::MAX, i64::MAX - 1, 3], &[3], Device::CPU).unwrap();
        assert_eq!(cummin(&big, 0).unwrap().to_vec::<i64>().unwrap(), [i64::MAX, i64::MAX - 1, 3]);
        assert_eq!(cumprod(&big, 0).unwrap().to_vec::<i64>().unwrap()[0], i64::MAX);
        assert!(logcumsumexp(&big, 0).is_err());
    }
}
