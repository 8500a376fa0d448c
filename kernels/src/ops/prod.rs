//! Products over dimensions ([`prod`]), and of all other elements ([`prod_of_others`], for the gradient).

use phalanx_tensor::{DType, Dim, Element, Result, Tensor};

use crate::block_reader::{BLOCK, BlockReader};
use crate::check;
use crate::dispatch::Kernels;
use crate::ops::cast::Number;
use crate::pointwise::PIECE;
use crate::real::{Real, for_integer, for_real};
use crate::reduce::{By, Itself, MergeKind, Product, ReduceView, Stored, Times, each, fold_each, fold_in};
use crate::scratch::{Scratch, with_scratch};
use crate::simd::{Float, Isa, Kernel, dispatch};

/// The product over `dims`, which stay with size 1 if `keepdim`; 1 over nothing. Floats are multiplied in f64 and
/// rounded once; integers and bools in i64, where they wrap.
///
/// # Errors
/// If a dimension does not exist or is named twice.
pub fn prod<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    prod_over(&ReduceView::new(OP, x, dims, keepdim)?)
}

const OP: &str = "prod";

fn prod_over(view: &ReduceView) -> Result<Tensor> {
    let from = view.input.dtype();
    let dtype = if from.is_float() { from } else { DType::I64 };
    let (mut out, computes) = view.output(OP, dtype)?;
    if computes {
        PRODUCTS.run(out.device(), |products| products(view, &mut out))?;
    }
    Ok(out)
}

const PRODUCTS: Kernels<Products> = Kernels { cpu: products_on_cpu, cuda: products_on_gpu };

type Products = fn(&ReduceView, &mut Tensor) -> Result<()>;

fn products_on_gpu(view: &ReduceView, out: &mut Tensor) -> Result<()> {
    each(OP, view, MergeKind::Multiply, out, None)
}

fn products_on_cpu(view: &ReduceView, out: &mut Tensor) -> Result<()> {
    let (from, dtype, numel) = (view.input.dtype(), out.dtype(), out.numel());
    if dtype == DType::I64 {
        let view = view.in_any_order()?;
        let mut target = out.write::<i64>(OP)?;
        return for_integer!(OP, from, T => {
            let source = BlockReader::<T>::open(OP, &view.input, view.input.shape())?;
            fold_each::<T, i64>(&view, &source, &By(Product), &mut target[..numel])
        });
    }
    for_real!(OP, dtype, T => products::<T>(view, &mut out.write::<T>(OP)?[..numel]))
}

fn products<T: Real + Number>(view: &ReduceView, to: &mut [T]) -> Result<()>
where
    T::Wide: Stored<f64>,
{
    let with = (Times, Itself { neutral: 1.0 });
    let Some(rows) = rows_of(view) else {
        let round = |_: usize, [x]: [f64; 1]| T::from_f64(x);
        return fold_in::<T, f64, _, _, _, 1>(OP, view, with, &[], to, round);
    };
    let mut products = vec![0.0; rows.outputs()];
    fold_in::<T, f64, _, _, _, 1>(OP, &rows, with, &[], &mut products, |_, [x]| x)?;
    for (to, rows) in to.iter_mut().zip(products.chunks(view.n / rows.n)) {
        *to = T::from_f64(rows.iter().product());
    }
    Ok(())
}

/// Long outputs that have rows are products of the rows' products, so that rows may lie across memory.
fn rows_of(view: &ReduceView) -> Option<ReduceView> {
    const ROW: usize = 64;
    let width = view.input.shape().last().copied().filter(|&width| view.inner == 1 && width >= ROW)?;
    (view.n > BLOCK.max(width)).then(|| ReduceView {
        input: view.input.clone(),
        outer: view.outer * (view.n / width),
        n: width,
        inner: 1,
        shape: view.shape.clone(),
        reduced: view.reduced.clone(),
    })
}

/// Of each element the product of the others along `dim`: what lies before it times what lies behind it, so that zeros do no
/// harm. Multiplied in f64 and rounded once; floats, on a CPU.
///
/// # Errors
/// If the dtype is no floating-point one, or there is no such dimension.
pub fn prod_of_others(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    others(x, dim.resolve(x.rank().max(1), OTHERS)?)
}

const OTHERS: &str = "prod_of_others";
/// Columns that are worked on at a time, at least.
const NARROW: usize = 16;

fn others(x: &Tensor, dim: usize) -> Result<Tensor> {
    check::float(OTHERS, x)?;
    let x = x.contiguous()?;
    let mut out = Tensor::empty_for(OTHERS, x.shape(), x.dtype(), x.device())?;
    if out.device().is_meta() || out.numel() == 0 {
        return Ok(out);
    }
    let n = x.shape().get(dim).copied().unwrap_or(1);
    let inner = x.shape().iter().skip(dim + 1).product();
    for_real!(OTHERS, x.dtype(), T => others_of::<T>(&x, [n, inner], &mut out))?;
    Ok(out)
}

