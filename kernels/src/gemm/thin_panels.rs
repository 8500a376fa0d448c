//! Products of few rows by a B in panels ([`MatRef::in_panels`](super::MatRef::in_panels)): memory is read in few streams from end to end, and nothing is turned round.

use std::ops::Range;

use super::chunks::far_apart;
use super::element::{GemmElem, PanelElem};
use super::thin::ThinProduct;
use super::tile::VECTORS;
use crate::simd::{Float, Isa, LANES_MAX, Vector};

/// Panels that are read together, as so many streams.
const PANELS: usize = 4;
/// How many bytes ahead panels are prefetched.
const AHEAD_BYTES: usize = 2048;
/// Places of a panel before those of the next one, where panels take turns.
const TURN: usize = 16;

impl<T: GemmElem, const H: usize> ThinProduct<'_, T, H> {
    /// The columns of B lie in panels. [`PANELS`] of them, far apart, are read together: W vectors of columns, or as many in turns if they have no
    /// registers together.
    #[inline(always)]
    pub(super) fn panels<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let (places, at_once) = (self.a.len() / H, W / VECTORS);
        let turn = if at_once == PANELS { places.max(1) } else { TURN };
        for (first, apart, count) in far_apart(self.cols.div_ceil(self.b_step), PANELS) {
            for start in (0..places.max(1)).step_by(turn) {
                let places = start..places.min(start + turn);
                for nth in (0..count).step_by(at_once) {
                    if nth + at_once <= count {
                        self.panel_block::<S, V, W>(first + nth * apart, apart, places.clone());
                        continue;
                    }
                    for nth in nth..count {
                        self.panel_block::<S, V, VECTORS>(first + nth * apart, 1, places.clone());
                    }
                }
            }
        }
    }

    /// Panels of W vectors together, from panel `first` on, `apart` from each other: these places, added to those before.
    #[inline(always)]
    fn panel_block<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(
        &mut self,
        first: usize,
        apart: usize,
        places: Range<usize>,
    ) where
        T::Acc: Float<Vec<S> = V>,
    {
        let (per_place, width) = (T::PanelElem::steps::<S>(), VECTORS * V::LANES);
        let beyond = [T::narrow(T::Acc::ZERO); LANES_MAX];
        let len = width * self.steps;
        let mut panels = [&self.b[..0]; PANELS];
        for (nth, panel) in panels[..W / VECTORS].iter_mut().enumerate() {
            *panel = &self.b[(first + nth * apart) * len..][..len];
        }
        let column = |j: usize| (first + j / VECTORS * apart) * width + j % VECTORS * V::LANES;
        let mut sums = [[V::zero(); W]; H];
        if places.start > 0 {
            #[allow(clippy::needless_range_loop)] // vectors stay out of closures; see `rows/lanes.rs`
            for i in 0..H {
                for j in 0..W {
                    sums[i][j] = V::load(&self.sums[i * self.width + column(j)..]);
                }
            }
        }
        for place in places {
            let (step, a) = (place * per_place, &self.a[place * H..][..H]);
            #[allow(clippy::needless_range_loop)]
            for j in 0..W {
                let (panel, lane) = (panels[j / VECTORS], j % VECTORS * V::LANES);
                let row = &panel[step * width + lane..][..V::LANES];
                let next = match per_place == 2 && step + 1 < self.steps {
                    true => &panel[(step + 1) * width + lane..][..V::LANES],
                    false => &beyond[..V::LANES],
                };
                // Of two steps a place, lanes are half as many bytes, in two rows: this passes over both.
                V::prefetch(
                    panel[step * width..]
                        .as_ptr()
                        .wrapping_add(lane * per_place)
                        .wrapping_byte_add(AHEAD_BYTES)
                        .cast(),
                );
                let b = T::load_lines::<S>(row, next);
                for i in 0..H {
                    sums[i][j] = T::PanelElem::add::<S>(V::splat(a[i]), b, sums[i][j]);
                }
            }
        }
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                sum.store(&mut self.sums[i * self.width + column(j)..]);
            }
        }
    }
}
