//! A table by node numbers, which come in runs.

use std::collections::HashMap;

use super::task::Place;

/// The places of nodes, by their numbers. (Not by their addresses: recomputed nodes come and go. Not by their sequence
/// numbers: two recomputations of one checkpoint have the same.) A graph's numbers are almost consecutive, so they
/// are kept in pages, of which the last one used is mostly the next one used.
#[derive(Default)]
pub(super) struct Numbers {
    pages: Vec<[Option<Place>; PAGE as usize]>,
    index: HashMap<u64, usize>,
    /// Number and index of the page used last; meaningless while there is none.
    last: (u64, usize),
}

const PAGE: u64 = 64;

impl Numbers {
    /// Where the place of a number is kept.
    #[inline]
    pub(super) fn entry(&mut self, number: u64) -> &mut Option<Place> {
        let page = number / PAGE;
        if self.last.0 != page || self.pages.is_empty() {
            self.find(page);
        }
        &mut self.pages[self.last.1][(number % PAGE) as usize]
    }

    #[inline(never)]
    fn find(&mut self, page: u64) {
        let at = *self.index.entry(page).or_insert(self.pages.len());
        if at == self.pages.len() {
            self.pages.push([None; PAGE as usize]);
        }
        self.last = (page, at);
    }
}
