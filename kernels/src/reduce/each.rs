//! Reductions whose order may be any: sums, products and extrema of integers ([`Merge`], exact), products of floats, positions of extrema. The
//! compiler vectorizes the loops; long outputs are reduced in parts by several threads. [`fold_each`] is the entry.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_tensor::{Element, Result};

use super::ReduceView;
use crate::block_reader::{BLOCK, BlockReader};
use crate::pointwise::PIECE;
use crate::real::Real;
use crate::simd::{Isa, Kernel, dispatch};

/// Elements of a part of an output, at least.
const PART: usize = 16 * BLOCK;
/// Columns of a task at least.
const COLUMNS: usize = 64;

/// How elements `E` are merged into a result `A`.
pub(crate) trait Merge<E, A>: Copy + Send + Sync {
    /// The neutral element.
    const START: A;
    /// Adds an element. To be marked `#[inline(always)]`.
    fn add(a: A, x: E) -> A;
    /// Merges two results. To be marked `#[inline(always)]`.
    fn join(a: A, b: A) -> A;
}

/// The input's elements in row-major order, in the type that [`Each`] takes.
pub(crate) trait Blocks<E>: Sync {
    /// Whether every block is read in place.
    fn in_place(&self) -> bool;
    /// Elements `start .. start + len`: in place, or in `room`.
    fn block<'a>(&'a self, start: usize, len: usize, room: &'a mut [E]) -> &'a [E];
}

impl<E: Element> Blocks<E> for BlockReader<'_, E> {
    fn in_place(&self) -> bool {
        self.is_contiguous()
    }

    fn block<'a>(&'a self, start: usize, len: usize, room: &'a mut [E]) -> &'a [E] {
        BlockReader::block(self, start, len, room)
    }
}

/// The elements of a floating-point tensor, widened.
pub(crate) struct Wide<'a, T>(pub(crate) BlockReader<'a, T>);

impl<T: Real> Blocks<T::Wide> for Wide<'_, T> {
    fn in_place(&self) -> bool {
        self.0.is_wide()
    }

    fn block<'a>(&'a self, start: usize, len: usize, room: &'a mut [T::Wide]) -> &'a [T::Wide] {
        self.0.wide(start, len, room)
    }
}

/// What a reduction does with blocks. [`fold_each`] calls it as a trait object, so that it is compiled once for each pair of types
/// and not for each reduction.
pub(crate) trait Each<E, A>: Sync {
    /// The neutral element.
    fn start(&self) -> A;
    /// Rows of `n` elements, one for each of `to`.
    fn rows(&self, x: &[E], n: usize, to: &mut [A]);
    /// As many columns as `to` has, of rows that begin `stride` elements apart.
    fn columns(&self, x: &[E], stride: usize, to: &mut [A]);
    /// Merges results with others of the same outputs.
    fn join(&self, to: &mut [A], others: &[A]);
}

/// [`Each`] by a [`Merge`].
pub(crate) struct By<M>(pub(crate) M);

impl<E: Element, A: Copy + Send + Sync, M: Merge<E, A>> Each<E, A> for By<M> {
    fn start(&self) -> A {
        M::START
    }

    fn rows(&self, x: &[E], n: usize, to: &mut [A]) {
        dispatch(Rows { x, n, to, merge: PhantomData::<M> });
    }

    fn columns(&self, x: &[E], stride: usize, to: &mut [A]) {
        dispatch(Columns { x, stride, to, merge: PhantomData::<M> });
    }

    fn join(&self, to: &mut [A], others: &[A]) {
        to.iter_mut().zip(others).for_each(|(to, &x)| *to = M::join(*to, x));
    }
}

struct Rows<'a, E, A, M> {
    x: &'a [E],
    n: usize,
    to: &'a mut [A],
    merge: PhantomData<M>,
}

impl<E: Copy, A: Copy, M: Merge<E, A>> Kernel for Rows<'_, E, A, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (i, to) in self.to.iter_mut().enumerate() {
            // The compiler splits this into chains.
            *to = self.x[i * self.n..][..self.n].iter().fold(*to, |so_far, &x| M::add(so_far, x));
        }
    }
}

struct Columns<'a, E, A, M> {
    x: &'a [E],
    stride: usize,
    to: &'a mut [A],
    merge: PhantomData<M>,
}

impl<E: Copy, A: Copy, M: Merge<E, A>> Kernel for Columns<'_, E, A, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (width, stride) = (self.to.len(), self.stride);
        let rows = (self.x.len() + stride - width) / stride;
        let mut row = 0;
        while row + 4 <= rows {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| &self.x[(row + i) * stride..][..width]);
            for i in 0..width {
                self.to[i] = M::add(M::add(M::add(M::add(self.to[i], a[i]), b[i]), c[i]), d[i]);
            }
            row += 4;
        }
        for row in row..rows {
            let x = &self.x[row * stride..][..width];
            self.to.iter_mut().zip(x).for_each(|(to, &x)| *to = M::add(*to, x));
        }
    }
}

