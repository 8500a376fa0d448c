//! Philox's words for the elements of a shard.

use phalanx_tensor::{Dims, Error, Loops, PhiloxStream, Result, Window, contiguous_strides};

use crate::block_reader::for_each_part;
use crate::simd::{Isa, Kernel, dispatch, each};

/// The words of a shard's elements.
pub(crate) struct Words {
    stream: PhiloxStream,
    first: u64,
    loops: Loops<1>,
}

impl Words {
    /// Those of a shard of `shape` at its place in the whole.
    pub(crate) fn new(
        op: &'static str,
        stream: PhiloxStream,
        shape: &[usize],
        window: &Window,
    ) -> Result<Words> {
        let Window { global, offset } = window;
        let ranks_agree = global.len() == shape.len() && offset.len() == shape.len();
        let inside = |d: usize| offset[d].checked_add(shape[d]).is_some_and(|end| end <= global[d]);
        if !ranks_agree || !(0..shape.len()).all(inside) {
            let got = format!("a window at {offset:?} of {global:?}");
            return Err(Error::shape(op, got, format!("one that holds a shard of shape {shape:?}")));
        }
        let strides: Dims = contiguous_strides(global);
        let first = offset.iter().zip(&strides).map(|(&o, &s)| o as u64 * s as u64).sum();
        Ok(Words { stream, first, loops: Loops::new(shape, [&strides]) })
    }

    /// The place of the shard's first element in the whole.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The places of its elements, counted from the first's.
    pub(super) fn loops(&self) -> &Loops<1> {
        &self.loops
    }

    /// Word number `lane` of each of the shard's elements from `start` on, in row-major order.
    pub(crate) fn fill(&self, lane: u64, start: usize, to: &mut [u32]) {
        for_each_part(&self.loops, start, to.len(), |part, at, stride| {
            let (to, first) = (&mut to[part], self.first + at as u64);
            if stride == 1 {
                return dispatch(WordRun { key: self.stream.key(), lane, first, to });
            }
            for (i, to) in to.iter_mut().enumerate() {
                let place = first + (i * stride) as u64;
                *to = self.stream.block(place / 4, lane)[(place % 4) as usize];
            }
        });
    }
}

/// The words of consecutive places.
struct WordRun<'a> {
    key: [u32; 2],
    lane: u64,
    first: u64,
    to: &'a mut [u32],
}

/// Blocks computed together, one a lane of the vectors that the loops over them become.
const BLOCKS: usize = 16;

impl Kernel for WordRun<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (mut block, mut skip, mut done) = (self.first / 4, (self.first % 4) as usize, 0);
        while done < self.to.len() {
            let words = philox(self.key, block, self.lane);
            let count = (4 * BLOCKS - skip).min(self.to.len() - done);
            self.to[done..done + count].copy_from_slice(&words[skip..skip + count]);
            (block, skip, done) = (block.wrapping_add(BLOCKS as u64), 0, done + count);
        }
    }
}

/// Blocks `block ..` of Philox4x32-10, as [`PhiloxStream::block`] gives them.
#[inline(always)]
fn philox(mut key: [u32; 2], block: u64, lane: u64) -> [u32; 4 * BLOCKS] {
    let number = |i: usize| block.wrapping_add(i as u64);
    let mut counter = [
        each(|i| number(i) as u32),
        each(|i| (number(i) >> 32) as u32),
        [lane as u32; BLOCKS],
        [(lane >> 32) as u32; BLOCKS],
    ];
    for _ in 0..10 {
        let [c0, c1, c2, c3] = counter;
        let a: [u64; BLOCKS] = each(|i| u64::from(c0[i]) * 0xD251_1F53);
        let b: [u64; BLOCKS] = each(|i| u64::from(c2[i]) * 0xCD9E_8D57);
        counter = [
            each(|i| (b[i] >> 32) as u32 ^ c1[i] ^ key[0]),
            each(|i| b[i] as u32),
            each(|i| (a[i] >> 32) as u32 ^ c3[i] ^ key[1]),
            each(|i| a[i] as u32),
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    let mut words = [0; 4 * BLOCKS];
    for i in 0..BLOCKS {
        for j in 0..4 {
            words[4 * i + j] = counter[j][i];
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::RngKey;

    use super::*;

    #[test]
    fn words_are_the_streams_at_every_place() {
        let stream = RngKey { seed: 7, step: 3 }.site(11);
        let window = Window { global: Dims::from_slice(&[5, 4, 9]), offset: Dims::from_slice(&[1, 0, 2]) };
        for shape in [[3, 4, 7], [3, 2, 5], [4, 4, 1], [1, 4, 7]] {
            let words = Words::new("test", stream, &shape, &window).unwrap();
            let count = shape.iter().product();
            for lane in [0, 1, 1 << 33] {
                let mut got = vec![0; count];
                words.fill(lane, 0, &mut got);
                let mut last = [0];
                words.fill(lane, count - 1, &mut last);
                assert_eq!(last[0], got[count - 1]);
                for (i, &word) in got.iter().enumerate() {
                    let (c, rest) = (i % shape[2], i / shape[2]);
                    let place = ((rest / shape[1] + 1) * 4 + rest % shape[1]) as u64 * 9 + c as u64 + 2;
                    assert_eq!(word, stream.block(place / 4, lane)[place as usize % 4]);
                }
            }
        }
        assert!(Words::new("test", stream, &[5, 4, 7], &window).is_err());
        assert!(Words::new("test", stream, &[4, 7], &window).is_err());
    }

    #[test]
    fn places_beyond_32_bits_are_told_apart() {
        let stream = RngKey { seed: 1, step: 0 }.site(0);
        let place = (5usize << 34) + 3;
        let global = Dims::from_slice(&[1 << 40]);
        let window = Window { global, offset: Dims::from_slice(&[place]) };
        let mut got = [0; 200];
        Words::new("test", stream, &[200], &window).unwrap().fill(0, 0, &mut got);
        for (i, word) in got.into_iter().enumerate() {
            let place = (place + i) as u64;
            assert_eq!(word, stream.block(place / 4, 0)[place as usize % 4]);
        }
    }
}
