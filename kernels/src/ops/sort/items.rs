//! Keys with their places, and their order: by key, of equal ones the first.

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