/// Reduces every output's elements. The order depends on the shape of `view`.
pub(crate) fn fold_each<E: Element, A: Copy + Send + Sync>(
    view: &ReduceView,
    source: &dyn Blocks<E>,
    by: &dyn Each<E, A>,
    out: &mut [A],
) -> Result<()> {
    let (n, outputs, device) = (view.n, out.len(), view.input.device());
    let pass = EachPass { view, source, by };
    // Elements of an output that a part has.
    let rows = PART.div_ceil(view.inner.min(BLOCK));
    let parts = if n < 2 * rows { 1 } else { n.div_ceil(rows) };
    let rows = if parts == 1 { n } else { rows };
    let least = if view.inner == 1 { 1 } else { COLUMNS.min(view.inner) };
    let width = PIECE.div_ceil(rows.max(1)).next_multiple_of(least);
    let range = |part: usize| part * rows..n.min((part + 1) * rows);
    let pool = device.pool()?;
    if parts == 1 {
        pool.for_each_chunk(out, width, |piece, out| pass.run(piece * width, 0..n, out));
        return Ok(());
    }
    let mut slots = vec![by.start(); parts * outputs];
    let _use = device.ledger()?.scratch_of(size_of_val(&slots[..]));
    let mut pieces: Vec<(usize, usize, &mut [A])> = Vec::new();
    for (part, slots) in slots.chunks_mut(outputs).enumerate() {
        pieces.extend(slots.chunks_mut(width).enumerate().map(|(i, slots)| (part, i * width, slots)));
    }
    pool.for_each_chunk(&mut pieces, 1, |_, pieces| {
        pieces.iter_mut().for_each(|(part, first, slots)| pass.run(*first, range(*part), slots));
    });
    drop(pieces);
    out.fill(by.start());
    slots.chunks(outputs).for_each(|slots| by.join(out, slots));
    Ok(())
}

/// A reduction of a view, with the reader of its elements.
struct EachPass<'a, E, A> {
    view: &'a ReduceView,
    source: &'a dyn Blocks<E>,
    by: &'a dyn Each<E, A>,
}

impl<E: Element, A: Copy> EachPass<'_, E, A> {
    /// Reduces the outputs from `first` on over `rows`, a range of what each is reduced over.
    fn run(&self, first: usize, rows: Range<usize>, out: &mut [A]) {
        let (n, inner) = (self.view.n, self.view.inner);
        let mut room = [E::zeroed(); BLOCK];
        out.fill(self.by.start());
        if inner == 1 && rows.len() <= BLOCK && rows.len() == n {
            let count = if self.source.in_place() { out.len() } else { (BLOCK / n.max(1)).max(1) };
            for (i, out) in out.chunks_mut(count.max(1)).enumerate() {
                let x = self.source.block((first + i * count) * n, out.len() * n, &mut room);
                self.by.rows(x, n, out);
            }
            return;
        }
        let mut output = first;
        while output < first + out.len() {
            let len = (inner - output % inner).min(first + out.len() - output).min(BLOCK);
            let start = output / inner * n * inner + output % inner;
            let to = &mut out[output - first..][..len];
            let at_once = match (inner, self.source.in_place()) {
                (1, _) => BLOCK,
                (_, true) => rows.len(),
                _ if len == inner => BLOCK / len,
                _ => 1,
            };
            for row in rows.clone().step_by(at_once.max(1)) {
                let count = at_once.min(rows.end - row);
                let x = self.source.block(start + row * inner, (count - 1) * inner + len, &mut room);
                match inner {
                    1 => self.by.rows(x, x.len(), to),
                    _ => self.by.columns(x, inner, to),
                }
            }
            output += len;
        }
    }
}

/// The sum of integers, wrapping.
#[derive(Clone, Copy)]
pub(crate) struct Sum;
/// The product of integers, wrapping.
#[derive(Clone, Copy)]
pub(crate) struct Product;
/// The largest integer.
#[derive(Clone, Copy)]
pub(crate) struct Most;
/// The smallest integer.
#[derive(Clone, Copy)]
pub(crate) struct Least;

macro_rules! merges {
    ($($merge:ident: $E:ty => $A:ty, $start:expr, |$a:ident, $b:ident| $join:expr;)*) => {$(
        impl Merge<$E, $A> for $merge {
            const START: $A = $start;
            #[inline(always)]
            fn add($a: $A, x: $E) -> $A {
                let $b = x as $A;
                $join
            }
            #[inline(always)]
            fn join($a: $A, $b: $A) -> $A {
                $join
            }
        }
    )*};
}

