//! [`Index`]: `checkpoint.json`, which says which pieces of which tensors are where. [`checksum`]: of blocks, headers and the
//! index itself.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_tensor::DType;
use serde::{Deserialize, Serialize};
pub(super) use xxhash_rust::xxh64::Xxh64 as Checksum;
use xxhash_rust::xxh64::xxh64;

use super::plan::{self, SavePlan, TensorPlan};
use super::{Settings, dtype_text};
use crate::sharded_tensor::BoxRange;

const FORMAT: &str = "phalanx checkpoint";
const VERSION: u32 = 1;
/// Blocks that a reader has room for.
const BLOCK_MAX: usize = 1 << 30;

/// Which pieces of which tensors are where.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    format: String,
    version: u32,
    /// The user's settings.
    pub(super) settings: Settings,
    /// Bytes of a piece that have a checksum of their own.
    pub(super) block: usize,
    pub(super) files: Vec<File>,
    pub(super) tensors: BTreeMap<String, Stored>,
}

/// A rank's file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct File {
    pub(super) name: String,
    /// Its size.
    pub(super) bytes: usize,
    /// The bytes before the first piece, and their checksum.
    pub(super) header: usize,
    pub(super) checksum: u64,
}

/// A tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Stored {
    #[serde(with = "dtype_text")]
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) pieces: Vec<Piece>,
}

/// A piece of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Piece {
    #[serde(flatten)]
    pub(super) place: BoxRange,
    /// The number of its file, and where it begins there.
    pub(super) file: usize,
    pub(super) at: usize,
    /// Of each of its blocks.
    pub(super) checksums: Vec<u64>,
}

impl Index {
    /// The index of a save, with the checksums of each rank's blocks in the order of its file.
    pub(super) fn new(settings: &Settings, block: usize, plan: &SavePlan, checksums: &[Vec<u64>]) -> Index {
        let SavePlan { wholes, contents } = plan;
        let piece =
            |p: &plan::Piece| Piece { place: p.place.clone(), file: p.rank, at: 0, checksums: Vec::new() };
        let stored = |(name, TensorPlan { dtype, shape, pieces }): (&String, &TensorPlan)| {
            let pieces = pieces.iter().map(piece).collect();
            (name.clone(), Stored { dtype: *dtype, shape: shape.clone(), pieces })
        };
        let mut tensors: BTreeMap<String, Stored> = wholes.iter().map(stored).collect();
        let mut files = Vec::new();
        for (rank, (contents, checksums)) in contents.iter().zip(checksums).enumerate() {
            let mut rest = checksums.iter().copied();
            for placed in &contents.pieces {
                let of_piece = rest.by_ref().take(placed.blocks(block).count()).collect();
                if let Some(piece) = tensors.get_mut(&placed.tensor).map(|s| &mut s.pieces[placed.number]) {
                    (piece.at, piece.checksums) = (placed.at, of_piece);
                }
            }
            let (header, checksum) = (contents.header.len(), checksum(&contents.header));
            files.push(File { name: file_name(rank), bytes: contents.bytes, header, checksum });
        }
        Index { format: FORMAT.into(), version: VERSION, settings: settings.clone(), block, files, tensors }
    }

    /// As text, which begins with a checksum of the rest.
    ///
    /// # Errors
    /// Never for an index.
    pub(super) fn text(&self) -> Result<String, String> {
        let text = serde_json::to_string(self).map_err(|e| e.to_string())?;
        let rest = &text[1..];
        Ok(format!("{{\"checksum\":\"{}\",{rest}", hex(rest)))
    }

    /// From text.
    ///
    /// # Errors
    /// If it is not the [`Index::text`] of a well-formed index.
    pub(super) fn parse(text: &str) -> Result<Index, String> {
        let foreign = || "this is no checkpoint's index, or its beginning is damaged".to_string();
        let (checksum, rest) =
            text.strip_prefix("{\"checksum\":\"").and_then(|t| t.split_once("\",")).ok_or_else(foreign)?;
        if checksum != hex(rest) {
            return Err("the checksum does not fit the text; it was cut, damaged or edited".into());
        }
        let value: serde_json::Value =
            serde_json::from_str(&format!("{{{rest}")).map_err(|e| e.to_string())?;
        if value["format"] != FORMAT || value["version"] != VERSION {
            let (format, version) = (&value["format"], &value["version"]);
            return Err(format!("got {format}, version {version}, wanted {FORMAT:?}, version {VERSION}"));
        }
        let index: Index = serde_json::from_value(value).map_err(|e| e.to_string())?;
        index.check()?;
        Ok(index)
    }

    /// Whether every piece lies inside its tensor and its file.
    fn check(&self) -> Result<(), String> {
        if self.block == 0 || !self.block.is_multiple_of(8) || self.block > BLOCK_MAX {
            return Err(format!(
                "got blocks of {} bytes, wanted a multiple of 8 up to {BLOCK_MAX}",
                self.block
            ));
        }
        let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|file| file == name);
        if let Some(file) = self.files.iter().find(|file| !is_plain(&file.name)) {
            return Err(format!("got a file {:?}, wanted one of this folder", file.name));
        }
        for (name, stored) in &self.tensors {
            stored.check(self).map_err(|why| format!("tensor {name:?}: {why}"))?;
        }
        Ok(())
    }
}

impl Stored {
    fn check(&self, index: &Index) -> Result<(), String> {
        let all = self.shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        for piece in &self.pieces {
            piece.place.check()?;
            let bytes = piece.place.elements().checked_mul(self.dtype.size());
            let end = bytes.and_then(|bytes| bytes.checked_add(piece.at));
            let file = index.files.get(piece.file);
            let inside =
                file.is_some_and(|file| piece.at >= file.header && end.is_some_and(|end| end <= file.bytes));
            let blocks = bytes.map(|bytes| bytes.div_ceil(index.block));
            if !inside || Some(piece.place.whole()) != all || blocks != Some(piece.checksums.len()) {
                return Err(format!("a piece of {:?} does not fit tensor and file", piece.place));
            }
        }
        Ok(())
    }
}

/// A text's checksum.
fn hex(text: &str) -> String {
    format!("{:016x}", checksum(text.as_bytes()))
}

/// The name of a rank's file.
pub(super) fn file_name(rank: usize) -> String {
    format!("rank-{rank}.safetensors")
}

/// The checksum of a block, of a file's header or of the index: XXH64 with seed 0. It finds damage, not forgery.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    xxh64(bytes, 0)
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn known_texts_have_their_known_values() {
        for (text, wanted) in [
            ("", 0xef46_db37_51d8_e999),
            ("a", 0xd24e_c4f1_a98c_6e5b),
            ("abc", 0x44bc_2cf5_ad77_0999),
            ("The quick brown fox jumps over the lazy dog", 0x0b24_2d36_1fda_71bc),
        ] {
            assert_eq!(checksum(text.as_bytes()), wanted, "{text:?}");
        }
    }

    #[test]
    fn every_bit_counts_at_every_length() {
        for length in 1..70 {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 37) as u8).collect();
            for bit in 0..8 * length {
                let mut other = bytes.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(checksum(&bytes), checksum(&other), "bit {bit} of {length} bytes");
            }
        }
    }
}
