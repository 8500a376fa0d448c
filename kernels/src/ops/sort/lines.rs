//! Lines put in order on a CPU: several a piece of work, or where they are fewer than threads, each by all threads.

use phalanx_tensor::{Pool, Result, Tensor};
use smallvec::SmallVec;

use super::best::Best;
use super::items::{Item, merges, sort};
use super::keys::{Bits, CHUNK, Key, Keys, Map};
use crate::ops::copy::elements;
use crate::pointwise::PIECE;
use crate::simd::dispatch;
use crate::source::BLOCK;

/// Elements of a line that a thread takes at least.
const PART: usize = 2 * PIECE;
/// Lines that are at most so many times what is wanted of them are sorted whole.
const SORTED_MAX: usize = 4;

/// The first `k` of each line of `n` elements, of which there are; the lines lie together.
pub(super) fn arrange<U: Bits>(
    op: &'static str,
    lines: &Tensor,
    [n, k]: [usize; 2],
    descending: bool,
    [values, indices]: [&mut Tensor; 2],
) -> Result<()> {
    let (count, pool, bytes) = (lines.numel() / n, lines.device().pool()?, lines.read_bytes(op)?);
    let source = &elements::<U>(&bytes)[lines.offset()..][..count * n];
    let (mut values, mut indices) = (values.write_bytes(op)?, indices.write::<i64>(op)?);
    let values = bytemuck::cast_slice_mut::<u8, U>(&mut values[..count * k * size_of::<U>()]);
    let indices = &mut indices[..count * k];
    let wanted = Wanted { n, k, map: U::map(lines.dtype(), descending) };
    let _use = lines.device().ledger()?.scratch_of(pool.threads().min(count) * wanted.scratch_bytes());
    if count < pool.threads() && n > PART {
        wanted.arrange(&pool, pool.threads().min(n / PART), Lines { source, values, indices });
        return Ok(());
    }
    let piece = PIECE.div_ceil(n);
    let outputs = values.chunks_mut(piece * k).zip(indices.chunks_mut(piece * k));
    share_out(&pool, source.chunks(piece * n).zip(outputs), |_, (source, (values, indices))| {
        wanted.arrange(&pool, 1, Lines { source, values, indices });
    });
    Ok(())
}

/// Calls `work` with each job and its number, on whichever thread is free.
fn share_out<J: Send>(pool: &Pool, jobs: impl Iterator<Item = J>, work: impl Fn(usize, &mut J) + Sync) {
    let mut jobs: SmallVec<[J; 1]> = jobs.collect();
    pool.for_each_chunk(&mut jobs, 1, |i, jobs| jobs.iter_mut().for_each(|job| work(i, job)));
}

/// Some lines and their results.
struct Lines<'a, U> {
    source: &'a [U],
    values: &'a mut [U],
    indices: &'a mut [i64],
}

/// What is asked of every line.
#[derive(Clone, Copy)]
struct Wanted<U> {
    n: usize,
    k: usize,
    map: Map<U>,
}

impl<U: Bits> Wanted<U> {
    fn is_sorted(&self) -> bool {
        self.n <= SORTED_MAX * self.k
    }

    /// Whether keys of 32 bits and places fit into 64 bits.
    fn is_narrow(&self) -> bool {
        u32::try_from(self.n).is_ok()
    }

    fn scratch_bytes(&self) -> usize {
        let item = if self.is_narrow() && size_of::<U>() < 8 { 8 } else { 16 };
        if self.is_sorted() { self.n * (size_of::<U::Key>() + 2 * item) } else { 2 * self.k * item }
    }

    /// Puts lines in order one after the other, each cut into so many parts.
    fn arrange(&self, pool: &Pool, parts: usize, lines: Lines<'_, U>) {
        if self.is_sorted() {
            self.sort(pool, parts, lines);
        } else if self.is_narrow() && size_of::<U>() < 8 {
            self.pick::<u64>(pool, parts, lines);
        } else {
            self.pick::<u128>(pool, parts, lines);
        }
    }

