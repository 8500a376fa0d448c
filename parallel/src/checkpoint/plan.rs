//! Which rank writes which piece of which tensor ([`assign`]), and where in its file ([`contents`]). Pure: every rank computes
//! the same plan from the parts of all ranks.
//!
//! ```text
//! rank 0   w: rows 0..2, elements 0..64       b: all       parts of one box are cut where any of them begins or ends;
//! rank 1   w: rows 0..2, elements 64..100     b: all       each piece is written once, by one of the ranks that have it
//! rank 2   w: rows 2..4, all                  b: all
//! ```
//!
//! A file is in the safetensors format, which other programs read. A tensor that one rank writes whole has its own name and
//! shape there. A piece has one dimension, and the name of the tensor with the number of the piece: `model.wte.weight#2`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use phalanx_nn::cut;
use phalanx_tensor::DType;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{BLOCK, dtype_text};
use crate::sharded_tensor::BoxRange;

/// A part as a rank describes it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct PartInfo {
    pub(super) name: String,
    #[serde(with = "dtype_text")]
    pub(super) dtype: DType,
    pub(super) place: BoxRange,
    pub(super) buffer: bool,
}

/// A tensor, and the pieces of it that are written.
#[derive(Debug)]
pub(super) struct TensorPlan {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) pieces: Vec<Piece>,
}

/// A piece and its writer: the rank, the number of the rank's part, and the first element there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) place: BoxRange,
    pub(super) rank: usize,
    pub(super) part: usize,
    pub(super) first: usize,
}

/// A rank's part: rank, number, and description.
type Held<'a> = (usize, usize, &'a PartInfo);

/// Assigns every piece to one of the ranks that have it. A piece that one rank alone has goes to that rank. Then
/// the pieces that several ranks have are assigned, the largest first, each to the one of these ranks with the fewest
/// bytes to write so far. A large piece that several ranks have is cut before, so that each of them writes a part.
/// A buffer, in which ranks may differ, is written whole by the first rank that has it.
///
/// # Errors
/// If ranks disagree on a tensor's size or dtype, or no rank has some of its elements.
pub(super) fn assign(ranks: &[Vec<PartInfo>]) -> Result<BTreeMap<String, TensorPlan>, String> {
    let mut named: BTreeMap<&str, Vec<Held<'_>>> = BTreeMap::new();
    for (rank, parts) in ranks.iter().enumerate() {
        for (number, part) in parts.iter().enumerate() {
            named.entry(&part.name).or_default().push((rank, number, part));
        }
    }
    let (mut wholes, mut open) = (BTreeMap::new(), Vec::new());
    for (name, held) in named {
        let (_, _, first) = held[0];
        check(name, &held)?;
        let pieces = pieces(&held);
        let (there, wanted) =
            (pieces.iter().map(|p| p[0].place.elements()).sum::<usize>(), first.place.whole());
        if there < wanted {
            let why = "all ranks that share a tensor save it together";
            return Err(format!("tensor {name:?}: got {there} of {wanted} elements; {why}"));
        }
        let shape = first.place.shape.clone();
        wholes.insert(name.to_string(), TensorPlan { dtype: first.dtype, shape, pieces: Vec::new() });
        let cut = |owners| if first.buffer { vec![owners] } else { split_among_owners(owners, first.dtype) };
        open.extend(pieces.into_iter().flat_map(cut).map(|owners| (name, first, owners)));
    }
    let bytes = |d: &PartInfo, owners: &[Piece]| d.dtype.size() * owners[0].place.elements();
    open.sort_by_key(|(_, d, owners)| (owners.len() > 1, Reverse(bytes(d, owners))));
    let mut loads = vec![0; ranks.len()];
    for (name, described, owners) in open {
        let owners = if described.buffer { &owners[..1] } else { &owners[..] };
        let Some(piece) = owners.iter().min_by_key(|piece| loads[piece.rank]) else { continue };
        loads[piece.rank] += bytes(described, owners);
        wholes.entry(name.to_string()).and_modify(|whole| whole.pieces.push(piece.clone()));
    }
    let start = |piece: &Piece| piece.place.segments().next().map_or(0, |segment| segment.whole);
    wholes.values_mut().for_each(|whole| whole.pieces.sort_by_key(start));
    Ok(wholes)
}

/// A piece as several, one for each rank that has it, but none smaller than a block.
fn split_among_owners(owners: Vec<Piece>, dtype: DType) -> Vec<Vec<Piece>> {
    let range = owners[0].place.range.clone();
    let most = range.len() * dtype.size() / BLOCK;
    let part = |cut: std::ops::Range<usize>| {
        let of = |piece: &Piece| {
            let place =
                BoxRange { range: range.start + cut.start..range.start + cut.end, ..piece.place.clone() };
            Piece { place, first: piece.first + cut.start, ..*piece }
        };
        owners.iter().map(of).collect()
    };
    cut(range.len(), owners.len().min(most).max(1)).into_iter().map(part).collect()
}

