//! [`FirstKeys`]: the first key that each query sees, and how it cuts queries into blocks.
//!
//! Queries of a document see keys from the document's first on. A block of queries ends where a document does, its tiles
//! begin at its first query's first key, and both count from there. So a document's blocks, tiles and additions are those
//! that it has alone, and so are its bits. Tiles before the first key are never made.

use phalanx_tensor::{DType, Dims, Error, Result, Tensor};

use super::Problem;
use super::operand::Heads;
use super::tile::{QUERIES, Tile};
use crate::simd::Float;

/// The first visible keys of an i64 mask, by heads.
pub(super) struct FirstKeys<'a>(Heads<'a, i64>);

impl<'a> FirstKeys<'a> {
    /// Opens and checks a mask [.., T, 1] over scores of this shape.
    pub(super) fn open(op: &'static str, mask: &'a Tensor, scores: &[usize]) -> Result<FirstKeys<'a>> {
        let mut shape = Dims::from_slice(scores);
        shape[scores.len() - 1] = 1;
        let keys = FirstKeys(Heads::broadcast(op, mask, &shape)?);
        keys.check(op, shape[scores.len() - 2])?;
        Ok(keys)
    }

    fn check(&self, op: &'static str, queries: usize) -> Result<()> {
        for head in self.0.distinct() {
            let mut before = 0;
            for query in 0..queries {
                let first = self.0.at(head, query);
                if first < before || first > query as i64 {
                    let got = format!("first visible key {first} of query {query}, after {before}");
                    let wanted = "first visible keys that do not decrease, from 0 to the query's own number";
                    return Err(Error::range(op, got, wanted));
                }
                before = first;
            }
        }
        Ok(())
    }

    /// The first key that a query of a head sees.
    pub(super) fn of(&self, head: usize, query: usize) -> usize {
        // Checked to be from 0 to the query's number.
        usize::try_from(self.0.at(head, query)).unwrap_or(0)
    }

    /// How many of the `most` queries from number `query` on make a block: up to the next document, and to a multiple of [`QUERIES`] from the
    /// document's start.
    pub(super) fn block(&self, head: usize, query: usize, most: usize) -> usize {
        let start = self.of(head, query);
        let most = most.min(QUERIES - (query - start) % QUERIES);
        (1..most).find(|i| self.of(head, query + i) == query + i).unwrap_or(most)
    }

    /// The numbers to add to a tile's scores, [keys, width], in `to`; `None` where all queries see the tile's first key.
    pub(super) fn tile<'b, U: Float>(&self, tile: &Tile, to: &'b mut [U]) -> Option<&'b [U]> {
        if self.of(tile.head, tile.query + tile.queries - 1) <= tile.key {
            return None;
        }
        for (k, to) in to.chunks_exact_mut(tile.width).take(tile.keys).enumerate() {
            to[tile.queries..].fill(U::ZERO);
            for (q, to) in to[..tile.queries].iter_mut().enumerate() {
                let seen = tile.key + k >= self.of(tile.head, tile.query + q);
                *to = if seen { U::ZERO } else { -U::INFINITY };
            }
        }
        Some(&to[..tile.keys * tile.width])
    }
}

