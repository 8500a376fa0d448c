//! One tile of scores, a block of keys against a block of queries, forward and backward.
//!
//! Scores lie transposed, a row a key and a lane a query: then the softmax runs down the columns and needs no sums across
//! lanes, and both products that follow read the tile as it lies.

use super::product::{Left, ROWS, Right, Write, product};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// Queries a block has at most.
pub(super) const QUERIES: usize = 64;
/// Keys a block has at most in the forward pass.
pub(super) const KEYS: usize = 96;
/// Keys a block has at most in the backward pass, where two tiles share the first-level cache with four matrices.
pub(super) const KEYS_BACKWARD: usize = 48;

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
    /// Of the same shape: what probabilities are multiplied with, 0 where one is left out.
    pub(super) keep: Option<&'a [T]>,
}

/// Takes a block of keys into the softmax and the output of a block of queries.
pub(super) struct Forward<'a, T> {
    pub(super) sizes: Sizes,
    pub(super) block: KeyBlock<'a, T>,
    /// [depth_row, width], scaled.
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
        if let Some(keep) = self.block.keep {
            let scores = &mut self.scores[..keys * width];
            crate::rows::lanes::update(scores, [keep], |score: T::Vec<S>, [keep]| score * keep);
        }
        for (row, &shrink) in self.out.chunks_exact_mut(value_row.max(1)).zip(&shrink[..width]) {
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
    if let Some(bias) = bias {
        for row in 0..keys {
            let score = V::load(&scores[row * width..]) + V::load(&bias[row * width..]);
            score.store(&mut scores[row * width..]);
        }
    }
    // Four chains, in plain loops (see `lanes`), for a comparison takes several cycles.
    let mut largest = [old; 4];
    let mut row = 0;
    while row < keys {
        #[allow(clippy::needless_range_loop)]
        for i in 0..4 {
            largest[i] = V::load(&scores[(row + i).min(keys - 1) * width..]).max(largest[i]);
        }
        row += 4;
    }
    let [a, b, c, d] = largest;
    let new = a.max(b).max(c.max(d));
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
    /// Scaled queries as rows [width, depth_row] and as columns [depth_row, width].
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
                let score = match self.block.bias {
                    Some(bias) => score + V::load(&bias[place..]),
                    None => score,
                };
                let p = (score - V::load(&q.base[at..])).exp() * V::load(&q.inverse[at..]);
                let keep = match self.block.keep {
                    Some(keep) => V::load(&keep[place..]),
                    None => V::splat(T::ONE),
                };
                let slope = p * (V::load(&self.slopes[place..]) * keep - V::load(&q.delta[at..]));
                (p * keep).store(&mut self.scores[place..]);
                slope.store(&mut self.slopes[place..]);
            }
        }
        self.scores[keys * width..rows * width].fill(T::ZERO);
        self.slopes[keys * width..rows * width].fill(T::ZERO);
    }
}

/// Rows as columns: `to[d * width + q] = rows[q * row + d]`. Both lengths are multiples of the longest vector.
pub(super) struct Transpose<'a, T> {
    pub(super) rows: &'a [T],
    pub(super) row: usize,
    pub(super) to: &'a mut [T],
    pub(super) width: usize,
}

impl<T: Float> Kernel for Transpose<'_, T> {
    type Output = ();

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // vectors stay out of closures; see `lanes`
    fn run<S: Isa>(self) {
        let lanes = T::Vec::<S>::LANES;
        for q in (0..self.width).step_by(lanes) {
            for d in (0..self.row).step_by(lanes) {
                let mut square = [T::Vec::<S>::zero(); LANES_MAX];
                for i in 0..lanes {
                    square[i] = T::Vec::<S>::load(&self.rows[(q + i) * self.row + d..]);
                }
                // Each round shuffles rows i and i + half together; after log2(lanes) rounds columns are rows.
                let mut round = 1;
                while round < lanes {
                    let old = square;
                    for i in 0..lanes / 2 {
                        (square[2 * i], square[2 * i + 1]) = old[i].zip(old[i + lanes / 2]);
                    }
                    round *= 2;
                }
                for i in 0..lanes {
                    square[i].store(&mut self.to[(d + i) * self.width + q..]);
                }
            }
        }
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
        let row = self.row.max(1);
        let rows = self.a.chunks_exact(row).zip(self.b.chunks_exact(row));
        for ((a, b), out) in rows.zip(self.out) {
            [*out] = crate::rows::lanes::sums([a, b], [T::ZERO; 2], |[a, b]: [T::Vec<S>; 2]| [a * b]);
        }
    }
}
