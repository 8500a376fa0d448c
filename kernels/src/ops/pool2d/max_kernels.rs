//! The SIMD kernels of max pooling: of a plane laid out by `ops/space_to_depth.rs` ([`OfPlane`]), or of pixels whose channels
//! lie side by side ([`OfChannels`]). The rule is [`super::max_pool2d`]'s: the first of equal pixels, a NaN before all. `max.rs` calls them.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use super::super::space_to_depth::{PhaseLayout, VECTORS_MAX, runs};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// Distances that every float type holds exactly.
pub(super) const DISTANCES: usize = 1 << 24;

/// A pixel takes the place of the largest before it if it is larger, or the first NaN.
#[inline(always)]
fn compare<X: Vector>(largest: &mut X, place: &mut X, pixel: X, at: X) {
    let wins = !pixel.le(*largest) & largest.eq(*largest);
    *largest = X::select(wins, pixel, *largest);
    *place = X::select(wins, at, *place);
}

/// A vector of so many elements, or of fewer.
#[inline(always)]
fn read<X: Vector>(from: &[X::Elem]) -> X {
    if from.len() == X::LANES { X::load(from) } else { X::load_partial(from, X::Elem::ZERO) }
}

/// The windows of some rows of a plane, whose margin is minus infinity.
pub(super) struct OfPlane<'a, V> {
    pub(super) layout: &'a PhaseLayout,
    pub(super) plane: &'a [V],
    /// For each pixel of a window its place in the phases, and its distance from the window's first pixel in the image.
    pub(super) taps: &'a [(usize, V)],
    /// Rows and columns of windows.
    pub(super) size: [usize; 2],
    /// Where the first window begins in the image, margin included; from one row of windows to the next, and column.
    pub(super) origin: i32,
    pub(super) steps: [i32; 2],
    pub(super) run: &'a mut [V],
    pub(super) values: &'a mut [V],
    pub(super) places: &'a mut [i32],
}

impl<V: Float> OfPlane<'_, V> {
    /// Elements of `run` for so many rows.
    pub(super) fn run_len(layout: &PhaseLayout, rows: usize) -> usize {
        2 * (rows * layout.row_len + VECTORS_MAX * LANES_MAX)
    }
}

impl<V: Float> Kernel for OfPlane<'_, V> {
    /// Whether a value is minus infinity: the place is unknown then.
    type Output = bool;

    #[inline(always)]
    fn run<S: Isa>(self) -> bool {
        const BLOCK: usize = 2;
        let lanes = V::Vec::<S>::LANES;
        let [rows, cols] = self.size;
        let row_len = self.layout.row_len;
        let (largest, places) = self.run.split_at_mut(self.run.len() / 2);
        for first in runs(self.size, row_len, BLOCK * lanes) {
            let mut found = [V::Vec::<S>::splat(-V::INFINITY); BLOCK];
            let mut at = [V::Vec::<S>::zero(); BLOCK];
            for &(tap, distance) in self.taps {
                let pixels = &self.plane[tap + first..][..BLOCK * lanes];
                let distance = V::Vec::<S>::splat(distance);
                for (j, (found, at)) in found.iter_mut().zip(&mut at).enumerate() {
                    compare(found, at, V::Vec::<S>::load(&pixels[j * lanes..]), distance);
                }
            }
            for j in 0..BLOCK {
                found[j].store(&mut largest[first + j * lanes..]);
                at[j].store(&mut places[first + j * lanes..]);
            }
        }
        let mut is_unknown = false;
        for row in 0..rows {
            let (largest, distances) = (&largest[row * row_len..][..cols], &places[row * row_len..][..cols]);
            let (values, named) =
                (&mut self.values[row * cols..][..cols], &mut self.places[row * cols..][..cols]);
            let origin = self.origin + row as i32 * self.steps[0];
            // The last part of a row overlaps the one before it: single elements would take as long as whole parts.
            let (part, mut next) = (cols.min(LANES_MAX), 0);
            while next < cols {
                let at = next.min(cols - part);
                next += LANES_MAX;
                let first = origin + at as i32 * self.steps[1];
                let (largest, distances) = (&largest[at..][..part], &distances[at..][..part]);
                let (values, named) = (&mut values[at..][..part], &mut named[at..][..part]);
                match part {
                    LANES_MAX => {
                        let parts = (&largest[..LANES_MAX], &distances[..LANES_MAX]);
                        is_unknown |= name(
                            parts,
                            (&mut values[..LANES_MAX], &mut named[..LANES_MAX]),
                            first,
                            self.steps[1],
                        );
                    }
                    _ => is_unknown |= name((largest, distances), (values, named), first, self.steps[1]),
                }
            }
        }
        is_unknown
    }
}

/// Writes the values and the places of some neighbouring windows, whose first begins at `first` and the others `step` apart; whether a
/// value is minus infinity.
#[inline(always)]
fn name<V: Float>(
    (largest, distances): (&[V], &[V]),
    (values, places): (&mut [V], &mut [i32]),
    first: i32,
    step: i32,
) -> bool {
    let mut is_unknown = false;
    for i in 0..values.len() {
        is_unknown |= largest[i] == -V::INFINITY;
        values[i] = largest[i];
        places[i] = first + i as i32 * step + distances[i].small_integer();
    }
    is_unknown
}

/// A row of windows over pixels whose channels lie side by side.
pub(super) struct OfChannels<'a, V> {
    /// The rows of the image that they read, one after the other.
    pub(super) rows: &'a [V],
    pub(super) width: usize,
    pub(super) channels: usize,
    /// How far a window's pixels lie from its first, rows by these, for each window columns by these.
    pub(super) down: &'a [usize],
    pub(super) across: &'a [Vec<usize>],
    /// The place of the first row's first pixel.
    pub(super) origin: i32,
    /// For each window each channel's.
    pub(super) values: &'a mut [V],
    pub(super) places: &'a mut [i32],
}

impl<V: Float> Kernel for OfChannels<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = V::Vec::<S>::LANES;
        let windows =
            self.values.chunks_exact_mut(self.channels).zip(self.places.chunks_exact_mut(self.channels));
        for ((values, places), across) in windows.zip(self.across) {
            let (Some(&top), Some(&left)) = (self.down.first(), across.first()) else {
                values.fill(-V::INFINITY);
                places.fill(-1);
                continue;
            };
            let origin = self.origin + (top * self.width + left) as i32;
            for first in (0..self.channels).step_by(lanes) {
                let here = first..self.channels.min(first + lanes);
                let pixel = |row: usize, col: usize| {
                    &self.rows[(row * self.width + col) * self.channels..][here.clone()]
                };
                let (mut found, mut at) = (read::<V::Vec<S>>(pixel(top, left)), V::Vec::<S>::zero());
                for &row in self.down {
                    for &col in across {
                        let distance = ((row - top) * self.width + col - left) as f64;
                        compare(
                            &mut found,
                            &mut at,
                            read(pixel(row, col)),
                            Vector::splat(V::from_f64(distance)),
                        );
                    }
                }
                let mut distances = [V::ZERO; LANES_MAX];
                at.store(&mut distances);
                let values = &mut values[here.clone()];
                if values.len() == lanes {
                    found.store(values)
                } else {
                    found.store_partial(values)
                }
                let mut named = [0; LANES_MAX];
                for i in 0..LANES_MAX {
                    named[i] = origin + distances[i].small_integer();
                }
                let places = &mut places[here];
                match places.len() == lanes {
                    true => places[..lanes].copy_from_slice(&named[..lanes]),
                    false => places.copy_from_slice(&named[..places.len()]),
                }
            }
        }
    }
}
