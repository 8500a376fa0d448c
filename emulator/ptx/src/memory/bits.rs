//! One bit a byte: whether it was ever written.

/// A row of bits, with the number of those that are not set.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bits {
    words: Vec<u64>,
    unset: usize,
}

/// The bits `start..end` of a word; `end` is at most 64.
fn span(start: usize, end: usize) -> u64 {
    let below = if end == 64 { u64::MAX } else { (1 << end) - 1 };
    below & !((1u64 << start) - 1)
}

impl Bits {
    /// `len` bits, none set.
    pub(crate) fn new(len: usize) -> Bits {
        Bits { words: vec![0; len.div_ceil(64)], unset: len }
    }

    /// Whether every bit there is is set: then nothing needs to be looked up.
    pub(crate) fn full(&self) -> bool {
        self.unset == 0
    }

    /// Unsets all.
    pub(crate) fn clear(&mut self, len: usize) {
        self.words.clear();
        self.words.resize(len.div_ceil(64), 0);
        self.unset = len;
    }

    /// Calls `f` with every word that `start..end` touches and the bits of it that are meant.
    fn spans(start: usize, end: usize, mut f: impl FnMut(usize, u64)) {
        let mut at = start;
        while at < end {
            let word = at / 64;
            let stop = end.min((word + 1) * 64);
            f(word, span(at % 64, stop - word * 64));
            at = stop;
        }
    }

    /// Sets `start..end`.
    pub(crate) fn set(&mut self, start: usize, end: usize) {
        if self.full() {
            return;
        }
        let (words, mut fresh) = (&mut self.words, 0);
        Bits::spans(start, end, |word, mask| {
            fresh += (mask & !words[word]).count_ones() as usize;
            words[word] |= mask;
        });
        self.unset -= fresh;
    }

    /// Unsets `start..end`.
    pub(crate) fn unset(&mut self, start: usize, end: usize) {
        let (words, mut gone) = (&mut self.words, 0);
        Bits::spans(start, end, |word, mask| {
            gone += (mask & words[word]).count_ones() as usize;
            words[word] &= !mask;
        });
        self.unset += gone;
    }

    /// Whether all of `start..end` are set.
    pub(crate) fn all(&self, start: usize, end: usize) -> bool {
        if self.full() {
            return true;
        }
        let mut all = true;
        Bits::spans(start, end, |word, mask| all &= self.words[word] & mask == mask);
        all
    }

    /// One bit.
    pub(crate) fn get(&self, at: usize) -> bool {
        self.full() || self.words[at / 64] >> (at % 64) & 1 == 1
    }

    /// Whether any of `start..end` is set.
    pub(crate) fn any(&self, start: usize, end: usize) -> bool {
        let mut any = false;
        Bits::spans(start, end, |word, mask| any |= self.words[word] & mask != 0);
        any
    }

    /// The bits `start..start + n` as the low bits of a number; `n` is at most 8.
    pub(crate) fn few(&self, start: usize, n: usize) -> u8 {
        (0..n).fold(0, |bits, i| bits | (self.get(start + i) as u8) << i)
    }
}

#[cfg(test)]
mod tests {
    use super::Bits;

    #[test]
    fn ranges_over_words_are_set_counted_and_unset() {
        let mut bits = Bits::new(200);
        bits.set(3, 130);
        assert!(bits.all(3, 130) && !bits.all(2, 4) && !bits.all(129, 131));
        assert!(bits.any(100, 131) && !bits.any(130, 200));
        bits.set(0, 200);
        assert!(bits.full());
        bits.unset(63, 65);
        assert!(!bits.full() && !bits.get(63) && !bits.get(64) && bits.get(62) && bits.get(65));
        assert_eq!(bits.few(62, 4), 0b1001);
        bits.set(63, 65);
        assert!(bits.full());
    }
}
