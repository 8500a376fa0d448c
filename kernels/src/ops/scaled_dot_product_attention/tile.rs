//! One tile of scores, a block of keys against a block of queries: its products, and its softmax forward and backward.
//!
//! ```text
//!               queries q (a lane each)               scores are stored transposed, [keys, queries]:
//!             +--------------------------+              the softmax of a query runs down a column, so a vector of queries needs no
//!    keys k   |  score[k * width + q]    |              sums across lanes
//!             +--------------------------+              `sum_keys` reads the tile as A', `sum_queries` as A, both without packing
//!
//!               keys k (a lane each)                  few queries, as in decoding, would leave most lanes empty: their scores
//!  queries q  +--------------------------+              are stored as rows, [queries, keys] (`by_rows`)
//!             |  score[q * stride + k]   |
//!             +--------------------------+
//! ```
//!
//! `forward.rs` and `backward.rs` call these; the products are [`gemm_small`] and [`gemm_few`].

use super::Problem;
use super::operand::{Rows, padded, padded_queries};
use crate::gemm::{MatMut, MatRef, gemm_few, gemm_small, tile_shape};
use crate::rows::lanes;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch};

/// Queries a block has at most.
pub(super) const QUERIES: usize = 64;
/// Keys a block has at most in the forward pass.
pub(super) const KEYS: usize = 128;
/// Keys a block has at most in the backward pass, where two tiles share the caches with eight matrices.
pub(super) const KEYS_BACKWARD: usize = 64;

/// The most queries whose scores lie as rows, on any CPU.
const FEW_QUERIES_MAX: usize = LANES_MAX / 2;

/// The most queries whose scores lie as rows on this CPU. More of them are faster in lanes, though not all of these are used.
pub(super) fn few_queries<T: Float>() -> usize {
    (tile_shape::<T>().lanes / 2).max(4)
}

/// The position and the size of a tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) head: usize,
    /// The first query, how many there are, and that number padded.
    pub(super) query: usize,
    pub(super) queries: usize,
    pub(super) width: usize,
    /// The first key, and how many there are.
    pub(super) key: usize,
    pub(super) keys: usize,
    /// Whether a query sees only the keys up to its own number.
    pub(super) causal: bool,
    /// Whether scores lie as rows, [queries, keys], each padded to whole vectors: of at most [`few_queries`], without causal mask and dropout.
    pub(super) by_rows: bool,
}

impl Tile {
    /// From a query's score to the next query's, and from a key's to the next key's.
    pub(super) fn strides<T: Float>(&self) -> [usize; 2] {
        if self.by_rows { [padded::<T>(self.keys), 1] } else { [1, self.width] }
    }

    /// How many of the keys query number `q` of the block sees.
    fn seen(&self, q: usize) -> usize {
        if self.causal { (self.query + q + 1).saturating_sub(self.key).min(self.keys) } else { self.keys }
    }

    /// The first query of the block that sees its key number `k`.
    fn first_seeing(&self, k: usize) -> usize {
        if self.causal { (self.key + k).saturating_sub(self.query).min(self.width) } else { 0 }
    }

    /// How many positions key `k` of the tile lies after query `q`; hidden if that is above 0.
    fn ahead(&self, k: usize, q: usize) -> f64 {
        (self.key + k) as f64 - (self.query + q) as f64
    }

    /// Sets `to` to the inner products of keys [keys, depth] and queries [depth, width]; to 0 where a micro-kernel's whole tile is hidden.
    pub(super) fn products<T: Float>(
        &self,
        keys: Rows<'_, T>,
        (queries, depth): (&[T], usize),
        to: &mut [T],
    ) {
        if self.by_rows {
            let queries = MatRef::new(queries, self.queries, depth, 1, self.width);
            let [row, _] = self.strides::<T>();
            let to = MatMut::new(to, self.queries, self.keys, row, 1);
            return gemm_few(queries, keys.matrix(self.keys, depth).transposed(), to);
        }
        gemm_small(
            keys.matrix(self.keys, depth),
            MatRef::new(queries, depth, self.width, self.width, 1),
            MatMut::new(to, self.keys, self.width, self.width, 1),
            false,
            |keys, queries| if keys.start < self.seen(queries.end - 1) { 0..depth } else { 0..0 },
        );
    }

