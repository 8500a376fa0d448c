//! Extrema over dimensions ([`amax`], [`amin`]), their positions ([`argmax`], [`argmin`], [`max`], [`min`]), and the search for NaN ([`any_nan`]).

use phalanx_tensor::cuda::{Args, Grid, Program, Scratch};
use phalanx_tensor::{DType, Dim, Element, Error, Result, Tensor};

use crate::block_reader::{BLOCK, BlockReader};
use crate::cuda::{PRELUDE, type_name};
use crate::dispatch::Kernels;
use crate::pointwise::PIECE;
use crate::real::{Real, for_integer, for_real};
use crate::reduce::cuda::{self, Destination, Finish, Precision};
use crate::reduce::{
    Blocks, By, Combine, Itself, Largest, Least, MergeKind, Most, ReduceView, Smallest, Wide, each,
    fold_each, fold_tensor,
};
use crate::simd::{Isa, Kernel, dispatch};

/// The largest element over `dims`, which stay with size 1 if `keepdim`; NaN if there is one. Any dtype.
///
/// # Errors
/// If a dimension does not exist or is named twice, or there are no elements to choose from.
pub fn amax<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    largest(&ReduceView::new("amax", x, dims, keepdim)?)
}

/// The smallest element over `dims`; NaN if there is one. Any dtype.
///
/// # Errors
/// As [`amax`].
pub fn amin<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    smallest(&ReduceView::new("amin", x, dims, keepdim)?)
}

fn largest(view: &ReduceView) -> Result<Tensor> {
    extremum("amax", view, Largest)
}

fn smallest(view: &ReduceView) -> Result<Tensor> {
    extremum("amin", view, Smallest)
}

/// An extremum of nothing does not exist.
pub(super) fn refuse_empty(op: &'static str, x: &Tensor, n: usize) -> Result<()> {
    if n > 0 {
        return Ok(());
    }
    Err(Error::shape(op, format!("no elements to choose from in shape {:?}", x.shape()), "at least one"))
}

fn extremum<C: Combine>(op: &'static str, view: &ReduceView, combine: C) -> Result<Tensor> {
    refuse_empty(op, &view.input, view.n)?;
    let (mut out, computes) = view.output(op, view.input.dtype())?;
    if computes {
        let extremum: Kernels<Extremum<C>> =
            Kernels { cpu: extremum_on_cpu::<C>, cuda: extremum_on_gpu::<C> };
        extremum.run(out.device(), |extremum| extremum(op, view, combine, &mut out))?;
    }
    Ok(out)
}

