//! [`Checkpoint`]: a checkpoint on disk, opened. It reads parts under any layout: first the plan, then the blocks that hold some
//! of their elements, each checked as it is read ([`Reader`]).

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use phalanx_kernels as kernels;
use phalanx_nn::Mismatch;
use phalanx_tensor::{DType, Tensor};
use rayon::prelude::*;

use super::finite::check_finite;
use super::folder::Folder;
use super::index::{Index, Piece, Stored, checksum};
use super::{Settings, file_error};
use crate::Result;
use crate::all_gather::{all_gather_object, all_ok};
use crate::comm::Comm;
use crate::sharded_tensor::{BoxRange, Overlap, ShardedTensor, covers};

/// A complete checkpoint. Opening reads its index only; reading parts reads the blocks that hold some of them.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) path: PathBuf,
    pub(super) index: Index,
    finite: bool,
    checksum: u64,
}

impl Checkpoint {
    /// Opens the checkpoint of that name; if a save was killed while it replaced one, that one.
    ///
    /// # Errors
    /// If there is none, its index is damaged or of another format, or a file is not there or not as long as it was.
    pub fn open(folder: impl AsRef<Path>) -> Result<Checkpoint> {
        let folder = Folder::new(folder.as_ref())?;
        let (path, file, text) = folder.read_index()?;
        let index = Index::parse(&text).map_err(|why| file_error(&file, why))?;
        for file in &index.files {
            let path = path.join(&file.name);
            let there = fs::metadata(&path).map_err(|e| file_error(&path, e))?.len();
            if there != file.bytes as u64 {
                return Err(file_error(&path, format!("got {there} bytes, {} were written", file.bytes)));
            }
        }
        Ok(Checkpoint { path: path.into(), index, finite: false, checksum: checksum(text.as_bytes()) })
    }

    /// Whether tensors are refused that have NaN or infinity in a parameter or an optimizer's state, or NaN in a buffer.
    #[must_use]
    pub fn require_finite(self, finite: bool) -> Checkpoint {
        Checkpoint { finite, ..self }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checksum of the index, which has those of all blocks: equal checkpoints have equal ones.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// The settings of the run that were saved.
    pub fn settings(&self) -> &Settings {
        &self.index.settings
    }

    /// Its tensors: name, dtype, and the whole's shape as one of the ranks saw it.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, DType, &[usize])> {
        self.index.tensors.iter().map(|(name, stored)| (name.as_str(), stored.dtype, &stored.shape[..]))
    }

    /// Reads everything and compares checksums, on all of rayon's threads, each of which holds a block at a time.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged, naming file and tensor: of several, always the first.
    pub fn verify(&self) -> Result<()> {
        let mut reader = Reader::new(&self.path, &self.index);
        (0..self.index.files.len()).try_for_each(|file| reader.open(file))?;
        let mut blocks = Vec::new();
        for (name, stored) in &self.index.tensors {
            for piece in &stored.pieces {
                let numbers = 0..piece.checksums.len();
                blocks.extend(numbers.map(|number| (name, piece, stored.dtype.size(), number)));
            }
        }
        let checked = blocks.par_iter().map_init(
            || Reader::new(&self.path, &self.index),
            |reader, &(name, piece, size, number)| reader.block(name, piece, size, number).map(drop),
        );
        checked.find_first(Result::is_err).unwrap_or(Ok(()))
    }
}

/// A part to be read, and whether its values may be converted.
#[derive(Debug)]
pub(super) struct ReadItem {
    pub(super) part: ShardedTensor,
    pub(super) converted: bool,
}

impl ReadItem {
    /// In the dtype that was saved.
    pub(super) fn exactly(part: &ShardedTensor) -> ReadItem {
        ReadItem { part: part.clone(), converted: false }
    }

    /// In its own dtype.
    pub(super) fn converted(part: &ShardedTensor) -> ReadItem {
        ReadItem { part: part.clone(), converted: true }
    }
}

/// The elements of a part in each piece of a tensor, by the pieces' numbers.
type Sources = Vec<(usize, Vec<Overlap>)>;

impl Checkpoint {
    /// Reads values into the tensors of parts, which must be of the dtype that was saved. Ranks need not read together.
    ///
    /// # Errors
    /// If tensors are not there or of another size or dtype; then nothing is changed. If a file cannot be read or is
    /// damaged, or a tensor is refused ([`Checkpoint::require_finite`]); then some tensors have their new values and others have not.
    pub fn read(&self, parts: &[ShardedTensor]) -> Result<()> {
        self.read_wanted(&Vec::from_iter(parts.iter().map(ReadItem::exactly)))
    }