    /// `to[q] += Σ_k tile[k, q] from[k]` for rows of keys and queries.
    pub(super) fn sum_keys<T: Float>(&self, tile: &[T], from: Rows<'_, T>, to: &mut [T]) {
        let [query, key] = self.strides::<T>();
        gemm_small(
            MatRef::new(tile, self.queries, self.keys, query, key),
            from.matrix(self.keys, from.width),
            MatMut::new(to, self.queries, from.width, from.width, 1),
            true,
            |queries, _| 0..self.seen(queries.end - 1),
        );
    }

    /// `to[k] += Σ_q tile[k, q] from[q]` for rows of keys and queries.
    pub(super) fn sum_queries<T: Float>(&self, tile: &[T], from: Rows<'_, T>, to: &mut [T]) {
        gemm_small(
            MatRef::new(tile, self.keys, self.queries, self.width, 1),
            from.matrix(self.queries, from.width),
            MatMut::new(to, self.keys, from.width, from.width, 1),
            true,
            |keys, _| self.first_seeing(keys.start).min(self.queries)..self.queries,
        );
    }
}

/// Mask and dropout of a tile, which lie as its scores do.
#[derive(Clone, Copy)]
pub(super) struct ScoreChanges<'a, T> {
    /// The mask, which is added to the scores; negative infinity hides.
    pub(super) bias: Option<&'a [T]>,
    /// What probabilities are multiplied with, 0 where one is left out.
    pub(super) keep: Option<&'a [T]>,
}

/// Online softmax, forward: scores become exponentials relative to each query's largest score so far.
pub(super) struct Exponentials<'a, T> {
    pub(super) tile: Tile,
    pub(super) changes: ScoreChanges<'a, T>,
    /// The tile.
    pub(super) scores: &'a mut [T],
    /// Each query's largest score so far, and the sum of the exponentials relative to it.
    pub(super) max: &'a mut [T],
    pub(super) sum: &'a mut [T],
    /// The factor that makes earlier sums of exponentials relative to the new largest score.
    pub(super) shrink: &'a mut [T],
}

impl<T: Float> Kernel for &mut Exponentials<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        if self.tile.by_rows {
            for q in 0..self.tile.queries {
                self.row::<T::Vec<S>>(q);
            }
            return;
        }
        for lane in (0..self.tile.width).step_by(T::Vec::<S>::LANES) {
            self.lanes::<T::Vec<S>>(lane);
        }
        if let Some(keep) = self.changes.keep {
            let scores = &mut self.scores[..keep.len()];
            lanes::update(scores, [keep], |score: T::Vec<S>, [keep]| score * keep);
        }
    }
}

impl<T: Float> Exponentials<'_, T> {
    pub(super) fn compute(mut self) {
        dispatch(&mut self);
        if self.tile.by_rows {
            self.sum_rows();
        }
    }

    /// Adds each row's exponentials to the sums, as a product with ones: in the order of the keys, as a lane of queries does.
    fn sum_rows(&mut self) {
        let (tile, lanes) = (self.tile, tile_shape::<T>().lanes);
        let ([row, _], mut terms) = (tile.strides::<T>(), [T::ZERO; FEW_QUERIES_MAX * LANES_MAX]);
        gemm_small(
            MatRef::new(self.scores, tile.queries, tile.keys, row, 1),
            MatRef::new(&[T::ONE; LANES_MAX], tile.keys, lanes, 0, 1),
            MatMut::new(&mut terms, tile.queries, lanes, lanes, 1),
            false,
            |_, _| 0..tile.keys,
        );
        for (q, terms) in terms.chunks_exact(lanes).take(tile.queries).enumerate() {
            self.sum[q] = self.sum[q].mul_add(self.shrink[q], terms[0]);
        }
    }

    /// The row of one query.
    #[inline(always)]
    fn row<V: Vector<Elem = T>>(&mut self, q: usize) {
        let (keys, [row, _]) = (self.tile.keys, self.tile.strides::<T>());
        let scores = &mut self.scores[q * row..][..row];
        scores[keys..].fill(-T::INFINITY);
        let old = V::splat(self.max[q]);
        let mut largest = old;
        for at in (0..row).step_by(V::LANES) {
            let mut score = V::load(&scores[at..]);
            if let Some(bias) = self.changes.bias {
                score = score + V::load(&bias[q * row + at..]);
                score.store(&mut scores[at..]);
            }
            largest = score.max(largest);
        }
        let new = largest.reduce_max();
        let base = V::splat(if new == -T::INFINITY { T::ZERO } else { new });
        for at in (0..row).step_by(V::LANES) {
            exp_below(V::load(&scores[at..]), base).store(&mut scores[at..]);
        }
        self.max[q] = new;
        self.shrink[q] = exp_below(old, base).reduce_max();
    }

    /// One vector of queries down the tile.
    #[inline(always)]
    fn lanes<V: Vector<Elem = T>>(&mut self, lane: usize) {
        let (tile, width) = (self.tile, self.tile.width);
        let [seen_by_all, seen] = [tile.seen(lane), tile.seen(lane + V::LANES - 1)];
        let scores = &mut self.scores[lane..];
        if let Some(bias) = self.changes.bias {
            for row in 0..seen {
                let score = V::load(&scores[row * width..]) + V::load(&bias[row * width + lane..]);
                score.store(&mut scores[row * width..]);
            }
        }
        for row in seen_by_all..seen {
            let score = mask_causal(V::load(&scores[row * width..]), -T::INFINITY, tile.ahead(row, lane));
            score.store(&mut scores[row * width..]);
        }
        let old = V::load(&self.max[lane..]);
        // Four chains hide the latency of comparisons; plain loops, see `rows/lanes.rs`.
        let mut largest = [old; 4];
        for first in (0..seen).step_by(4) {
            #[allow(clippy::needless_range_loop)]
            for i in 0..4 {
                largest[i] = V::load(&scores[(first + i).min(seen - 1) * width..]).max(largest[i]);
            }
        }
        let [a, b, c, d] = largest;
        let new = a.max(b).max(c.max(d));
        // If all keys are hidden, the base is 0: infinity minus infinity would be NaN.
        let base = V::select(new.eq(V::splat(-T::INFINITY)), V::zero(), new);
        let mut terms = V::zero();
        for row in 0..seen {
            let term = exp_below(V::load(&scores[row * width..]), base);
            term.store(&mut scores[row * width..]);
            terms = terms + term;
        }
        for row in seen..tile.keys {
            V::zero().store(&mut scores[row * width..]);
        }
        let factor = exp_below(old, base);
        factor.store(&mut self.shrink[lane..]);
        V::load(&self.sum[lane..]).mul_add(factor, terms).store(&mut self.sum[lane..]);
        new.store(&mut self.max[lane..]);
    }
}

