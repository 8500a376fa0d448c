//! The inner loops over a window: gathering panels for products with many rows, and the sums themselves where there are
//! so few rows that gathering would cost more than it brings.

use super::window::Segment;
use crate::simd::{Float, Isa, Kernel, Vector};

/// Rows up to which sums are made straight from the window.
pub(super) const THIN_ROWS: usize = 4;

/// A segment's vectors: the last one may reach beyond it.
#[inline(always)]
fn padded<V: Vector>(segment: &Segment) -> usize {
    segment.len.next_multiple_of(V::LANES)
}

/// A vector of the window; zeros beyond its end.
#[inline(always)]
fn load<V: Vector>(window: &[V::Elem], at: usize) -> V {
    match window.get(at..at + V::LANES) {
        Some(whole) => V::load(whole),
        None => V::load_partial(window.get(at..).unwrap_or(&[]), V::Elem::ZERO),
    }
}

/// Writes a vector into a row, as much of it as the row has room for.
#[inline(always)]
fn store<V: Vector>(value: V, row: &mut [V::Elem], at: usize) {
    match row.get_mut(at..at + V::LANES) {
        Some(whole) => value.store(whole),
        None => value.store_partial(&mut row[at..]),
    }
}

/// Gathers a panel: row k holds what the k-th kernel element meets at each point. What lies beyond the segments is
/// unspecified.
pub(super) struct Gather<'a, V> {
    pub(super) window: &'a [V],
    pub(super) taps: &'a [usize],
    pub(super) segments: &'a [Segment],
    pub(super) panel: &'a mut [V],
    pub(super) row_len: usize,
}

impl<V: Float> Kernel for Gather<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        // Whole vectors: what is too much in one segment is overwritten by the next, and cut at the row's end. Row by row, so
        // that what is written comes near by itself.
        for (row, &tap) in self.panel.chunks_exact_mut(self.row_len).zip(self.taps) {
            for segment in self.segments {
                for i in (0..padded::<V::Vec<S>>(segment)).step_by(<V::Vec<S> as Vector>::LANES) {
                    store(load::<V::Vec<S>>(self.window, tap + segment.from + i), row, segment.at + i);
                }
            }
        }
    }
}

/// Sums of up to [`THIN_ROWS`] rows over a panel's points: row r of `sums` is the sum over k of `weights[k][r]` times what
/// the k-th kernel element meets, in the same chain as a gathered panel's product.
pub(super) struct Thin<'a, V> {
    pub(super) window: &'a [V],
    pub(super) taps: &'a [usize],
    pub(super) segments: &'a [Segment],
    pub(super) weights: &'a [V],
    pub(super) rows: usize,
    pub(super) sums: &'a mut [V],
    pub(super) row_len: usize,
}

impl<V: Float> Kernel for Thin<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        match self.rows {
            1 => self.run_rows::<V::Vec<S>, 1>(),
            2 => self.run_rows::<V::Vec<S>, 2>(),
            3 => self.run_rows::<V::Vec<S>, 3>(),
            rows => {
                assert!(rows == THIN_ROWS, "{rows} rows");
                self.run_rows::<V::Vec<S>, THIN_ROWS>();
            }
        }
    }
}

impl<V: Float> Thin<'_, V> {
    #[inline(always)]
    fn run_rows<X: Vector<Elem = V>, const R: usize>(self) {
        let weights = self.weights.as_chunks::<R>().0;
        for segment in self.segments {
            for i in (0..padded::<X>(segment)).step_by(2 * X::LANES) {
                let mut sums = [[X::zero(); 2]; R];
                for (weights, &tap) in weights.iter().zip(self.taps) {
                    let at = tap + segment.from + i;
                    let x = [load::<X>(self.window, at), load::<X>(self.window, at + X::LANES)];
                    for (sums, &weight) in sums.iter_mut().zip(weights) {
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum = X::splat(weight).mul_add(x, *sum);
                        }
                    }
                }
                for (row, sums) in self.sums.chunks_exact_mut(self.row_len).zip(sums) {
                    store(sums[0], row, segment.at + i);
                    if segment.at + i + X::LANES < row.len() {
                        store(sums[1], row, segment.at + i + X::LANES);
                    }
                }
            }
        }
    }
}

/// Sums of products over points: `sums[k][r]` grows by the sum over all points of what the k-th kernel element meets
/// times row r of `rows`, of which there are up to [`THIN_ROWS`].
pub(super) struct Dots<'a, V> {
    pub(super) window: &'a [V],
    pub(super) taps: &'a [usize],
    pub(super) segments: &'a [Segment],
    pub(super) rows: &'a [V],
    pub(super) row_len: usize,
    pub(super) sums: &'a mut [V],
}

impl<V: Float> Kernel for Dots<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let count = self.rows.len() / self.row_len;
        for (sums, &tap) in self.sums.chunks_exact_mut(count).zip(self.taps) {
            let mut dots = [<V::Vec<S> as Vector>::zero(); THIN_ROWS];
            for segment in self.segments {
                for i in (0..segment.len).step_by(<V::Vec<S> as Vector>::LANES) {
                    let end = segment.from + segment.len + tap;
                    let x = V::Vec::<S>::load_partial(&self.window[tap + segment.from + i..end], V::ZERO);
                    for (dot, row) in dots.iter_mut().zip(self.rows.chunks_exact(self.row_len)) {
                        let y = &row[segment.at + i..segment.at + segment.len];
                        *dot = V::Vec::<S>::load_partial(y, V::ZERO).mul_add(x, *dot);
                    }
                }
            }
            sums.iter_mut().zip(dots).for_each(|(sum, dot)| *sum += dot.reduce_sum());
        }
    }
}