/// Refuses ranks that disagree on a tensor's size or dtype.
fn check(name: &str, held: &[Held<'_>]) -> Result<(), String> {
    let (rank, _, first) = held[0];
    let differs =
        |(_, _, other): &&Held<'_>| other.dtype != first.dtype || other.place.whole() != first.place.whole();
    let Some((other, _, d)) = held.iter().find(differs) else { return Ok(()) };
    let say = |d: &PartInfo| format!("{} {:?}", d.dtype, d.place.shape);
    Err(format!("tensor {name:?}: rank {rank} has {}, rank {other} {}", say(first), say(d)))
}

/// The pieces that parts consist of; each is listed once for every rank that has it.
fn pieces(held: &[Held<'_>]) -> Vec<Vec<Piece>> {
    let mut boxes: BTreeMap<_, Vec<&Held<'_>>> = BTreeMap::new();
    for part in held {
        let BoxRange { shape, offset, extent, .. } = &part.2.place;
        boxes.entry((shape, offset, extent)).or_default().push(part);
    }
    let mut pieces = Vec::new();
    for alike in boxes.values() {
        let bounds: BTreeSet<usize> =
            alike.iter().flat_map(|(_, _, d)| [d.place.range.start, d.place.range.end]).collect();
        let bounds = Vec::from_iter(bounds);
        for pair in bounds.windows(2) {
            let inside =
                |(_, _, d): &&&Held<'_>| d.place.range.start <= pair[0] && pair[1] <= d.place.range.end;
            let of = |&&(rank, part, d): &&Held<'_>| {
                let place = BoxRange { range: pair[0]..pair[1], ..d.place.clone() };
                Piece { place, rank, part, first: pair[0] - d.place.range.start }
            };
            let owners: Vec<Piece> = alike.iter().filter(inside).map(of).collect();
            pieces.extend((!owners.is_empty()).then_some(owners));
        }
    }
    pieces
}

/// The tensors of a save, and the contents of each rank's file.
pub(super) struct SavePlan {
    pub(super) wholes: BTreeMap<String, TensorPlan>,
    pub(super) contents: Vec<Contents>,
}

/// A rank's file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The bytes before the first piece.
    pub(super) header: Vec<u8>,
    /// In order.
    pub(super) pieces: Vec<PlacedPiece>,
    /// The file's size.
    pub(super) bytes: usize,
}

/// A piece in a file.
#[derive(Debug)]
pub(super) struct PlacedPiece {
    /// The tensor, and the piece's number there.
    pub(super) tensor: String,
    pub(super) number: usize,
    /// The rank's part that it is of, and the first element there.
    pub(super) part: usize,
    pub(super) first: usize,
    /// How many elements, and the bytes of one.
    pub(super) elements: usize,
    pub(super) size: usize,
    /// Where it begins in the file.
    pub(super) at: usize,
}

/// The files of all ranks: pieces with the largest elements first, so that all are aligned, then by name.
pub(super) fn contents(wholes: &BTreeMap<String, TensorPlan>, ranks: usize) -> Vec<Contents> {
    let mut files: Vec<Contents> = (0..ranks).map(|_| Contents::default()).collect();
    for (name, whole) in wholes {
        for (number, piece) in whole.pieces.iter().enumerate() {
            let (part, first, elements) = (piece.part, piece.first, piece.place.elements());
            let (tensor, size) = (name.clone(), whole.dtype.size());
            files[piece.rank].pieces.push(PlacedPiece { tensor, number, part, first, elements, size, at: 0 });
        }
    }
    files.iter_mut().for_each(|file| file.lay_out(wholes));
    files
}

impl Contents {
    fn lay_out(&mut self, wholes: &BTreeMap<String, TensorPlan>) {
        self.pieces.sort_by_key(|piece| Reverse(piece.size));
        let (mut entries, mut at) = (serde_json::Map::new(), 0);
        for placed in &mut self.pieces {
            let Some(whole) = wholes.get(&placed.tensor) else { continue };
            let (name, shape) = match placed.elements == whole.pieces[placed.number].place.whole() {
                true => (placed.tensor.clone(), whole.shape.clone()),
                false => (format!("{}#{}", placed.tensor, placed.number), vec![placed.elements]),
            };
            placed.at = at;
            at += placed.elements * placed.size;
            let dtype = whole.dtype.name().to_uppercase();
            entries.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [placed.at, at]}));
        }
        let mut text = serde_json::Value::Object(entries).to_string();
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        self.header = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        self.pieces.iter_mut().for_each(|piece| piece.at += self.header.len());
        self.bytes = self.header.len() + at;
    }
}