impl Problem {
    /// Refuses a mask of first visible keys that is none for these sizes; their values are looked at where they are read.
    pub(super) fn check_first_keys(&self, op: &'static str, query: &Tensor, mask: &Tensor) -> Result<()> {
        if !self.causal {
            return Err(Error::dtype(op, DType::I64, "`is_causal` with a mask of first visible keys (i64)"));
        }
        let mut shape = self.scores_shape(query);
        let rank = shape.len();
        shape[rank - 1] = 1;
        let fits = mask.rank() >= 2
            && mask.rank() <= rank
            && mask.shape().iter().rev().zip(shape.iter().rev()).all(|(&m, &s)| m == s || m == 1)
            && mask.shape()[mask.rank() - 2] == self.queries;
        if !fits {
            let got = format!("first visible keys of shape {:?}", mask.shape());
            return Err(Error::shape(op, got, format!("[.., T, 1] that broadcasts to {shape:?}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use phalanx_tensor::{DType, Device, Tensor};

    use super::super::{Attention, scaled_dot_product_attention, scaled_dot_product_attention_backward};
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    const CAUSAL: Attention = Attention { is_causal: true, scale: None, enable_gqa: true, dropout: None };

    fn first_keys(rows: &[&[i64]]) -> Tensor {
        Tensor::from_slice(&rows.concat(), &[rows.len(), 1, rows[0].len(), 1], Device::CPU).unwrap()
    }

    /// Each position's document's start, for documents of these lengths.
    fn starts(lengths: &[usize]) -> Vec<i64> {
        let begins = lengths.iter().scan(0, |at, &n| Some(std::mem::replace(at, *at + n)));
        begins.zip(lengths).flat_map(|(at, &n)| std::iter::repeat_n(at as i64, n)).collect()
    }

    /// Output and all gradients.
    fn all(inputs: [&Tensor; 3], mask: Option<&Tensor>, dy: &Tensor) -> [Tensor; 5] {
        let [q, k, v] = inputs;
        let (y, stats) = scaled_dot_product_attention(q, k, v, mask, &CAUSAL).unwrap();
        let made = scaled_dot_product_attention_backward(inputs, mask, [&y, &stats], dy, &CAUSAL, [true; 4]);
        let [dq, dk, dv, ds] = made.unwrap().map(Option::unwrap);
        [y, dq, dk, dv, ds]
    }

    /// Queries, keys, values and the output's gradient, [2, heads, T, D] with two query heads a key head.
    fn operands(length: usize, dtype: DType, device: Device) -> [Tensor; 4] {
        let sizes = [(4, 8, -1.0, 1.3), (2, 8, -0.7, 0.9), (2, 5, -1.1, 0.6), (4, 5, -0.5, 0.8)];
        sizes.map(|(heads, depth, low, high)| {
            make(&[2, heads, length, depth], dtype, &floats(low, high)).to_device(device, true).unwrap()
        })
    }

    #[test]
    fn the_mask_is_the_boolean_one_made_of_its_numbers() {
        for dtype in FLOATS {
            for length in [1, 7, 33, 129] {
                let [q, k, v, dy] = operands(length, dtype, Device::CPU);
                // Documents; a window of five keys, whose numbers rise inside a block.
                let third = length.div_ceil(3);
                let documents =
                    starts(&[third, third.min(length - third), length - third.min(length - third) - third]);
                let window: Vec<i64> = (0..length as i64).map(|t| (t - 4).max(0)).collect();
                let first = first_keys(&[&documents, &window]);
                let seen: Vec<bool> = [documents, window]
                    .iter()
                    .flat_map(|row| {
                        row.iter().flat_map(|&first| (0..length as i64).map(move |key| key >= first))
                    })
                    .collect();
                let seen = Tensor::from_slice(&seen, &[2, 1, length, length], Device::CPU).unwrap();
                let got = all([&q, &k, &v], Some(&first), &dy);
                let want = all([&q, &k, &v], Some(&seen), &dy);
                for (got, want) in got.iter().zip(&want) {
                    let pairs = values(got).into_iter().zip(values(want));
                    pairs.for_each(|(got, want)| assert_close(got, want, 8.0 * tolerance(dtype)));
                }
            }
        }
    }

    #[test]
    fn documents_in_a_row_have_the_bits_that_each_has_alone() {
        let lengths = [1, 7, 64, 33, 129, 200, 66];
        let length = lengths.iter().sum();
        for threads in [1, 3] {
            let device = Device::Cpu(930 + threads as u16);
            device.set_threads(threads).unwrap();
            for dtype in FLOATS {
                let inputs = operands(length, dtype, device);
                let packed = starts(&lengths);
                let mask = first_keys(&[&packed, &packed]).to_device(device, true).unwrap();
                let [q, k, v, dy] = &inputs;
                let together = all([q, k, v], Some(&mask), dy);
                let mut at = 0;
                for &n in &lengths {
                    let part = |x: &Tensor| x.narrow(2, at, n).unwrap();
                    let alone = all([&part(q), &part(k), &part(v)], None, &part(dy));
                    for (i, alone) in alone.iter().enumerate() {
                        let here = part(&together[i]);
                        let here = if i == 4 { here.narrow(3, at, n).unwrap() } else { here };
                        assert_eq!(values(&here), values(alone), "{dtype}, document at {at}, result {i}");
                    }
                    at += n;
                }
            }
        }
    }

    #[test]
    fn what_is_no_first_visible_key_is_refused() {
        let [q, k, v, _] = operands(4, DType::F32, Device::CPU);
        let refused = |mask: &Tensor, config: &Attention| {
            scaled_dot_product_attention(&q, &k, &v, Some(mask), config).unwrap_err().to_string()
        };
        let number = |row: [i64; 4]| refused(&first_keys(&[&[0, 0, 0, 0], &row]), &CAUSAL);
        assert!(number([0, 0, 2, 1]).contains("first visible key 1 of query 3, after 2"));
        assert!(number([0, 2, 2, 2]).contains("first visible key 2 of query 1"));
        assert!(number([-1, 0, 0, 0]).contains("first visible key -1 of query 0"));
        let fine = first_keys(&[&[0, 0, 2, 2], &[0, 1, 1, 3]]);
        assert!(refused(&fine, &Attention { is_causal: false, ..CAUSAL }).contains("is_causal"));
        let shaped = |shape: Range<usize>| refused(&fine.with_shape(&[2, 1, 4, 1][shape]).unwrap(), &CAUSAL);
        assert!(shaped(0..3).contains("first visible keys of shape [2, 1, 4]"));
        let wide = first_keys(&[&[0, 0, 0, 0]]).broadcast_to(&[1, 1, 4, 4]).unwrap();
        assert!(refused(&wide, &CAUSAL).contains("[1, 1, 4, 4]"));
        let short = first_keys(&[&[0, 0, 0]]);
        assert!(refused(&short, &CAUSAL).contains("[2, 4, 4, 1]"));
    }
}
