//! [`whole_digests`]: digests of tensors of which ranks hold parts. They do not depend on the layout, and copies that must be alike are
//! compared.
//!
//! ```text
//! digest of a tensor = sum over its elements of mix(position x GOLDEN ^ bits), modulo 2^64
//! ```
//! The position counts elements of the whole tensor in row-major order. The bits of -0 count as those of 0, because the gradient of a row
//! that was not used is one or the other, by the layout. A sum needs no order, so the digests of parts that no two ranks
//! share are added. The digest finds accidents, not forgery.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::Result;
use crate::all_gather::all_gather_object;
use crate::comm::Comm;
use crate::sharded_tensor::{BoxRange, Overlap, ShardedTensor};

/// The digests of whole tensors, the same on all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeDigests {
    /// By name. Where copies differ, that of the most of them counts, and of the first rank's among equally many.
    pub of: BTreeMap<String, u64>,
    /// The tensors of which ranks hold unlike copies, in the order of the first rank's parts.
    pub unlike: Vec<UnlikeCopies>,
}

/// Ranks whose copies of a part of a tensor must be alike and are not.
#[derive(Clone, Debug, PartialEq)]
pub struct UnlikeCopies {
    /// The tensor's name.
    pub name: String,
    /// The ranks whose copies are unlike those of the majority; all ranks that hold one, if no copy has a majority.
    pub odd: Vec<usize>,
    /// The ranks of the majority.
    pub alike: Vec<usize>,
}

/// The digests of the tensors whose parts the ranks hold. All ranks call it. Ranks that hold the same part of a tensor must have the same
/// elements, so no buffers are given.
///
/// # Errors
/// If a part is not well-formed or cannot be read, or as [`crate::comm::Pending::wait`].
pub fn whole_digests(comm: &Comm, parts: &[ShardedTensor]) -> Result<WholeDigests> {
    let mut own: Vec<(String, BoxRange, u64)> = Vec::new();
    for part in parts {
        own.push((part.name.clone(), part.place()?, digest(part)?));
    }
    Ok(combine(all_gather_object(comm, &own)?))
}

/// `all`: each rank's parts and their digests.
fn combine(all: Vec<Vec<(String, BoxRange, u64)>>) -> WholeDigests {
    // The digests of each part, and of each digest the ranks.
    let mut names: Vec<String> = Vec::new();
    type Copies = BTreeMap<u64, Vec<usize>>;
    let mut parts: BTreeMap<String, Vec<(BoxRange, Copies)>> = BTreeMap::new();
    for (rank, own) in all.into_iter().enumerate() {
        for (name, place, digest) in own {
            if !parts.contains_key(&name) {
                names.push(name.clone());
            }
            let of_name = parts.entry(name).or_default();
            let at = of_name.iter().position(|(known, _)| *known == place).unwrap_or_else(|| {
                of_name.push((place, Copies::new()));
                of_name.len() - 1
            });
            of_name[at].1.entry(digest).or_default().push(rank);
        }
    }
    let mut whole = WholeDigests::default();
    for name in names {
        let mut sum = 0u64;
        for (_, copies) in parts.remove(&name).into_iter().flatten() {
            let all: usize = copies.values().map(Vec::len).sum();
            let most = copies.iter().max_by_key(|(_, ranks)| (ranks.len(), std::cmp::Reverse(ranks[0])));
            let Some((digest, alike)) = most else { continue };
            sum = sum.wrapping_add(*digest);
            if copies.len() > 1 {
                let is_majority = 2 * alike.len() > all;
                let alike = if is_majority { alike.clone() } else { Vec::new() };
                let mut odd: Vec<usize> = copies.values().flatten().copied().collect();
                odd.retain(|rank| !alike.contains(rank));
                odd.sort_unstable();
                whole.unlike.push(UnlikeCopies { name: name.clone(), odd, alike });
            }
        }
        whole.of.insert(name, sum);
    }
    whole
}

/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 16;

/// The digest of a part.
fn digest(part: &ShardedTensor) -> Result<u64> {
    let (place, values) = (part.place()?, &part.values);
    let whole = place.whole();
    let all = BoxRange { shape: vec![whole], offset: vec![0], extent: vec![whole], range: 0..whole };
    let chunks = |Overlap { from, to, count }: Overlap| {
        (0..count).step_by(CHUNK).map(move |at| (from + at, to + at, CHUNK.min(count - at)))
    };
    let chunks: Vec<_> = place.overlaps(&all).into_iter().flat_map(chunks).collect();
    let here = if values.device().is_cuda() {
        values.to_device(values.device().host(), true)?
    } else {
        values.clone()
    };
    let size = here.dtype().size();
    let bytes = here.read_bytes("digest")?;
    let bytes = &bytes[here.offset() * size..][..here.numel() * size];
    let negative_zero = if here.dtype().is_float() { 1u64 << (8 * size - 1) } else { 0 };
    let of_size = match size {
        1 => sum_of::<1>,
        2 => sum_of::<2>,
        4 => sum_of::<4>,
        _ => sum_of::<8>,
    };
    let sum = |(from, to, count): (usize, usize, usize)| {
        of_size(&bytes[from * size..(from + count) * size], to as u64, negative_zero)
    };
    Ok(chunks.into_par_iter().map(sum).reduce(|| 0, u64::wrapping_add))
}