impl PlacedPiece {
    /// The part's elements that it has, in blocks of so many bytes.
    pub(super) fn blocks(&self, block: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (each, end) = (block / self.size, self.first + self.elements);
        (self.first..end).step_by(each).map(move |start| start..end.min(start + each))
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn part(name: &str, shape: &[usize], rows: Range<usize>, range: Range<usize>) -> PartInfo {
        let (mut offset, mut extent) = (vec![0; shape.len()], shape.to_vec());
        (offset[0], extent[0]) = (rows.start, rows.len());
        let place = BoxRange { shape: shape.into(), offset, extent, range };
        place.check().unwrap();
        PartInfo { name: name.into(), dtype: DType::F32, place, buffer: false }
    }

    /// Of a tensor's pieces: rank, part, first element there, first row of the box, range of the box.
    fn assigned(ranks: &[Vec<PartInfo>], name: &str) -> Vec<(usize, usize, usize, usize, Range<usize>)> {
        let row = |p: &Piece| (p.rank, p.part, p.first, p.place.offset[0], p.place.range.clone());
        assign(ranks).unwrap()[name].pieces.iter().map(row).collect()
    }

    #[test]
    fn what_one_rank_has_it_writes_and_copies_are_spread() {
        let ranks = |rank: usize| {
            let w = part("w", &[4, 25], 2 * rank..2 * rank + 2, 0..50);
            vec![part("b", &[30], 0..30, 0..30), w, part("c", &[40], 0..40, 0..40)]
        };
        let ranks = [ranks(0), ranks(1)];
        assert_eq!(assigned(&ranks, "w"), [(0, 1, 0, 0, 0..50), (1, 1, 0, 2, 0..50)]);
        assert_eq!(assigned(&ranks, "c"), [(0, 2, 0, 0, 0..40)]);
        assert_eq!(assigned(&ranks, "b"), [(1, 0, 0, 0, 0..30)]);
    }

    #[test]
    fn shards_that_were_cut_differently_are_cut_everywhere() {
        // Two copies of a tensor, one in shards cut at 64, the other at 100.
        let shard = |range| vec![part("w", &[150], 0..150, range)];
        let ranks = [shard(0..64), shard(64..150), shard(0..100), shard(100..150)];
        let wanted = [(0, 0, 0, 0, 0..64), (2, 0, 64, 0, 64..100), (1, 0, 36, 0, 100..150)];
        assert_eq!(assigned(&ranks, "w"), wanted);
    }

    #[test]
    fn a_huge_copy_is_cut_between_those_who_have_it() {
        let elements = 3 * BLOCK / 4 + 5;
        let ranks = |count: usize| -> Vec<Vec<PartInfo>> {
            (0..count).map(|_| vec![part("w", &[elements], 0..elements, 0..elements)]).collect()
        };
        let half = elements.div_ceil(2);
        assert_eq!(assigned(&ranks(2), "w"), [(0, 0, 0, 0, 0..half), (1, 0, half, 0, half..elements)]);
        let third = elements.div_ceil(3);
        let pieces = assigned(&ranks(8), "w");
        let ranges: Vec<_> = pieces.iter().map(|piece| piece.4.clone()).collect();
        assert_eq!(ranges, [0..third, third..2 * third, 2 * third..elements], "none below {BLOCK} bytes");
        assert!(pieces.iter().all(|piece| piece.2 == piece.4.start));
        assert_eq!(BTreeSet::from_iter(pieces.iter().map(|piece| piece.0)).len(), 3, "each by another rank");
        assert_eq!(assigned(&ranks(1), "w"), [(0, 0, 0, 0, 0..elements)]);
        // Half of the box, beside a rank that has the rest: the first element is counted from its part's.
        let (low, high) = (elements / 2, part("w", &[elements], 0..elements, elements / 2..elements));
        let rest = vec![part("w", &[elements], 0..elements, 0..low)];
        let cut = assigned(&[vec![high.clone()], vec![high], rest], "w");
        assert_eq!(cut.iter().map(|piece| (piece.0, piece.2)).collect::<Vec<_>>(), [(2, 0), (0, 0)]);
        let large = |count| vec![PartInfo { buffer: true, ..ranks(1)[0][0].clone() }; count];
        assert_eq!(assigned(&[large(1), large(1)], "w"), [(0, 0, 0, 0, 0..elements)], "a buffer is not");
    }

    #[test]
    fn a_buffer_is_the_first_ranks() {
        let buffer = || vec![PartInfo { buffer: true, ..part("b", &[8], 0..8, 0..8) }];
        assert_eq!(assigned(&[vec![part("w", &[99], 0..99, 0..99)], buffer(), buffer()], "b")[0].0, 1);
    }

    #[test]
    fn tensors_without_elements_have_no_pieces() {
        let ranks = [vec![part("w", &[0, 3], 0..0, 0..0)], vec![part("w", &[0, 3], 0..0, 0..0)]];
        assert!(assigned(&ranks, "w").is_empty());
    }

    #[test]
    fn disagreement_and_gaps_are_named() {
        let whole = vec![part("w", &[4, 3], 0..4, 0..12)];
        let seen_otherwise = vec![part("w", &[12], 0..12, 0..12)];
        assert!(assign(&[whole.clone(), seen_otherwise]).is_ok(), "only the number of elements counts");
        let error = assign(&[whole.clone(), vec![part("w", &[4, 4], 0..4, 0..16)]]).unwrap_err();
        assert!(error.contains("\"w\"") && error.contains("rank 1 f32 [4, 4]"), "{error}");
        let error = assign(&[vec![part("w", &[4, 3], 0..2, 0..6)]]).unwrap_err();
        assert!(error.contains("6 of 12 elements"), "{error}");
        assert!(assign(&[whole, vec![]]).is_ok());
    }
}