type Extremum<C> = fn(&'static str, &ReduceView, C, &mut Tensor) -> Result<()>;

fn extremum_on_gpu<C: Combine>(
    op: &'static str,
    view: &ReduceView,
    combine: C,
    out: &mut Tensor,
) -> Result<()> {
    if out.dtype().is_float() {
        let (term, finish) =
            (Itself { neutral: C::START }, Finish { text: "set(out, o, x[0])", numbers: [0.0; 2] });
        let target = Destination::Tensor(out);
        return cuda::fold(op, view, (combine, term), Precision::Plain, None, target, &finish);
    }
    let kind = if C::START < 0.0 { MergeKind::Largest } else { MergeKind::Smallest };
    each(op, view, kind, out, None)
}

fn extremum_on_cpu<C: Combine>(
    op: &'static str,
    view: &ReduceView,
    combine: C,
    out: &mut Tensor,
) -> Result<()> {
    let term = Itself { neutral: C::START };
    let view = &view.in_any_order()?;
    if out.dtype().is_float() {
        // Which of two zeros comes last, and which of two NaN, does not show.
        let finish = |_: usize, [x]: [f64; 1]| if x.is_nan() { f64::NAN } else { x + 0.0 };
        return for_real!(op, out.dtype(), T => {
            fold_tensor::<T, _, _, 1>(op, view, (combine, term), &[], out, finish)
        });
    }
    let numel = out.numel();
    for_integer!(op, out.dtype(), T => {
        let source = BlockReader::<T>::open(op, &view.input, view.input.shape())?;
        let target = &mut out.write::<T>(op)?[..numel];
        match C::START < 0.0 {
            true => fold_each::<T, T>(view, &source, &By(Most), target),
            false => fold_each::<T, T>(view, &source, &By(Least), target),
        }
    })
}

/// Along `dim`, or over all elements in row-major order without one: the index of the largest element, the first of
/// equal ones, or of the first NaN. i64; any dtype.
///
/// # Errors
/// If there is no such dimension, or there are no elements to choose from.
pub fn argmax<D: Dim>(x: &Tensor, dim: Option<D>, keepdim: bool) -> Result<Tensor> {
    Ok(over("argmax", x, dim, keepdim, true)?.1)
}

/// [`argmax`] for the smallest element.
///
/// # Errors
/// As [`argmax`].
pub fn argmin<D: Dim>(x: &Tensor, dim: Option<D>, keepdim: bool) -> Result<Tensor> {
    Ok(over("argmin", x, dim, keepdim, false)?.1)
}

/// The largest elements along `dim`, and where they are: see [`argmax`].
///
/// # Errors
/// As [`argmax`].
pub fn max<D: Dim>(x: &Tensor, dim: D, keepdim: bool) -> Result<(Tensor, Tensor)> {
    over("max", x, Some(dim), keepdim, true)
}

/// The smallest elements along `dim`, and where they are: see [`argmax`].
///
/// # Errors
/// As [`argmax`].
pub fn min<D: Dim>(x: &Tensor, dim: D, keepdim: bool) -> Result<(Tensor, Tensor)> {
    over("min", x, Some(dim), keepdim, false)
}

fn over<D: Dim>(
    op: &'static str,
    x: &Tensor,
    dim: Option<D>,
    keepdim: bool,
    largest: bool,
) -> Result<(Tensor, Tensor)> {
    let view = match dim {
        Some(dim) => ReduceView::new(op, x, &[dim], keepdim)?,
        None => ReduceView::new(op, x, &(0..x.rank()).collect::<Vec<_>>(), keepdim)?,
    };
    search_all(op, &view, largest)
}

fn search_all(op: &'static str, view: &ReduceView, largest: bool) -> Result<(Tensor, Tensor)> {
    refuse_empty(op, &view.input, view.n)?;
    let (mut values, computes) = view.output(op, view.input.dtype())?;
    let (mut indices, _) = view.output(op, DType::I64)?;
    if computes {
        SEARCH.run(values.device(), |search| search(op, view, largest, [&mut values, &mut indices]))?;
    }
    Ok((values, indices))
}

const SEARCH: Kernels<Search> = Kernels { cpu: search_on_cpu, cuda: search_on_gpu };

type Search = fn(&'static str, &ReduceView, bool, [&mut Tensor; 2]) -> Result<()>;

fn search_on_gpu(
    op: &'static str,
    view: &ReduceView,
    largest: bool,
    [values, indices]: [&mut Tensor; 2],
) -> Result<()> {
    let kind = if largest { MergeKind::Largest } else { MergeKind::Smallest };
    each(op, view, kind, values, Some(indices))
}

fn search_on_cpu(
    op: &'static str,
    view: &ReduceView,
    largest: bool,
    [values, indices]: [&mut Tensor; 2],
) -> Result<()> {
    if values.dtype().is_float() {
        return for_real!(op, values.dtype(), T => {
            let source = Wide(BlockReader::<T>::open(op, &view.input, view.input.shape())?);
            let found = search::<<T as Real>::Wide>(view, &source, largest)?;
            store(op, found, values, indices, <T as Real>::narrow)
        });
    }
    for_integer!(op, values.dtype(), T => {
        let source = BlockReader::<T>::open(op, &view.input, view.input.shape())?;
        let found = search::<T>(view, &source, largest)?;
        store(op, found, values, indices, |x: T| x)
    })
}

/// The best element so far, and where it is: nowhere at first.
type Best<E> = (E, usize);
const NOWHERE: usize = usize::MAX;
/// Elements of a part of a row, which a thread searches by itself.
const PART: usize = 16 * BLOCK;

fn store<E: Copy, T: Element>(
    op: &'static str,
    found: Vec<Best<E>>,
    values: &mut Tensor,
    indices: &mut Tensor,
    narrow: impl Fn(E) -> T,
) -> Result<()> {
    let (mut values, mut indices) = (values.write::<T>(op)?, indices.write::<i64>(op)?);
    for ((value, index), (x, i)) in values.iter_mut().zip(indices.iter_mut()).zip(found) {
        (*value, *index) = (narrow(x), i as i64);
    }
    Ok(())
}

fn search<E: Element>(view: &ReduceView, source: &dyn Blocks<E>, largest: bool) -> Result<Vec<Best<E>>> {
    let (n, inner, pool) = (view.n, view.inner, view.input.device().pool()?);
    let parts = if inner == 1 { n.div_ceil(PART) } else { 1 };
    let rows = if parts == 1 { n } else { PART };
    let mut best: Vec<Best<E>> = vec![(E::zeroed(), NOWHERE); view.outputs() * parts];
    // Columns of a row that are one call: many, if there is enough for all threads.
    let columns = (inner / (4 * pool.threads()) / 64 * 64).clamp(64, BLOCK / 4);
    let width = PIECE.div_ceil(rows).next_multiple_of(inner.min(columns));
    pool.for_each_chunk(&mut best, width, |piece, best| {
        let mut room = [E::zeroed(); BLOCK];
        let (mut slot, end) = (piece * width, piece * width + best.len());
        while slot < end {
            let (output, from) = (slot / parts, slot % parts * rows);
            let len = (inner - output % inner).min(end - slot).min(BLOCK);
            let first = output / inner * n * inner + output % inner;
            let best = &mut best[slot - piece * width..][..len];
            if inner == 1 {
                for at in (from..n.min(from + rows)).step_by(BLOCK) {
                    let x = source.block(first + at, BLOCK.min(n - at), &mut room);
                    dispatch(Row { x, at, best: &mut best[0], largest });
                }
            } else {
                for row in 0..n {
                    let x = source.block(first + row * inner, len, &mut room);
                    dispatch(Columns { x, row, best: &mut *best, largest });
                }
            }
            slot += len;
        }
    });
    let first_of = |parts: &[Best<E>]| {
        parts[1..].iter().fold(parts[0], |a, &b| if is_better(b.0, a.0, largest) { b } else { a })
    };
    Ok(best.chunks(parts).map(first_of).collect())
}

/// Whether `x` is to be taken instead of `best`, which comes before it.
#[inline(always)]
fn is_better<E: Element>(x: E, best: E, largest: bool) -> bool {
    (if largest { x > best } else { x < best }) || (is_nan(x) && !is_nan(best))
}

#[inline(always)]
#[allow(clippy::eq_op)]
fn is_nan<E: Element>(x: E) -> bool {
    x != x
}

/// A block of a row, whose first element is number `at`.
struct Row<'a, E> {
    x: &'a [E],
    at: usize,
    best: &'a mut Best<E>,
    largest: bool,
}

impl<E: Element> Kernel for Row<'_, E> {
    type Output = ();

    /// Finds the block's best element in chains side by side, and only if that is better, where it is.
    #[inline(always)]
    fn run<S: Isa>(self) {
        const CHAINS: usize = 32;
        let (x, start) = (self.x, self.x[0]);
        let (mut chains, mut odd) = ([start; CHAINS], false);
        let (whole, rest) = x.as_chunks::<CHAINS>();
        if self.largest {
            for x in whole {
                for c in 0..CHAINS {
                    chains[c] = if x[c] > chains[c] { x[c] } else { chains[c] };
                    odd |= is_nan(x[c]);
                }
            }
        } else {
            for x in whole {
                for c in 0..CHAINS {
                    chains[c] = if x[c] < chains[c] { x[c] } else { chains[c] };
                    odd |= is_nan(x[c]);
                }
            }
        }
        let place = if odd || is_nan(start) || rest.iter().any(|&x| is_nan(x)) {
            x.iter().position(|&x| is_nan(x))
        } else {
            let best = chains.iter().chain(rest).copied();
            let best = best.fold(start, |a, b| if is_better(b, a, self.largest) { b } else { a });
            let wanted = self.best.1 == NOWHERE || is_better(best, self.best.0, self.largest);
            if wanted { x.iter().position(|&x| x == best) } else { None }
        };
        let Some(place) = place else { return };
        if self.best.1 == NOWHERE || is_better(x[place], self.best.0, self.largest) {
            *self.best = (x[place], self.at + place);
        }
    }
}

