//! One tile of scores, a block of keys against a block of queries, forward and backward.
//!
//! Scores lie transposed, a row a key and a lane a query: then the softmax runs down the columns and needs no sums across
//! lanes, and both products that follow read the tile as it lies.

use super::product::{Left, ROWS, Right, Write, product};
use crate::simd::{Float, Isa, Kernel, Vector};

/// Queries a block has at most.
pub(super) const QUERIES: usize = 64;
/// Keys a block has at most.
pub(super) const KEYS: usize = 96;

/// The sizes of a tile. Widths and depths that rows are padded to are multiples of the longest vector.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Keys in this block.
    pub(super) keys: usize,
    /// Queries in this block, padded.
    pub(super) width: usize,
    /// Elements of a query and a key, and their rows' padded length.
    pub(super) depth: usize,
    pub(super) depth_row: usize,
    /// The same of a value.
    pub(super) value_depth: usize,
    pub(super) value_row: usize,
}

impl Sizes {
    /// Keys rounded up to what products need.
    fn key_rows(&self) -> usize {
        self.keys.next_multiple_of(ROWS)
    }
}

/// What is known of a block of keys: rows of keys and values, and what is added to the scores.
#[derive(Clone, Copy)]
pub(super) struct KeyBlock<'a, T> {
    pub(super) keys: &'a [T],
    pub(super) values: &'a [T],
    /// Of the scores' shape [keys, width]; negative infinity hides.
    pub(super) bias: Option<&'a [T]>,
}

/// Takes a block of keys into the softmax and the output of a block of queries.
pub(super) struct Forward<'a, T> {
    pub(super) sizes: Sizes,
    pub(super) block: KeyBlock<'a, T>,
    /// [depth, width], scaled.
    pub(super) queries: &'a [T],
    /// The tile: [key rows, width].
    pub(super) scores: &'a mut [T],
    /// Each query's largest score so far, and the sum of the exponentials below it.
    pub(super) max: &'a mut [T],
    pub(super) sum: &'a mut [T],
    /// [width, value_row].
    pub(super) out: &'a mut [T],
}

impl<T: Float> Kernel for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Sizes { keys, width, depth, depth_row, value_row, .. } = self.sizes;
        let rows = self.sizes.key_rows();
        product::<T::Vec<S>>(
            Left::Rows(self.block.keys, depth_row),
            Right(self.queries, width),
            (self.scores, width),
            [rows, width, depth],
            Write::Replace,
        );
        let mut shrink = [T::ONE; QUERIES];
        for lane in (0..width).step_by(T::Vec::<S>::LANES) {
            let bias = self.block.bias.map(|b| &b[lane..]);
            let (max, sum) = (&mut self.max[lane..], &mut self.sum[lane..]);
            absorb::<T::Vec<S>>(&mut self.scores[lane..], width, keys, bias, max, sum, &mut shrink[lane..]);
        }
        for (row, &shrink) in self.out.chunks_exact_mut(value_row).zip(&shrink[..width]) {
            if shrink != T::ONE {
                let shrink = T::Vec::<S>::splat(shrink);
                crate::rows::lanes::update(row, [], |x: T::Vec<S>, []| x * shrink);
            }
        }
        product::<T::Vec<S>>(
            Left::Columns(self.scores, width),
            Right(self.block.values, value_row),
            (self.out, value_row),
            [width, value_row, keys],
            Write::Add,
        );
    }
}

/// One vector of queries down a tile: scores become exponentials below the new largest score.
#[inline(always)]
fn absorb<V: Vector>(
    scores: &mut [V::Elem],
    width: usize,
    keys: usize,
    bias: Option<&[V::Elem]>,
    max: &mut [V::Elem],
    sum: &mut [V::Elem],
    shrink: &mut [V::Elem],
) {
    let old = V::load(max);
    let mut new = old;
    if let Some(bias) = bias {
        for row in 0..keys {
            let score = V::load(&scores[row * width..]) + V::load(&bias[row * width..]);
            score.store(&mut scores[row * width..]);
        }
    }
    for row in 0..keys {
        new = V::load(&scores[row * width..]).max(new);
    }
    let base = finite_base(new);
    let mut terms = V::zero();
    for row in 0..keys {
        let term = (V::load(&scores[row * width..]) - base).exp();
        term.store(&mut scores[row * width..]);
        terms = terms + term;
    }
    let factor = (old - base).exp();
    factor.store(shrink);
    V::load(sum).mul_add(factor, terms).store(sum);
    new.store(max);
}

/// What scores are taken relative to: their largest, or 0 where all are hidden, which keeps NaN out.
#[inline(always)]
pub(super) fn finite_base<V: Vector>(max: V) -> V {
    V::select(max.eq(V::splat(-V::Elem::INFINITY)), V::zero(), max)
}

