//! Sorts lines (the elements along the dimension) on a CPU: several lines a task or, if there are fewer lines than threads, each line by all threads.

use phalanx_tensor::{Pool, Result, Tensor};
use smallvec::SmallVec;

use super::best::Best;
use super::keys::{Bits, CHUNK, Key, Keys, Map};
use crate::block_reader::BLOCK;
use crate::ops::in_place::elements;
use crate::pointwise::PIECE;
use crate::simd::dispatch;

/// Elements of a part of a line at least, where several threads sort one line.
const PART: usize = 2 * PIECE;
/// A line that is at most so many times as long as the `k` wanted of it is sorted whole.
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
    for_each_task(&pool, source.chunks(piece * n).zip(outputs), |_, (source, (values, indices))| {
        wanted.arrange(&pool, 1, Lines { source, values, indices });
    });
    Ok(())
}

/// Calls `work` with each task and its number, on the pool's threads.
fn for_each_task<J: Send>(pool: &Pool, tasks: impl Iterator<Item = J>, work: impl Fn(usize, &mut J) + Sync) {
    let mut tasks: SmallVec<[J; 1]> = tasks.collect();
    pool.for_each_chunk(&mut tasks, 1, |i, tasks| tasks.iter_mut().for_each(|task| work(i, task)));
}

/// Some lines and their results.
struct Lines<'a, U> {
    source: &'a [U],
    values: &'a mut [U],
    indices: &'a mut [i64],
}