/// `e^(x - base)`, where the largest result is about 1. Exponents below -87, hidden scores among them, give 0, which changes no sum in any type:
/// results that underflow would take a processor a hundred times as long.
#[inline(always)]
fn exp_below<V: Vector>(x: V, base: V) -> V {
    let (x, low) = (x - base, V::splat(V::Elem::from_f64(-87.0)));
    V::select(x.lt(low), V::zero(), low.max(x).exp())
}

/// `x` with `hidden` in the lanes whose queries do not see a key: lane i if i < `ahead`.
#[inline(always)]
fn mask_causal<V: Vector>(x: V, hidden: V::Elem, ahead: f64) -> V {
    let mut numbers = [V::Elem::ZERO; LANES_MAX];
    #[allow(clippy::needless_range_loop)] // see `lanes`
    for i in 0..V::LANES {
        numbers[i] = V::Elem::from_f64(i as f64);
    }
    V::select(V::load(&numbers).lt(V::splat(V::Elem::from_f64(ahead))), V::splat(hidden), x)
}

/// What the softmax's derivative needs of a block of queries. Padded queries have `inverse` 0, so that their probabilities are 0.
#[derive(Clone, Copy)]
pub(super) struct Stats<'a, T> {
    /// What the scores are taken relative to, and the inverse of the sum of the exponentials.
    pub(super) base: &'a [T],
    pub(super) inverse: &'a [T],
    /// The inner product of output and gradient.
    pub(super) delta: &'a [T],
}

/// Softmax, backward: scores become probabilities, and the probabilities' gradient becomes the scores' (`slopes`).
pub(super) struct Differentiate<'a, T> {
    pub(super) tile: Tile,
    pub(super) changes: ScoreChanges<'a, T>,
    pub(super) stats: Stats<'a, T>,
    pub(super) scores: &'a mut [T],
    pub(super) slopes: &'a mut [T],
}

impl<T: Float> Kernel for Differentiate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        for lane in (0..self.tile.width).step_by(T::Vec::<S>::LANES) {
            self.lanes::<T::Vec<S>>(lane);
        }
    }
}