    /// [`Checkpoint::read`], which converts values to the dtypes of the parts.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_converted(&self, parts: &[ShardedTensor]) -> Result<()> {
        self.read_wanted(&Vec::from_iter(parts.iter().map(ReadItem::converted)))
    }

    /// [`Checkpoint::read`] on all ranks, each its parts. Every tensor of the checkpoint must be one that some rank reads.
    ///
    /// # Errors
    /// The error of any rank, on every rank; or if there are tensors that no rank wants.
    pub fn load(&self, comm: &Comm, parts: &[ShardedTensor]) -> Result<()> {
        let names = parts.iter().map(|part| &*part.name).collect();
        self.load_wanted(comm, &Vec::from_iter(parts.iter().map(ReadItem::exactly)), &names)
    }

    /// Reads on all ranks; `known` are names that this rank has a use for, read or not.
    pub(super) fn load_wanted(&self, comm: &Comm, wanted: &[ReadItem], known: &HashSet<&str>) -> Result<()> {
        let read = self.read_wanted(wanted).map_err(|e| e.to_string());
        let has = |name: &String| known.contains(name.as_str());
        let uses: Vec<bool> = self.index.tensors.keys().map(has).collect();
        let all = all_ok(comm, all_gather_object(comm, &read.map(|()| uses))?)?;
        let unused = |(number, name): (usize, &String)| {
            let used = all.iter().any(|uses| uses.get(number).is_some_and(|&used| used));
            (!used).then(|| name.clone())
        };
        let unexpected = self.index.tensors.keys().enumerate().filter_map(unused).collect();
        Ok(Mismatch { unexpected, ..Mismatch::default() }.check(&self.path.display().to_string())?)
    }

    fn read_wanted(&self, wanted: &[ReadItem]) -> Result<()> {
        let (mut problems, mut plans) = (Mismatch::default(), Vec::new());
        for ReadItem { part, converted } in wanted {
            let (name, place) = (&part.name, part.place()?);
            let Some(stored) = self.index.tensors.get(name) else {
                problems.missing.push(name.clone());
                continue;
            };
            if stored.shape.iter().product::<usize>() != place.whole() {
                problems.misshaped.push((name.clone(), stored.shape.clone(), place.shape));
                continue;
            }
            let (got, wanted) = (stored.dtype, part.values.dtype());
            if got != wanted && !converted && place.elements() > 0 {
                return Err(self.error(format!("tensor {name:?} was saved as {got}, wanted {wanted}")));
            }
            let sources = sources(stored, &place);
            if !covers(place.elements(), sources.iter().flat_map(|(_, overlaps)| overlaps.iter().copied())) {
                return Err(
                    self.error(format!("tensor {name:?} is incomplete: elements of {place:?} are missing"))
                );
            }
            plans.push((part, stored, sources));
        }
        problems.check(&self.path.display().to_string())?;
        let mut reader = Reader::new(&self.path, &self.index);
        plans
            .iter()
            .try_for_each(|(part, stored, sources)| self.read_part(&mut reader, part, stored, sources))
    }

    fn read_part(
        &self,
        reader: &mut Reader<'_>,
        part: &ShardedTensor,
        stored: &Stored,
        sources: &Sources,
    ) -> Result<()> {
        if part.values.device().is_meta() {
            return Ok(());
        }
        fill(part, stored.dtype, |to| self.read_into(reader, part, to, stored, sources))
    }

    /// Reads the elements that pieces have of a part, into a tensor of one dimension.
    fn read_into(
        &self,
        reader: &mut Reader<'_>,
        part: &ShardedTensor,
        to: &mut Tensor,
        stored: &Stored,
        sources: &Sources,
    ) -> Result<()> {
        let (size, start) = (stored.dtype.size(), to.offset());
        for (number, overlaps) in sources {
            let piece = &stored.pieces[*number];
            for (block, overlaps) in by_block(overlaps, self.index.block / size) {
                let bytes = reader.block(&part.name, piece, size, block)?;
                let mut values = to.write_bytes("load")?;
                for Overlap { from, to, count } in overlaps {
                    let (to, bytes) = ((start + to) * size, &bytes[from * size..(from + count) * size]);
                    if self.finite {
                        check_finite(part, stored.dtype, bytes).map_err(|why| self.error(why))?;
                    }
                    values[to..to + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        Ok(())
    }

    fn error(&self, why: String) -> crate::Error {
        file_error(&self.path, why)
    }
}

/// Gives a part the values that `read` writes into a tensor of one dimension in the host's memory, of this dtype.
///
/// # Errors
/// Those of `read`, or if memory is short.
pub(super) fn fill(
    part: &ShardedTensor,
    dtype: DType,
    read: impl FnOnce(&mut Tensor) -> Result<()>,
) -> Result<()> {
    let mut flat = part.values.with_shape(&[part.values.numel()])?;
    if dtype == flat.dtype() && !flat.device().is_cuda() {
        return read(&mut flat);
    }
    let mut host = Tensor::empty(flat.shape(), dtype, flat.device().host())?;
    read(&mut host)?;
    Ok(flat.copy_from(&kernels::cast(&host, flat.dtype())?)?)
}

/// Finds the elements of a part in the pieces of a tensor.
fn sources(stored: &Stored, place: &BoxRange) -> Sources {
    let of = |(number, piece): (usize, &Piece)| (number, piece.place.overlaps(place));
    stored.pieces.iter().enumerate().map(of).filter(|(_, overlaps)| !overlaps.is_empty()).collect()
}

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
    /// If the file cannot be read or is damaged, naming file and tensor.
    pub(super) fn block(&mut self, tensor: &str, piece: &Piece, size: usize, number: usize) -> Result<&[u8]> {
        let at = number * self.index.block;
        let bytes = (piece.place.elements() * size - at).min(self.index.block);
        self.read(piece.file, piece.at + at, bytes)?;
        if Some(&checksum(&self.buffer)) != piece.checksums.get(number) {
            let path = self.folder.join(&self.index.files[piece.file].name);
            let place = format!("bytes {}..{}", piece.at + at, piece.at + at + bytes);
            return Err(file_error(
                &path,
                format!("tensor {tensor:?}: {place} are damaged: their checksum differs"),
            ));
        }
        Ok(&self.buffer)
    }

    /// Opens a file, and checks its header.
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
        match checksum(&self.buffer) == said.checksum {
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

/// Cuts overlaps at blocks of `block` elements, and counts their first elements from the block's.
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