    fn sort(&self, pool: &Pool, parts: usize, lines: Lines<'_, U>) {
        let mut keys = vec![U::Key::MAX; self.n];
        let (mut narrow, mut wide) = (Sorter::<u64>::default(), Sorter::<u128>::default());
        let outputs = lines.values.chunks_mut(self.k).zip(lines.indices.chunks_mut(self.k));
        for (line, (values, indices)) in lines.source.chunks(self.n).zip(outputs) {
            let [least, most] = self.keys(pool, parts, line, &mut keys);
            let bits = u64::BITS - (most - least).leading_zeros();
            if bits <= u64::KEY_BITS && self.is_narrow() {
                narrow.sort(pool, parts, &keys, least, bits);
                put(pool, &narrow.items, line, values, indices);
            } else {
                wide.sort(pool, parts, &keys, least, bits);
                put(pool, &wide.items, line, values, indices);
            }
        }
    }

    /// A line's keys, the smallest and the largest.
    fn keys(&self, pool: &Pool, parts: usize, line: &[U], keys: &mut [U::Key]) -> [u64; 2] {
        let part = self.n.div_ceil(parts);
        let mut ends = SmallVec::<[[u64; 2]; 1]>::from_elem([u64::MAX, 0], parts);
        let jobs = line.chunks(part).zip(keys.chunks_mut(part)).zip(&mut ends);
        share_out(pool, jobs, |_, ((line, keys), [least, most])| {
            for (from, to) in line.chunks(BLOCK).zip(keys.chunks_mut(BLOCK)) {
                let mut chunks = [U::Key::MAX; BLOCK / CHUNK];
                let chunks = &mut chunks[..from.len().div_ceil(CHUNK)];
                dispatch(Keys { from, to: &mut *to, least: &mut *chunks, map: self.map });
                *least = chunks.iter().fold(*least, |least, key| least.min(key.wide()));
                *most = to.iter().fold(*most, |most, key| most.max(key.wide()));
            }
        });
        ends.iter().fold([u64::MAX, 0], |[least, most], ends| [least.min(ends[0]), most.max(ends[1])])
    }

    fn pick<I: Item>(&self, pool: &Pool, parts: usize, lines: Lines<'_, U>) {
        let part = self.n.div_ceil(parts);
        let mut best: Vec<Best<U, I>> = (0..self.n.div_ceil(part)).map(|_| Best::new(self.k, part)).collect();
        let mut all = Vec::new();
        let outputs = lines.values.chunks_mut(self.k).zip(lines.indices.chunks_mut(self.k));
        for (line, (values, indices)) in lines.source.chunks(self.n).zip(outputs) {
            share_out(pool, line.chunks(part).zip(&mut best), |i, (line, best)| {
                best.read(line, i * part, self.map);
            });
            all.clear();
            best.iter().for_each(|best| all.extend_from_slice(best.found()));
            if all.len() > self.k {
                all.select_nth_unstable(self.k - 1);
            }
            all[..self.k].sort_unstable();
            put(pool, &all, line, values, indices);
        }
    }
}

/// A line's items, and as many to move them to.
#[derive(Default)]
struct Sorter<I> {
    items: Vec<I>,
    spare: Vec<I>,
}

impl<I: Item> Sorter<I> {
    /// Sorts the elements of these keys, of which `least` is the smallest; without it they have so many bits.
    fn sort<K: Key>(&mut self, pool: &Pool, parts: usize, keys: &[K], least: u64, bits: u32) {
        self.items.resize(keys.len(), I::default());
        self.spare.resize(keys.len(), I::default());
        let mut run = keys.len().div_ceil(parts);
        let runs = self.items.chunks_mut(run).zip(self.spare.chunks_mut(run));
        share_out(pool, keys.chunks(run).zip(runs), |part, (keys, (items, spare))| {
            for (i, (item, key)) in items.iter_mut().zip(*keys).enumerate() {
                *item = I::new(key.wide() - least, part * run + i);
            }
            sort(items, spare, bits);
        });
        while run < keys.len() {
            let merges = merges(&self.items, &mut self.spare, run, PART);
            share_out(pool, merges.into_iter(), |_, merge| merge.run());
            std::mem::swap(&mut self.items, &mut self.spare);
            run *= 2;
        }
    }
}

/// Writes as many of the sorted items as there is room for.
fn put<U: Bits, I: Item>(pool: &Pool, items: &[I], line: &[U], values: &mut [U], indices: &mut [i64]) {
    let outputs = values.chunks_mut(PART).zip(indices.chunks_mut(PART));
    share_out(pool, items.chunks(PART).zip(outputs), |_, (items, (values, indices))| {
        for ((value, index), item) in values.iter_mut().zip(indices.iter_mut()).zip(*items) {
            (*value, *index) = (line[item.place()], item.place() as i64);
        }
    });
}