/// Row number `row`, of as many columns as there are best elements.
struct Columns<'a, E> {
    x: &'a [E],
    row: usize,
    best: &'a mut [Best<E>],
    largest: bool,
}

impl<E: Element> Kernel for Columns<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (best, &x) in self.best.iter_mut().zip(self.x) {
            if self.row == 0 || is_better(x, best.0, self.largest) {
                *best = (x, self.row);
            }
        }
    }
}

/// Whether an element is NaN.
///
/// # Errors
/// If the dtype is no floating-point one, or the device has no elements.
pub fn any_nan(x: &Tensor) -> Result<bool> {
    NAN_SEARCH.on(x.device())(x)
}

const NAN_SEARCH: Kernels<NanSearch> = Kernels { cpu: any_nan_on_cpu, cuda: any_nan_on_gpu };

type NanSearch = fn(&Tensor) -> Result<bool>;

fn any_nan_on_cpu(x: &Tensor) -> Result<bool> {
    for_real!(ANY_NAN, x.dtype(), T => any_nan_of::<T>(x))
}

const ANY_NAN: &str = "any_nan";

/// Waits for the answer.
fn any_nan_on_gpu(x: &Tensor) -> Result<bool> {
    crate::check::float(ANY_NAN, x)?;
    let gpu = x.device().gpu()?;
    let gathered = if x.is_contiguous() { None } else { Some(Scratch::of(ANY_NAN, x)?) };
    let defines = [("ELEM", type_name(x.dtype()))];
    let files = &[PRELUDE, ("any_nan.cu", include_str!("any_nan.cu"))];
    let program = Program { name: "any_nan.cu", files, defines: &defines };
    let mut found = Tensor::zeros_for(ANY_NAN, &[1], DType::U8, x.device())?;
    let args = Args::new(ANY_NAN, gpu).write(&mut found)?;
    let args = match &gathered {
        Some(gathered) => args.scratch(gathered),
        None => args.read(x)?,
    };
    let args = args.value(x.numel() as u64);
    let grid = Grid::over(gpu, x.numel() * x.dtype().size() / 16 + 1, 256);
    gpu.kernel(ANY_NAN, &program, "any_nan")?.launch(grid, args)?;
    Ok(found.to_vec::<u8>()? != [0])
}

