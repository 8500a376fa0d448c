//! Products of few rows by a B in panels ([`MatRef::in_panels`](super::MatRef::in_panels)): memory is read in few streams from end to end, and nothing is turned round.

use std::ops::Range;

use super::chunks::far_apart;
use super::element::{GemmElem, PanelElem};
use super::thin::{LINE_BYTES, ThinProduct};
use super::tile::VECTORS;
use crate::simd::{Float, Isa, Vector, prefetches_far};

/// Panels that are read together, as so many streams.
const PANELS: usize = 4;
/// How many bytes ahead panels are prefetched into the first-level cache.
const AHEAD_BYTES: usize = 2 << 10;
/// The same for the second-level cache, of panels that are read together, and of one after the other: no multiples of 4 KiB, at which a prefetch holds
/// up loads (`benches/NOTES.md`).
const FAR_AHEAD_BYTES: usize = 3 << 10;
const FAR_AHEAD_BYTES_OF_ONE: usize = 6 << 10;
/// Groups of a panel's steps before those of the next one, where panels take turns.
const TURN: usize = 16;

impl<T: GemmElem, const H: usize> ThinProduct<'_, T, H> {
    /// The columns of B lie in panels. [`PANELS`] of them, far apart, are read together: W vectors of columns, or as many in turns if they have no
    /// registers together. One row's are prefetched [into the second-level cache](prefetches_far) where that is faster, and then short vectors read them one
    /// after the other.
    #[inline(always)]
    pub(super) fn panels<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        if H > 1 || !prefetches_far() {
            return self.panels_together::<S, V, W, AHEAD_BYTES>();
        }
        if V::LANES * size_of::<T::Acc>() == LINE_BYTES {
            return self.panels_together::<S, V, W, FAR_AHEAD_BYTES>();
        }
        for panel in 0..self.cols.div_ceil(self.b_step) {
            self.panel_block::<S, V, VECTORS, FAR_AHEAD_BYTES_OF_ONE>(panel, 1, 0..self.groups::<S>());
        }
    }

    /// How many groups of steps a panel has.
    #[inline(always)]
    fn groups<S: Isa>(&self) -> usize {
        self.a.len() / H * T::PanelElem::steps::<S>() / T::GROUP
    }

    /// [`PANELS`] together, prefetched AHEAD.
    #[inline(always)]
    fn panels_together<S: Isa, V: Vector<Elem = T::Acc>, const W: usize, const AHEAD: usize>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let (at_once, panels, groups) = (W / VECTORS, self.cols.div_ceil(self.b_step), self.groups::<S>());
        let turn = if at_once == PANELS { groups.max(1) } else { TURN };
        for (first, apart, count) in far_apart(panels, PANELS) {
            for start in (0..groups.max(1)).step_by(turn) {
                let groups = start..groups.min(start + turn);
                for nth in (0..count).step_by(at_once) {
                    if nth + at_once <= count {
                        self.panel_block::<S, V, W, AHEAD>(first + nth * apart, apart, groups.clone());
                        continue;
                    }
                    for nth in nth..count {
                        self.panel_block::<S, V, VECTORS, AHEAD>(first + nth * apart, 1, groups.clone());
                    }
                }
            }
        }
    }

    /// Panels of W vectors together, from panel `first` on, `apart` from each other: these [groups](GemmElem::GROUP) of steps, added to those before, and
    /// prefetched AHEAD.
    #[inline(always)]
    fn panel_block<S: Isa, V: Vector<Elem = T::Acc>, const W: usize, const AHEAD: usize>(
        &mut self,
        first: usize,
        apart: usize,
        groups: Range<usize>,
    ) where
        T::Acc: Float<Vec<S> = V>,
    {
        let (width, group_len) = (VECTORS * V::LANES, VECTORS * V::LANES * T::GROUP);
        let places = T::GROUP / T::PanelElem::steps::<S>();
        let len = width * self.steps.next_multiple_of(T::PANEL_STEPS);
        // Of fewer panels than four the first ones stand in for the others, which no vector reads.
        let panel = |nth: usize| {
            let panel = &self.b[(first + nth % (W / VECTORS) * apart) * len..][..len];
            panel[groups.start * group_len..groups.end * group_len].chunks_exact(group_len)
        };
        let panels = panel(0).zip(panel(1)).zip(panel(2)).zip(panel(3));
        let a = self.a[groups.start * places * H..groups.end * places * H].chunks_exact(places * H);
        let column = |j: usize| (first + j / VECTORS * apart) * width + j % VECTORS * V::LANES;
        let mut sums = [[V::zero(); W]; H];
        if groups.start > 0 {
            #[allow(clippy::needless_range_loop)] // vectors stay out of closures; see `rows/lanes.rs`
            for i in 0..H {
                for j in 0..W {
                    sums[i][j] = V::load(&self.sums[i * self.width + column(j)..]);
                }
            }
        }
        for (a, (((first, second), third), fourth)) in a.zip(panels) {
            #[allow(clippy::needless_range_loop)]
            for j in 0..W {
                let lane = j % VECTORS * V::LANES * T::GROUP;
                let columns = &[first, second, third, fourth][j / VECTORS][lane..][..V::LANES * T::GROUP];
                if (lane * size_of::<T>()).is_multiple_of(LINE_BYTES) {
                    let ahead = columns.as_ptr().wrapping_byte_add(AHEAD).cast();
                    if AHEAD > AHEAD_BYTES { V::prefetch_far(ahead) } else { V::prefetch(ahead) }
                }
                let [first, second] = T::load_group::<S>(columns);
                for i in 0..H {
                    sums[i][j] = T::PanelElem::add::<S>(V::splat(a[i]), first, sums[i][j]);
                    if places == 2 {
                        sums[i][j] = T::PanelElem::add::<S>(V::splat(a[H + i]), second, sums[i][j]);
                    }
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