fn others_of<T: Real>(x: &Tensor, [n, inner]: [usize; 2], out: &mut Tensor) -> Result<()> {
    let (slab, numel) = (n * inner, out.numel());
    let source = BlockReader::<T>::open(OTHERS, x, x.shape())?;
    let mut target = out.write::<T>(OTHERS)?;
    let pool = x.device().pool()?;
    let width = (PIECE / n.max(1)).max(NARROW).next_multiple_of(NARROW);
    if width < inner {
        // A strip of columns at a time: what is before and behind its elements stays near, and threads share a slab.
        for (i, to) in target[..numel].chunks_mut(slab).enumerate() {
            let strips = inner.div_ceil(width);
            let mut strips: Vec<Vec<&mut [T]>> = (0..strips).map(|_| Vec::with_capacity(n)).collect();
            for row in to.chunks_mut(inner) {
                strips.iter_mut().zip(row.chunks_mut(width)).for_each(|(strip, part)| strip.push(part));
            }
            pool.for_each_chunk(&mut strips, 1, |strip, strips| {
                let (start, rows) = (i * slab + strip * width, &mut strips[0]);
                let columns = rows[0].len();
                with_room(n * columns, |room| others_at(&source, start, inner, [n, columns], room, rows));
            });
        }
        return Ok(());
    }
    let slabs = PIECE.div_ceil(slab);
    pool.for_each_chunk(&mut target[..numel], slabs * slab, |i, to| {
        with_room(slab, |room| {
            for (j, to) in to.chunks_mut(slab).enumerate() {
                let room = (&mut *room.0, &mut *room.1);
                others_at(&source, (i * slabs + j) * slab, inner, [n, inner], room, &mut [to]);
            }
        });
    });
    Ok(())
}

/// Room for elements and for what comes of them, and for the products before and behind each.
type Room<'a, W> = (&'a mut [W], &'a mut [f64]);

fn with_room<W: Scratch>(elements: usize, f: impl FnOnce(Room<'_, W>)) {
    with_scratch(2 * elements, |room| with_scratch(2 * elements, |products| f((room, products))));
}

/// Sets `to`, the rows of some columns or these as a whole. Rows of `x` begin `apart` elements from each other.
fn others_at<T: Real>(
    source: &BlockReader<'_, T>,
    start: usize,
    apart: usize,
    [n, inner]: [usize; 2],
    (room, products): Room<'_, T::Wide>,
    to: &mut [&mut [T]],
) {
    let ((x, both), (before, after)) = (room.split_at_mut(n * inner), products.split_at_mut(n * inner));
    let x = match apart == inner {
        true => source.wide(start, n * inner, x),
        false => {
            source.copy_rows(start, [n, inner], apart, x);
            x
        }
    };
    if let [to] = to
        && let Some(to) = T::as_wide_mut(to)
    {
        return dispatch(Others { x, inner, before, after, to });
    }
    dispatch(Others { x, inner, before, after, to: &mut *both });
    let each = both.len() / to.len();
    to.iter_mut().zip(both.chunks(each)).for_each(|(to, both)| T::narrow_all(both, to));
}

/// The products before and behind each element of columns, and of both.
struct Others<'a, W> {
    x: &'a [W],
    inner: usize,
    before: &'a mut [f64],
    after: &'a mut [f64],
    to: &'a mut [W],
}

impl<W: Float + Element> Kernel for Others<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Others { x, inner, before, after, to } = self;
        let n = x.len() / inner;
        if inner == 1 {
            let (mut ahead, mut behind) = (1.0, 1.0);
            for i in 0..n {
                (before[i], after[n - 1 - i]) = (ahead, behind);
                (ahead, behind) = (ahead * x[i].to_f64(), behind * x[n - 1 - i].to_f64());
            }
        } else {
            before[..inner].fill(1.0);
            after[(n - 1) * inner..].fill(1.0);
            for i in 1..n {
                let (known, next) = before.split_at_mut(i * inner);
                let known = known[(i - 1) * inner..].iter().zip(&x[(i - 1) * inner..]);
                next.iter_mut().zip(known).for_each(|(to, (p, x))| *to = p * x.to_f64());
                let row = (n - 1 - i) * inner;
                let (next, known) = after[row..].split_at_mut(inner);
                let known = known.iter().zip(&x[row + inner..]);
                next.iter_mut().zip(known).for_each(|(to, (p, x))| *to = p * x.to_f64());
            }
        }
        for i in 0..to.len().min(before.len()).min(after.len()) {
            to[i] = W::from_f64(before[i] * after[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::prod_of_others;
    use crate::testing::{FLOATS, assert_close, floats, make, tensors, tolerance, values};

    #[test]
    fn products_of_others_equal_plain_ones() {
        // Of the larger ones a strip of columns is a piece, and one column is longer than a piece.
        let near = |i: usize| 1.0 + floats(-0.02, 0.02)(i);
        let large = FLOATS.iter().flat_map(|&d| {
            [make(&[70, 300], d, &near), make(&[2, 5, 4100], d, &near), make(&[8200], d, &near)]
        });
        for x in tensors(&floats(-1.5, 1.5)).into_iter().chain(large) {
            for dim in 0..x.rank().max(1) {
                let n = x.shape().get(dim).copied().unwrap_or(1);
                let inner: usize = x.shape().iter().skip(dim + 1).product();
                let (all, got) = (values(&x), values(&prod_of_others(&x, dim).unwrap()));
                for (i, got) in got.into_iter().enumerate() {
                    let (place, first) = (i / inner % n, i - i / inner % n * inner);
                    let others = (0..n).filter(|&k| k != place).map(|k| all[first + k * inner]);
                    assert_close(got, others.product(), tolerance(x.dtype()));
                }
            }
        }
    }
}