fn any_nan_of<T: Real>(x: &Tensor) -> Result<bool> {
    let source = BlockReader::<T>::open(ANY_NAN, x, x.shape())?;
    let mut scratch = [T::zeroed(); BLOCK];
    let is_nan = |x: &T| x.partial_cmp(x).is_none();
    let starts = (0..x.numel()).step_by(BLOCK);
    Ok(starts
        .into_iter()
        .any(|start| source.block(start, BLOCK.min(x.numel() - start), &mut scratch).iter().any(is_nan)))
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::super::{amax, amin};
    use super::*;
    use crate::testing::{FLOATS, make, values};

    #[test]
    fn the_first_of_equals_and_the_first_nan_are_found_in_rows_and_columns() {
        for dtype in FLOATS {
            for shape in [[5, 1200], [1200, 5], [40, 30], [1, 7], [200, 2100]] {
                let x = make(&shape, dtype, &|i| (i * 7 % 13) as f64);
                let all = values(&x);
                for dim in [0, 1] {
                    let (top, at) = max(&x, dim, false).unwrap();
                    let (low, low_at) = min(&x, dim, true).unwrap();
                    assert_eq!(values(&amax(&x, &[dim], false).unwrap()), values(&top));
                    assert_eq!(values(&amin(&x, &[dim], true).unwrap()), values(&low));
                    for o in 0..shape[1 - dim] {
                        let line: Vec<f64> = (0..shape[dim])
                            .map(|i| all[if dim == 0 { i * shape[1] + o } else { o * shape[1] + i }])
                            .collect();
                        let first = |best: f64| line.iter().position(|&x| x == best).unwrap() as i64;
                        let (most, least) = (
                            line.iter().fold(0f64, |a, &b| a.max(b)),
                            line.iter().fold(99f64, |a, &b| a.min(b)),
                        );
                        assert_eq!((values(&top)[o], at.to_vec::<i64>().unwrap()[o]), (most, first(most)));
                        assert_eq!(
                            (values(&low)[o], low_at.to_vec::<i64>().unwrap()[o]),
                            (least, first(least))
                        );
                    }
                }
            }
        }
        for count in [33, 5000, 40_000] {
            let numbers: Vec<i32> = (0..count).map(|i| (i * 7919 % 1009) - 500).collect();
            let x = Tensor::from_slice(&numbers, &[numbers.len()], Device::CPU).unwrap();
            let first = |best: i32| numbers.iter().position(|&x| x == best).unwrap() as i64;
            let (top, low) = (*numbers.iter().max().unwrap(), *numbers.iter().min().unwrap());
            assert_eq!(argmax::<usize>(&x, None, false).unwrap().item::<i64>().unwrap(), first(top));
            assert_eq!(argmin::<usize>(&x, None, false).unwrap().item::<i64>().unwrap(), first(low));
            let mut odd: Vec<f64> = numbers.iter().map(|&x| f64::from(x)).collect();
            let last = odd.len() - 3;
            (odd[last], odd[last + 1]) = (f64::NAN, f64::NAN);
            let odd = Tensor::from_slice(&odd, &[odd.len()], Device::CPU).unwrap();
            assert_eq!(argmin::<usize>(&odd, None, false).unwrap().item::<i64>().unwrap(), last as i64);
        }
        let x = Tensor::from_slice(&[1.0f32, f32::NAN, 5.0, f32::NAN], &[4], Device::CPU).unwrap();
        assert_eq!(argmax::<usize>(&x, None, false).unwrap().item::<i64>().unwrap(), 1);
        assert_eq!(argmin(&x, Some(-1), true).unwrap().to_vec::<i64>().unwrap(), [1]);
        assert!(amax(&x, &[0], false).unwrap().item::<f32>().unwrap().is_nan());
        let none = Tensor::zeros(&[0, 2], DType::F32, Device::CPU).unwrap();
        assert!(amax(&none, &[0], false).is_err() && argmax::<usize>(&none, None, false).is_err());
        assert_eq!(amax(&none, &[1], false).unwrap().shape(), [0]);
    }
}