/// Which gradients a tile adds to.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    pub(super) query: bool,
    pub(super) key: bool,
    pub(super) value: bool,
}

/// A block of queries in the backward pass. Padded queries have `inverse` 0, which keeps them out of everything.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock<'a, T> {
    /// Scaled queries as rows [width, depth_row] and as columns [depth, width].
    pub(super) rows: &'a [T],
    pub(super) columns: &'a [T],
    /// The output's gradient, the same way.
    pub(super) dy_rows: &'a [T],
    pub(super) dy_columns: &'a [T],
    /// What the scores are taken relative to, and the inverse of the sum of the exponentials.
    pub(super) base: &'a [T],
    pub(super) inverse: &'a [T],
    /// The inner product of output and gradient.
    pub(super) delta: &'a [T],
}

/// Adds a tile's share to the gradients.
pub(super) struct BackwardOf<'a, T> {
    pub(super) sizes: Sizes,
    pub(super) needs: Needs,
    pub(super) block: KeyBlock<'a, T>,
    pub(super) queries: QueryBlock<'a, T>,
    /// Two tiles: probabilities, and the scores' gradient.
    pub(super) scores: &'a mut [T],
    pub(super) slopes: &'a mut [T],
    /// [width, depth_row], [key rows, depth_row] and [key rows, value_row].
    pub(super) dq: &'a mut [T],
    pub(super) dk: &'a mut [T],
    pub(super) dv: &'a mut [T],
}

impl<T: Float> Kernel for BackwardOf<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let Sizes { keys, width, depth, depth_row, value_depth, value_row } = self.sizes;
        let (rows, q) = (self.sizes.key_rows(), self.queries);
        product::<T::Vec<S>>(
            Left::Rows(self.block.keys, depth_row),
            Right(q.columns, width),
            (self.scores, width),
            [rows, width, depth],
            Write::Replace,
        );
        product::<T::Vec<S>>(
            Left::Rows(self.block.values, value_row),
            Right(q.dy_columns, width),
            (self.slopes, width),
            [rows, width, value_depth],
            Write::Replace,
        );
        self.differentiate::<T::Vec<S>>();
        if self.needs.value {
            product::<T::Vec<S>>(
                Left::Rows(self.scores, width),
                Right(q.dy_rows, value_row),
                (self.dv, value_row),
                [rows, value_row, width],
                Write::Add,
            );
        }
        if self.needs.key {
            product::<T::Vec<S>>(
                Left::Rows(self.slopes, width),
                Right(q.rows, depth_row),
                (self.dk, depth_row),
                [rows, depth_row, width],
                Write::Add,
            );
        }
        if self.needs.query {
            product::<T::Vec<S>>(
                Left::Columns(self.slopes, width),
                Right(self.block.keys, depth_row),
                (self.dq, depth_row),
                [width, depth_row, keys],
                Write::Add,
            );
        }
    }
}

impl<T: Float> BackwardOf<'_, T> {
    /// Scores become probabilities, and the probabilities' gradient the scores'.
    #[inline(always)]
    fn differentiate<V: Vector<Elem = T>>(&mut self) {
        let (width, keys, rows) = (self.sizes.width, self.sizes.keys, self.sizes.key_rows());
        let q = self.queries;
        for row in 0..keys {
            for at in (0..width).step_by(V::LANES) {
                let place = row * width + at;
                let score = V::load(&self.scores[place..]);
                let score = self.block.bias.map_or(score, |bias| score + V::load(&bias[place..]));
                let p = (score - V::load(&q.base[at..])).exp() * V::load(&q.inverse[at..]);
                let slope = p * (V::load(&self.slopes[place..]) - V::load(&q.delta[at..]));
                p.store(&mut self.scores[place..]);
                slope.store(&mut self.slopes[place..]);
            }
        }
        self.scores[keys * width..rows * width].fill(T::ZERO);
        self.slopes[keys * width..rows * width].fill(T::ZERO);
    }
}

/// The inner products of the rows of two matrices.
pub(super) struct RowProducts<'a, T> {
    pub(super) a: &'a [T],
    pub(super) b: &'a [T],
    pub(super) row: usize,
    pub(super) out: &'a mut [T],
}

impl<T: Float> Kernel for RowProducts<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let rows = self.a.chunks_exact(self.row).zip(self.b.chunks_exact(self.row));
        for ((a, b), out) in rows.zip(self.out) {
            [*out] = crate::rows::lanes::sums([a, b], [T::ZERO; 2], |[a, b]: [T::Vec<S>; 2]| [a * b]);
        }
    }
}
