//! Top k: the first `k` in order of a line (the elements along the dimension), without sorting the line.
//!
//! A line is read once. Elements that come before the threshold are kept as candidates. Of some `2 k` candidates the first `k` stay,
//! and the last of these becomes the threshold. The threshold soon lets few elements pass, so nearly all chunks of a long line are
//! skipped after a comparison with their smallest key.

use super::keys::{Bits, CHUNK, Key, Keys, Map};
use super::lines::Item;
use crate::block_reader::BLOCK;
use crate::simd::dispatch;

/// The candidates of a line.
pub(super) struct Best<U: Bits, I> {
    k: usize,
    found: Vec<I>,
    len: usize,
    /// A key that only smaller ones come before the first `k` so far.
    threshold: Option<u64>,
    keys: Vec<U::Key>,
    least: [U::Key; BLOCK / CHUNK],
}

impl<U: Bits, I: Item> Best<U, I> {
    /// For lines of `n`; `k` is at least 1.
    pub(super) fn new(k: usize, n: usize) -> Best<U, I> {
        let found = vec![I::default(); (2 * k + CHUNK).min(n) + CHUNK];
        let keys = vec![U::Key::MAX; BLOCK.min(n)];
        Best { k, found, len: 0, threshold: None, keys, least: [U::Key::MAX; BLOCK / CHUNK] }
    }

    /// Reads a line, or a part that begins at `place`.
    pub(super) fn read(&mut self, line: &[U], place: usize, map: Map<U>) {
        (self.len, self.threshold) = (0, None);
        for (i, from) in line.chunks(BLOCK).enumerate() {
            dispatch(Keys { from, to: &mut self.keys[..from.len()], least: &mut self.least, map });
            for c in 0..from.len().div_ceil(CHUNK) {
                if self.threshold.is_none_or(|threshold| self.least[c].wide() < threshold) {
                    let chunk = c * CHUNK..from.len().min((c + 1) * CHUNK);
                    self.put_aside(chunk, place + i * BLOCK);
                }
            }
        }
        self.keep_first();
    }

    /// The first `k` of what was read in any order, or all if they are fewer.
    pub(super) fn found(&self) -> &[I] {
        &self.found[..self.len]
    }

    /// Of the keys of a chunk those before the threshold.
    fn put_aside(&mut self, chunk: std::ops::Range<usize>, place: usize) {
        for at in chunk {
            let key = self.keys[at].wide();
            self.found[self.len] = I::new(key, place + at);
            self.len += usize::from(self.threshold.is_none_or(|threshold| key < threshold));
        }
        if self.len + CHUNK > self.found.len() {
            self.keep_first();
        }
    }

    fn keep_first(&mut self) {
        if self.len > self.k {
            let (_, last, _) = self.found[..self.len].select_nth_unstable(self.k - 1);
            (self.len, self.threshold) = (self.k, Some(last.key()));
        }
    }
}