/// The sum over elements of `SIZE` bytes, the first of which is at `position`.
fn sum_of<const SIZE: usize>(bytes: &[u8], position: u64, negative_zero: u64) -> u64 {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    elements.iter().zip(position..).fold(0u64, |sum, (element, position)| {
        let mut bits = [0; 8];
        bits[..SIZE].copy_from_slice(element);
        let bits = u64::from_le_bytes(bits);
        let bits = if bits == negative_zero { 0 } else { bits };
        // Positions are spread over all bits, so that no element of few bits looks like one elsewhere.
        sum.wrapping_add(mix(position.wrapping_mul(GOLDEN) ^ bits))
    })
}

/// 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A permutation of 64 bits in which each bit depends on all. Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators
/// (2014), with the constants of Vigna's SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(GOLDEN);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use phalanx_kernels as kernels;
    use phalanx_tensor::{DType, Device, Dims, Tensor, Window};

    use phalanx_nn::Shard;

    use super::*;
    use crate::launch;

    fn values(n: usize, dtype: DType) -> Tensor {
        let values: Vec<f64> = (0..n).map(|i| (i * i % 17) as f64 - 5.0).collect();
        kernels::cast(&Tensor::from_slice(&values, &[n], Device::CPU).unwrap(), dtype).unwrap()
    }

    #[test]
    fn parts_in_any_cut_have_the_digest_of_the_whole() {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let whole = values(24, dtype).with_shape(&[4, 6]).unwrap();
            let wanted = digest(&ShardedTensor::whole("w", whole.clone())).unwrap();
            // Columns 0..2 and 2..6, the second one in two ranges.
            let shard = |from: usize, to: usize| {
                let (global, offset) = (Dims::from_slice(&[4, 6]), Dims::from_slice(&[0, from]));
                Shard { window: Window { global, offset }, extent: Dims::from_slice(&[4, to - from]) }
            };
            let part = |from, to, range: std::ops::Range<usize>| {
                let here = whole.narrow(1, from, to - from).unwrap().contiguous().unwrap();
                let flat = here.with_shape(&[here.numel()]).unwrap();
                let values = flat.narrow(0, range.start, range.len()).unwrap();
                let part = ShardedTensor::whole("w", values);
                digest(&ShardedTensor { shard: shard(from, to), range, ..part }).unwrap()
            };
            let parts = [part(0, 2, 0..8), part(2, 6, 0..5), part(2, 6, 5..16)];
            assert_eq!(parts.into_iter().fold(0, u64::wrapping_add), wanted);
            // The order of the elements counts.
            let turned = whole.transpose(0, 1).unwrap().contiguous().unwrap().with_shape(&[4, 6]).unwrap();
            assert_ne!(digest(&ShardedTensor::whole("w", turned)).unwrap(), wanted);
        }
    }

    #[test]
    fn zeros_of_both_signs_are_alike() {
        let of = |x: [f32; 2]| {
            digest(&ShardedTensor::whole("w", Tensor::from_slice(&x, &[2], Device::CPU).unwrap())).unwrap()
        };
        assert_eq!(of([0.0, 1.0]), of([-0.0, 1.0]));
        assert_ne!(of([0.0, 1.0]), of([0.0, -1.0]));
    }

    #[test]
    fn every_bit_counts() {
        let bytes: Vec<u8> = (0..40).collect();
        let of = |bytes: &[u8]| {
            digest(&ShardedTensor::whole("w", Tensor::from_slice(bytes, &[40], Device::CPU).unwrap()))
        };
        for bit in 0..320 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&bytes).unwrap(), of(&other).unwrap(), "bit {bit}");
        }
    }

    #[test]
    fn the_copy_that_is_unlike_is_named_by_the_majority() {
        for (ranks, odd, alike) in [(4, vec![2], vec![0, 1, 3]), (3, vec![2], vec![0, 1])] {
            let found = launch::threads(ranks, |rank| {
                let mut own = values(8, DType::F32);
                if rank.rank() == 2 {
                    own = kernels::add_scalar(&own, 1e-6.into())?;
                }
                whole_digests(
                    rank.comm(),
                    &[ShardedTensor::whole("w", own), ShardedTensor::whole("v", values(3, DType::F32))],
                )
            });
            let wanted = [("v", values(3, DType::F32)), ("w", values(8, DType::F32))];
            for found in found.unwrap() {
                for (name, values) in &wanted {
                    assert_eq!(
                        found.of[*name],
                        digest(&ShardedTensor::whole("w", values.clone())).unwrap(),
                        "{name}"
                    );
                }
                let unlike = UnlikeCopies { name: "w".into(), odd: odd.clone(), alike: alike.clone() };
                assert_eq!(found.unlike, [unlike]);
            }
        }
        let two = launch::threads(2, |rank| {
            whole_digests(
                rank.comm(),
                &[ShardedTensor::whole("w", values(2 + rank.rank(), DType::F32).narrow(0, rank.rank(), 2)?)],
            )
        });
        assert_eq!(
            two.unwrap()[1].unlike,
            [UnlikeCopies { name: "w".into(), odd: vec![0, 1], alike: vec![] }]
        );
    }
}
