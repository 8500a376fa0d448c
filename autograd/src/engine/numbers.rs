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
    /// Number and index of the page used last.
    last: Option<(u64, usize)>,
}

const PAGE: u64 = 64;

impl Numbers {
    /// The place of a number; `new` from now on, if it had none.
    pub(super) fn get_or_insert(&mut self, number: u64, new: Place) -> Place {
        let page = number / PAGE;
        let at = match self.last {
            Some((last, at)) if last == page => at,
            _ => self.find(page),
        };
        *self.pages[at][(number % PAGE) as usize].get_or_insert(new)
    }

    fn find(&mut self, page: u64) -> usize {
        let at = *self.index.entry(page).or_insert(self.pages.len());
        if at == self.pages.len() {
            self.pages.push([None; PAGE as usize]);
        }
        self.last = Some((page, at));
        at
    }
}
