//! [`Checkpoint`]: one that is there.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_tensor::DType;
use rayon::prelude::*;

use super::folder::Folder;
use super::index::Index;
use super::reader::Reader;
use super::{Settings, file_error};
use crate::Result;

/// A complete checkpoint. Opening reads its index only; reading parts reads the blocks that hold some of them.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) path: PathBuf,
    pub(super) index: Index,
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
