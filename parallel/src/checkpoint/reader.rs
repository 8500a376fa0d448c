//! [`Reader`]: blocks of a checkpoint's files, each checked when it is read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::file_error;
use super::index::{Index, Piece};
use super::xxh64::xxh64;
use crate::Result;
use crate::part::Overlap;

/// Open files, and room for one block.
pub(super) struct Reader<'a> {
    folder: &'a Path,
    index: &'a Index,
    files: BTreeMap<usize, fs::File>,
    buffer: Vec<u8>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(folder: &'a Path, index: &'a Index) -> Reader<'a> {
        Reader { folder, index, files: BTreeMap::new(), buffer: Vec::new() }
    }

    /// A block of a piece of a tensor, whose elements are of so many bytes.
    ///
    /// # Errors
    /// If the file cannot be read or is not what was written, naming file and tensor.
    pub(super) fn block(&mut self, tensor: &str, piece: &Piece, size: usize, number: usize) -> Result<&[u8]> {
        let at = number * self.index.block;
        let bytes = (piece.place.elements() * size - at).min(self.index.block);
        self.read(piece.file, piece.at + at, bytes)?;
        if Some(&xxh64(&self.buffer)) != piece.checksums.get(number) {
            let path = self.folder.join(&self.index.files[piece.file].name);
            let place = format!("bytes {}..{}", piece.at + at, piece.at + at + bytes);
            return Err(file_error(
                &path,
                format!("tensor {tensor:?}: {place} are damaged: their checksum differs"),
            ));
        }
        Ok(&self.buffer)
    }

    /// A file, whose beginning is what was written.
    ///
    /// # Errors
    /// If it is not, or cannot be read.
    pub(super) fn open(&mut self, file: usize) -> Result<()> {
        if self.files.contains_key(&file) {
            return Ok(());
        }
        let said = &self.index.files[file];
        let path = self.folder.join(&said.name);
        let open = fs::File::open(&path).map_err(|e| file_error(&path, e))?;
        self.files.insert(file, open);
        self.read(file, 0, said.header)?;
        match xxh64(&self.buffer) == said.checksum {
            true => Ok(()),
            false => Err(file_error(&path, "the header is damaged")),
        }
    }

    /// Fills the buffer.
    fn read(&mut self, file: usize, at: usize, bytes: usize) -> Result<()> {
        self.open(file)?;
        self.buffer.resize(bytes, 0);
        let mut read = || {
            let Some(mut open) = self.files.get(&file) else { return Ok(()) };
            open.seek(SeekFrom::Start(at as u64))?;
            open.read_exact(&mut self.buffer)
        };
        read().map_err(|e| file_error(&self.folder.join(&self.index.files[file].name), e))
    }
}

/// What overlaps are in which block of so many elements, and from where on there. Pure.
pub(super) fn by_block(overlaps: &[Overlap], block: usize) -> BTreeMap<usize, Vec<Overlap>> {
    let mut blocks: BTreeMap<usize, Vec<Overlap>> = BTreeMap::new();
    for &Overlap { mut from, mut to, mut count } in overlaps {
        while count > 0 {
            let here = count.min(block - from % block);
            blocks.entry(from / block).or_default().push(Overlap { from: from % block, to, count: here });
            (from, to, count) = (from + here, to + here, count - here);
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_cut_at_blocks() {
        let overlap = |(from, to, count)| Overlap { from, to, count };
        let got = by_block(&[(1, 10, 2), (6, 20, 11)].map(overlap), 5);
        let wanted =
            [(0, vec![(1, 10, 2)]), (1, vec![(1, 20, 4)]), (2, vec![(0, 24, 5)]), (3, vec![(0, 29, 2)])];
        let wanted = wanted.map(|(block, list)| (block, list.into_iter().map(overlap).collect()));
        assert_eq!(got, BTreeMap::from(wanted));
    }
}