impl<T: Float> Differentiate<'_, T> {
    /// One vector of queries down the tile.
    #[inline(always)]
    fn lanes<V: Vector<Elem = T>>(&mut self, lane: usize) {
        let (tile, width) = (self.tile, self.tile.width);
        let [seen_by_all, seen] = [tile.seen(lane), tile.seen(lane + V::LANES - 1)];
        let [base, inverse, delta] =
            [self.stats.base, self.stats.inverse, self.stats.delta].map(|x| &x[lane..]);
        let (base, inverse, delta) = (V::load(base), V::load(inverse), V::load(delta));
        for row in 0..seen {
            let place = row * width + lane;
            let score = match self.changes.bias {
                Some(bias) => V::load(&self.scores[place..]) + V::load(&bias[place..]),
                None => V::load(&self.scores[place..]),
            };
            let mut p = exp_below(score, base) * inverse;
            if row >= seen_by_all {
                p = mask_causal(p, T::ZERO, tile.ahead(row, lane));
            }
            let keep = match self.changes.keep {
                Some(keep) => V::load(&keep[place..]),
                None => V::splat(T::ONE),
            };
            let slope = p * (V::load(&self.slopes[place..]) * keep - delta);
            (p * keep).store(&mut self.scores[place..]);
            slope.store(&mut self.slopes[place..]);
        }
        for place in (seen..tile.keys).map(|row| row * width + lane) {
            V::zero().store(&mut self.scores[place..]);
            V::zero().store(&mut self.slopes[place..]);
        }
    }
}

/// Transposes `width` rows and scales them: `to[d * width + q] = factor * rows[q][d]`. Both lengths are multiples of a vector's.
pub(super) struct Transpose<'a, T> {
    pub(super) rows: Rows<'a, T>,
    pub(super) factor: T,
    pub(super) to: &'a mut [T],
    pub(super) width: usize,
}

impl<T: Float> Kernel for Transpose<'_, T> {
    type Output = ();

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // vectors stay out of closures; see `lanes`
    fn run<S: Isa>(self) {
        let (lanes, factor) = (T::Vec::<S>::LANES, T::Vec::<S>::splat(self.factor));
        for q in (0..self.width).step_by(lanes) {
            for d in (0..self.rows.width).step_by(lanes) {
                let mut square = [T::Vec::<S>::zero(); LANES_MAX];
                for i in 0..lanes {
                    square[i] =
                        T::Vec::<S>::load(&self.rows.elements[(q + i) * self.rows.stride + d..]) * factor;
                }
                T::Vec::<S>::transpose(&mut square);
                for i in 0..lanes {
                    square[i].store(&mut self.to[(d + i) * self.width + q..]);
                }
            }
        }
    }
}

/// Multiplies each row with its factor.
pub(super) fn scale_rows<T: Float>(rows: &mut [T], row: usize, factors: &[T]) {
    struct Scale<'a, T>(&'a mut [T], usize, &'a [T]);

    impl<T: Float> Kernel for Scale<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run<S: Isa>(self) {
            for (row, &factor) in self.0.chunks_exact_mut(self.1.max(1)).zip(self.2) {
                let factor = T::Vec::<S>::splat(factor);
                lanes::update(row, [], |x: T::Vec<S>, []| x * factor);
            }
        }
    }
    dispatch(Scale(rows, row, factors));
}

/// The inner products of rows i of two matrices, for each i below the length of `out`.
pub(super) struct RowProducts<'a, T> {
    pub(super) a: Rows<'a, T>,
    pub(super) b: Rows<'a, T>,
    pub(super) out: &'a mut [T],
}

impl<T: Float> Kernel for RowProducts<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (i, out) in self.out.iter_mut().enumerate() {
            let [a, b] = [self.a, self.b].map(|x| &x.elements[i * x.stride..][..x.width]);
            [*out] = lanes::sums([a, b], [T::ZERO; 2], |[a, b]: [T::Vec<S>; 2]| [a * b]);
        }
    }
}

impl Problem {
    /// The padded lengths of rows of queries and keys, and of values.
    pub(super) fn rows<T: Float>(&self) -> [usize; 2] {
        [self.depth, self.value_depth].map(padded::<T>)
    }

    /// The tiles of a block of `queries` queries from number `query` on, of the keys from `first` on, at most `keys` each.
    pub(super) fn tiles<T: Float>(
        &self,
        head: usize,
        [query, queries]: [usize; 2],
        first: usize,
        keys: usize,
    ) -> impl Iterator<Item = Tile> {
        let (width, causal) = (padded_queries::<T>(queries), self.causal);
        let end = self.keys_before(query + queries);
        (first..end).step_by(keys).map(move |key| Tile {
            head,
            query,
            queries,
            width,
            key,
            keys: keys.min(end - key),
            causal,
            by_rows: false,
        })
    }
}
