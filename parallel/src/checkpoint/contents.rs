//! What stands where in each rank's file. Pure.
//!
//! A file is safetensors, so that anybody can read it. A tensor that one rank writes whole has its own name and shape there;
//! a piece is one-dimensional, and called by the tensor's name and the piece's number: `model.wte.weight#2`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::json;

use super::assign::Whole;

/// A rank's file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// All before the first piece.
    pub(super) header: Vec<u8>,
    /// In order.
    pub(super) pieces: Vec<Placed>,
    /// The file's size.
    pub(super) bytes: usize,
}

/// A piece in a file.
#[derive(Debug)]
pub(super) struct Placed {
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
pub(super) fn contents(wholes: &BTreeMap<String, Whole>, ranks: usize) -> Vec<Contents> {
    let mut files: Vec<Contents> = (0..ranks).map(|_| Contents::default()).collect();
    for (name, whole) in wholes {
        for (number, piece) in whole.pieces.iter().enumerate() {
            let (part, first, elements) = (piece.part, piece.first, piece.place.elements());
            let (tensor, size) = (name.clone(), whole.dtype.size());
            files[piece.rank].pieces.push(Placed { tensor, number, part, first, elements, size, at: 0 });
        }
    }
    files.iter_mut().for_each(|file| file.lay_out(wholes));
    files
}

impl Contents {
    fn lay_out(&mut self, wholes: &BTreeMap<String, Whole>) {
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

impl Placed {
    /// The part's elements that it has, in blocks of so many bytes.
    pub(super) fn blocks(&self, block: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (each, end) = (block / self.size, self.first + self.elements);
        (self.first..end).step_by(each).map(move |start| start..end.min(start + each))
    }
}
