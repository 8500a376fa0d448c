//! [`Checkpoint`]: one that is there, to be read under any layout.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_kernels as kernels;
use phalanx_nn::Mismatch;
use phalanx_tensor::{DType, Tensor};

use super::folder::Folder;
use super::index::{Index, Stored};
use super::reader::{Reader, by_block};
use super::{Settings, file_error};
use crate::Result;
use crate::comm::Comm;
use crate::part::{Overlap, Part, Place, fill};
use crate::tell::{all_ok, tell};

/// A complete checkpoint. Opening reads its index only; reading parts reads the blocks that hold some of them.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    pub(super) index: Index,
}

/// A part that is to be read, and whether it may be converted.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) part: Part,
    pub(super) convert: bool,
}

/// What pieces of a tensor, by their numbers, have of a part.
type Sources = Vec<(usize, Vec<Overlap>)>;

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
        Ok(Checkpoint { path: path.into(), index })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the run said of itself when it was saved.
    pub fn settings(&self) -> &Settings {
        &self.index.settings
    }

    /// Its tensors: name, dtype, and the whole's shape as one of the ranks saw it.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, DType, &[usize])> {
        self.index.tensors.iter().map(|(name, stored)| (name.as_str(), stored.dtype, &stored.shape[..]))
    }

    /// Reads values into the tensors of parts, which must be of the dtype that was saved. Ranks need not read together.
    ///
    /// # Errors
    /// If tensors are not there or of another size or dtype; then nothing is changed. If a file cannot be read or is
    /// damaged; then some tensors have their new values and others have not.
    pub fn read(&self, parts: &[Part]) -> Result<()> {
        self.read_wanted(&self.all(parts, false))
    }

    /// [`Checkpoint::read`], which converts values to the dtypes of the parts.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_converted(&self, parts: &[Part]) -> Result<()> {
        self.read_wanted(&self.all(parts, true))
    }

    /// [`Checkpoint::read`] on all ranks, each its parts. Every tensor of the checkpoint must be one that some rank reads.
    ///
    /// # Errors
    /// What goes wrong on any rank, on every rank; or tensors that no rank wants.
    pub fn load(&self, comm: &Comm, parts: &[Part]) -> Result<()> {
        let names: Vec<&str> = parts.iter().map(|part| &*part.name).collect();
        self.load_wanted(comm, &self.all(parts, false), &names)
    }

    /// Reads everything and compares checksums.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged, naming file and tensor.
    pub fn verify(&self) -> Result<()> {
        let mut reader = Reader::new(&self.path, &self.index);
        (0..self.index.files.len()).try_for_each(|file| reader.open(file))?;
        for (name, stored) in &self.index.tensors {
            for piece in &stored.pieces {
                for number in 0..piece.checksums.len() {
                    reader.block(name, piece, stored.dtype.size(), number)?;
                }
            }
        }
        Ok(())
    }

    fn all(&self, parts: &[Part], convert: bool) -> Vec<Wanted> {
        parts.iter().map(|part| Wanted { part: part.clone(), convert }).collect()
    }

    /// Reads on all ranks; `known` are names that this rank has a use for, read or not.
    pub(super) fn load_wanted(&self, comm: &Comm, wanted: &[Wanted], known: &[&str]) -> Result<()> {
        let read = self.read_wanted(wanted).map_err(|e| e.to_string());
        let has = |name: &String| known.contains(&name.as_str());
        let uses: Vec<bool> = self.index.tensors.keys().map(has).collect();
        let all = all_ok(comm, tell(comm, &read.map(|()| uses))?)?;
        let unused = |(number, name): (usize, &String)| {
            let used = all.iter().any(|uses| uses.get(number).is_some_and(|&used| used));
            (!used).then(|| name.clone())
        };
        let unexpected = self.index.tensors.keys().enumerate().filter_map(unused).collect();
        Ok(Mismatch { unexpected, ..Mismatch::default() }.check(&self.path.display().to_string())?)
    }

    fn read_wanted(&self, wanted: &[Wanted]) -> Result<()> {
        let (mut problems, mut plans) = (Mismatch::default(), Vec::new());
        for Wanted { part, convert } in wanted {
            let (name, place) = (&part.name, part.place()?);
            let Some((_, stored)) = self.index.tensors.get_key_value(name) else {
                problems.missing.push(name.clone());
                continue;
            };
            if stored.shape.iter().product::<usize>() != place.whole() {
                problems.misshaped.push((name.clone(), stored.shape.clone(), place.shape));
                continue;
            }
            let (got, wanted) = (stored.dtype, part.values.dtype());
            if got != wanted && !convert && place.elements() > 0 {
                return Err(self.error(format!("tensor {name:?} was saved as {got}, wanted {wanted}")));
            }
            let sources = sources(stored, &place);
            if !fill(place.elements(), sources.iter().flat_map(|(_, overlaps)| overlaps.iter().copied())) {
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
        part: &Part,
        stored: &Stored,
        sources: &Sources,
    ) -> Result<()> {
        if part.values.device().is_meta() {
            return Ok(());
        }
        let flat = part.values.with_shape(&[part.values.numel()])?;
        if stored.dtype == flat.dtype() {
            return self.read_into(reader, &part.name, &mut flat.clone(), stored, sources);
        }
        let mut read = Tensor::empty(flat.shape(), stored.dtype, flat.device())?;
        self.read_into(reader, &part.name, &mut read, stored, sources)?;
        Ok(kernels::copy_(&mut flat.clone(), &kernels::cast(&read, flat.dtype())?)?)
    }

    /// Reads what pieces have of a tensor of one dimension.
    fn read_into(
        &self,
        reader: &mut Reader<'_>,
        name: &str,
        to: &mut Tensor,
        stored: &Stored,
        sources: &Sources,
    ) -> Result<()> {
        let (size, start) = (stored.dtype.size(), to.offset());
        for (number, overlaps) in sources {
            let piece = &stored.pieces[*number];
            for (block, overlaps) in by_block(overlaps, self.index.block / size) {
                let bytes = reader.block(name, piece, size, block)?;
                let mut values = to.write_bytes("load")?;
                for Overlap { from, to, count } in overlaps {
                    let to = (start + to) * size;
                    values[to..to + count * size].copy_from_slice(&bytes[from * size..(from + count) * size]);
                }
            }
        }
        Ok(())
    }

    fn error(&self, why: String) -> crate::Error {
        file_error(&self.path, why)
    }
}

/// Which pieces have what of a part.
fn sources(stored: &Stored, place: &Place) -> Sources {
    let of = |(number, piece): (usize, &super::index::Piece)| (number, piece.place.overlaps(place));
    stored.pieces.iter().enumerate().map(of).filter(|(_, overlaps)| !overlaps.is_empty()).collect()
}