merges! {
    Sum: u8 => i64, 0, |a, b| a.wrapping_add(b);
    Sum: i32 => i64, 0, |a, b| a.wrapping_add(b);
    Sum: i64 => i64, 0, |a, b| a.wrapping_add(b);
    Product: u8 => i64, 1, |a, b| a.wrapping_mul(b);
    Product: i32 => i64, 1, |a, b| a.wrapping_mul(b);
    Product: i64 => i64, 1, |a, b| a.wrapping_mul(b);
    Most: u8 => u8, u8::MIN, |a, b| a.max(b);
    Most: i32 => i32, i32::MIN, |a, b| a.max(b);
    Most: i64 => i64, i64::MIN, |a, b| a.max(b);
    Least: u8 => u8, u8::MAX, |a, b| a.min(b);
    Least: i32 => i32, i32::MAX, |a, b| a.min(b);
    Least: i64 => i64, i64::MAX, |a, b| a.min(b);
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::{amax, amin, cast, prod, sum};
    use crate::testing::{assert_close, values};

    #[test]
    fn integers_are_exact_on_every_shape_and_stride_and_products_near() {
        let table: &[(&[usize], &[usize])] = &[
            (&[7], &[0]),
            (&[40_000], &[0]),
            (&[129, 33], &[1]),
            (&[129, 33], &[0]),
            (&[5, 2000], &[1]),
            (&[3000, 65], &[0]),
            (&[2, 3, 4, 9], &[1, 3]),
            (&[3, 70, 33], &[0, 1]),
            (&[9, 5, 16], &[0, 2]),
            (&[3, 0], &[1]),
            (&[0, 3], &[1]),
        ];
        for &(shape, dims) in table {
            let count = shape.iter().product::<usize>();
            let numbers: Vec<i64> = (0..count).map(|i| (i * i % 251) as i64 - 90).collect();
            for dtype in [DType::I64, DType::I32, DType::U8] {
                let x = cast(&Tensor::from_slice(&numbers, shape, Device::CPU).unwrap(), dtype).unwrap();
                let kept: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d)).collect();
                let order: Vec<usize> = kept.iter().chain(dims).copied().collect();
                let all = cast(&x.permute(&order).unwrap(), DType::I64).unwrap().to_vec::<i64>().unwrap();
                let outputs: usize = kept.iter().map(|&d| shape[d]).product();
                let n = all.len().checked_div(outputs).unwrap_or(0);
                let each = |f: &dyn Fn(&[i64]) -> i64| -> Vec<i64> {
                    (0..outputs).map(|i| f(&all[i * n..][..n])).collect()
                };
                let back: Vec<usize> = (0..shape.len()).rev().collect();
                let transposed = x.permute(&back).unwrap().copy().unwrap().permute(&back).unwrap();
                let wide = |x: Tensor| cast(&x, DType::I64).unwrap().to_vec::<i64>().unwrap();
                for x in [&x, &transposed] {
                    assert_eq!(wide(sum(x, dims, false).unwrap()), each(&|x| x.iter().sum()));
                    let product = each(&|x| x.iter().fold(1, |a, &b| a.wrapping_mul(b)));
                    assert_eq!(wide(prod(x, dims, true).unwrap()), product);
                    if n > 0 {
                        let top = each(&|x| x.iter().copied().max().unwrap());
                        assert_eq!(wide(amax(x, dims, false).unwrap()), top);
                        let low = each(&|x| x.iter().copied().min().unwrap());
                        assert_eq!(wide(amin(x, dims, false).unwrap()), low);
                    }
                }
            }
            for dtype in crate::testing::FLOATS {
                let x = crate::testing::make(shape, dtype, &|i| 1.0 + (i % 7) as f64 / 64.0 - 0.04);
                let kept: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d)).collect();
                let order: Vec<usize> = kept.iter().chain(dims).copied().collect();
                let all = values(&x.permute(&order).unwrap());
                let got = values(&prod(&x, dims, false).unwrap());
                let n = all.len().checked_div(got.len()).unwrap_or(0);
                for (i, &got) in got.iter().enumerate() {
                    let want: f64 = all[i * n..][..n].iter().product();
                    if want < 6e4 {
                        assert_close(got / want, 1.0, crate::testing::tolerance(dtype));
                    }
                }
                let back: Vec<usize> = (0..shape.len()).rev().collect();
                let transposed = x.permute(&back).unwrap().copy().unwrap().permute(&back).unwrap();
                assert_eq!(values(&prod(&transposed, dims, false).unwrap()), got);
            }
        }
    }
}