/// What is wanted of every line.
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

    /// Sorts lines one after the other, each cut into `parts` parts.
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
                write_sorted(pool, &narrow.items, line, values, indices);
            } else {
                wide.sort(pool, parts, &keys, least, bits);
                write_sorted(pool, &wide.items, line, values, indices);
            }
        }
    }

    /// A line's keys, the smallest and the largest.
    fn keys(&self, pool: &Pool, parts: usize, line: &[U], keys: &mut [U::Key]) -> [u64; 2] {
        let part = self.n.div_ceil(parts);
        let mut ends = SmallVec::<[[u64; 2]; 1]>::from_elem([u64::MAX, 0], parts);
        let tasks = line.chunks(part).zip(keys.chunks_mut(part)).zip(&mut ends);
        for_each_task(pool, tasks, |_, ((line, keys), [least, most])| {
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
            for_each_task(pool, line.chunks(part).zip(&mut best), |i, (line, best)| {
                best.read(line, i * part, self.map);
            });
            all.clear();
            best.iter().for_each(|best| all.extend_from_slice(best.found()));
            if all.len() > self.k {
                all.select_nth_unstable(self.k - 1);
            }
            all[..self.k].sort_unstable();
            write_sorted(pool, &all, line, values, indices);
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
        for_each_task(pool, keys.chunks(run).zip(runs), |part, (keys, (items, spare))| {
            for (i, (item, key)) in items.iter_mut().zip(*keys).enumerate() {
                *item = I::new(key.wide() - least, part * run + i);
            }
            sort(items, spare, bits);
        });
        while run < keys.len() {
            let merges = merges(&self.items, &mut self.spare, run, PART);
            for_each_task(pool, merges.into_iter(), |_, merge| merge.run());
            std::mem::swap(&mut self.items, &mut self.spare);
            run *= 2;
        }
    }
}

/// Writes as many of the sorted items as there is room for.
fn write_sorted<U: Bits, I: Item>(
    pool: &Pool,
    items: &[I],
    line: &[U],
    values: &mut [U],
    indices: &mut [i64],
) {
    let outputs = values.chunks_mut(PART).zip(indices.chunks_mut(PART));
    for_each_task(pool, items.chunks(PART).zip(outputs), |_, (items, (values, indices))| {
        for ((value, index), item) in values.iter_mut().zip(indices.iter_mut()).zip(*items) {
            (*value, *index) = (line[item.place()], item.place() as i64);
        }
    });
}

/// A key and the place of its element, in one integer that orders them.
pub(super) trait Item: Copy + Ord + Default + Send + Sync {
    /// Bits of a key at most.
    const KEY_BITS: u32;

    fn new(key: u64, place: usize) -> Self;
    fn key(self) -> u64;
    fn place(self) -> usize;
}

/// Of keys of 32 bits, and as many places.
impl Item for u64 {
    const KEY_BITS: u32 = 32;

    #[inline(always)]
    fn new(key: u64, place: usize) -> u64 {
        key << 32 | place as u64
    }

    #[inline(always)]
    fn key(self) -> u64 {
        self >> 32
    }

    #[inline(always)]
    fn place(self) -> usize {
        (self & u64::from(u32::MAX)) as usize
    }
}

impl Item for u128 {
    const KEY_BITS: u32 = 64;

    #[inline(always)]
    fn new(key: u64, place: usize) -> u128 {
        u128::from(key) << 64 | place as u128
    }

    #[inline(always)]
    fn key(self) -> u64 {
        (self >> 64) as u64
    }

    #[inline(always)]
    fn place(self) -> usize {
        self as u64 as usize
    }
}

/// Bits of a digit at most.
const DIGIT_MAX: u32 = 11;
/// Bits of a digit where a table of counts of [`DIGIT_MAX`] would be longer than what is counted.
const DIGIT: u32 = 8;
/// Items that are worth the longer table.
const MANY: usize = 1 << 14;

/// Items for each of which those before it are counted.
const FEW: usize = 16;

/// Sorts items whose places ascend and whose keys have so many bits: digit by digit from the last, or if they are few by
/// comparing. `spare` is as long.
pub(super) fn sort<I: Item>(items: &mut [I], spare: &mut [I], key_bits: u32) {
    if items.len() <= FEW {
        // Without a branch that depends on the items.
        for &item in &*items {
            let before: usize = items.iter().map(|&other| usize::from(other < item)).sum();
            spare[before] = item;
        }
        return items.copy_from_slice(spare);
    }
    let passes = key_bits.div_ceil(if items.len() < MANY { DIGIT } else { DIGIT_MAX });
    let digit = if passes == 0 { 0 } else { key_bits.div_ceil(passes) };
    if passes as usize * (items.len() + (1 << digit)) >= items.len() * items.len().max(1).ilog2() as usize {
        return items.sort_unstable();
    }
    let (mut from, mut to) = (&mut *items, &mut *spare);
    let mut swapped = false;
    for pass in 0..passes {
        if distribute(from, to, pass * digit, digit) {
            (from, to) = (to, from);
            swapped = !swapped;
        }
    }
    if swapped {
        items.copy_from_slice(spare);
    }
}

/// Moves the items into the order of one digit, equal ones in the order that they have. False if all are equal, and nothing
/// was moved.
fn distribute<I: Item>(from: &[I], to: &mut [I], shift: u32, digit: u32) -> bool {
    const MASK: usize = (1 << DIGIT_MAX) - 1;
    let mask = (1 << digit) - 1;
    let of = |item: I| (item.key() >> shift) as usize & mask & MASK;
    let mut ends = [0u32; MASK + 1];
    from.iter().for_each(|&item| ends[of(item)] += 1);
    if ends[of(from[0])] as usize == from.len() {
        return false;
    }
    let mut start = 0;
    for end in &mut ends[..=mask & MASK] {
        start += std::mem::replace(end, start);
    }
    for &item in from {
        let place = &mut ends[of(item)];
        to[*place as usize] = item;
        *place += 1;
    }
    true
}

/// Merges two sorted runs.
fn merge<I: Item>(a: &[I], b: &[I], to: &mut [I]) {
    let (mut i, mut j, mut done) = (0, 0, 0);
    while let (Some(&x), Some(&y)) = (a.get(i), b.get(j)) {
        let second = y < x;
        to[done] = if second { y } else { x };
        (i, j, done) = (i + usize::from(!second), j + usize::from(second), done + 1);
    }
    let rest = if i < a.len() { &a[i..] } else { &b[j..] };
    to[done..].copy_from_slice(rest);
}

/// How many of the first `count` of two merged runs come from `a`; items differ.
fn split<I: Item>(a: &[I], b: &[I], count: usize) -> usize {
    let (mut low, mut high) = (count.saturating_sub(b.len()), count.min(a.len()));
    while low < high {
        let middle = low.midpoint(high);
        if a[middle] < b[count - middle - 1] {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

/// A stretch of what two runs are merged into.
pub(super) struct Merge<'a, I> {
    a: &'a [I],
    b: &'a [I],
    to: &'a mut [I],
}

impl<I: Item> Merge<'_, I> {
    pub(super) fn run(&mut self) {
        merge(self.a, self.b, self.to);
    }
}

/// Cuts the merging of neighbouring runs of `run` items, of which the last may be shorter, into stretches of `stretch`.
pub(super) fn merges<'a, I: Item>(
    items: &'a [I],
    to: &'a mut [I],
    run: usize,
    stretch: usize,
) -> Vec<Merge<'a, I>> {
    let mut merges = Vec::new();
    for (pair, to) in items.chunks(2 * run).zip(to.chunks_mut(2 * run)) {
        let (a, b) = pair.split_at(run.min(pair.len()));
        let mut from = (0, 0);
        for to in to.chunks_mut(stretch) {
            let count = from.0 + from.1 + to.len();
            let in_a = split(a, b, count);
            let end = (in_a, count - in_a);
            merges.push(Merge { a: &a[from.0..end.0], b: &b[from.1..end.1], to });
            from = end;
        }
    }
    merges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, bits: u32) -> Vec<u64> {
        let mut x = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x >> (64 - bits)
        };
        (0..n).map(|_| next()).collect()
    }

    fn check<I: Item + std::fmt::Debug>(n: usize, bits: u32) {
        let items: Vec<I> = numbers(n, bits).into_iter().enumerate().map(|(i, key)| I::new(key, i)).collect();
        let mut wanted = items.clone();
        wanted.sort();
        let (mut sorted, mut spare) = (items.clone(), vec![I::default(); n]);
        sort(&mut sorted, &mut spare, bits);
        assert_eq!(sorted, wanted);
        for (run, stretch) in [(n / 2 + 1, 100), (n / 3 + 1, n + 1), (n + 5, 7)] {
            let (mut runs, mut run) = (items.clone(), run);
            runs.chunks_mut(run).for_each(<[I]>::sort);
            while run < n {
                merges(&runs, &mut spare, run, stretch).iter_mut().for_each(Merge::run);
                std::mem::swap(&mut runs, &mut spare);
                run *= 2;
            }
            assert_eq!(runs, wanted);
        }
    }

    #[test]
    fn digits_and_merged_runs_give_the_order_of_comparing() {
        for n in [0, 1, 7, 16, 17, 33, 129, 1000, 40_000] {
            for bits in [1, 4, 11, 16, 31, 32] {
                check::<u64>(n, bits);
                check::<u128>(n, bits);
            }
            check::<u128>(n, 64);
        }
    }
}
