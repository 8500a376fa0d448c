//! [`IndexedTokens`]: Megatron's pair of a `.bin` with the tokens and an `.idx` with the sequences and documents.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::super::file::Bytes;
use super::super::wrong;
use super::documents::Documents;
use super::index::Index;
use super::raw::Stored;
use super::{Tokens, check_range};
use crate::Result;

/// Tokens with an index of their sequences and documents, as Megatron-LM writes them. They are read a window at a time; of the index
/// one document in 256 is kept in memory.
#[derive(Debug)]
pub struct IndexedTokens {
    index: Index,
    documents: Documents,
    tokens: Stored,
}

impl IndexedTokens {
    /// Opens the pair with this prefix; the path of either file will do.
    ///
    /// # Errors
    /// If a file cannot be opened or is empty; if the index has another magic or version, is truncated, names a type that is no integer,
    /// or has sequences or documents that do not follow each other; if the sizes of the sequences are not those of the `.bin`.
    pub fn open(prefix: impl AsRef<Path>) -> Result<IndexedTokens> {
        let (bin, idx) = pair(prefix.as_ref());
        let index = Index::open(&idx)?;
        let file = Bytes::open(&bin)?;
        let wanted = u128::from(index.tokens) * index.encoding.size() as u128;
        if u128::from(file.len()) != wanted {
            let why = format!(
                "got {} bytes, wanted {wanted}: {} has {} sequences of {} tokens in all, {} bytes each",
                file.len(),
                idx.display(),
                index.sequences,
                index.tokens,
                index.encoding.size()
            );
            return Err(file.wrong(why));
        }
        let tokens = Stored::new(file, index.encoding)?;
        Ok(IndexedTokens { documents: Documents::new(&index)?, index, tokens })
    }

    /// Refuses to read tokens from `vocabulary` on.
    #[must_use]
    pub fn with_vocabulary(self, vocabulary: u32) -> IndexedTokens {
        IndexedTokens { tokens: self.tokens.with_vocabulary(vocabulary), ..self }
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> u64 {
        self.index.sequences
    }

    /// The places of a sequence's tokens.
    ///
    /// # Errors
    /// If there is no such sequence, or the index cannot be read.
    pub fn sequence(&self, number: u64) -> Result<Range<u64>> {
        if number >= self.index.sequences {
            let why = format!("got sequence {number}, wanted one of {}", self.index.sequences);
            return Err(wrong("IndexedTokens", why));
        }
        Ok(self.index.sequence_start(number)?..self.index.sequence_start(number + 1)?)
    }
}

impl Tokens for IndexedTokens {
    fn len(&self) -> u64 {
        self.tokens.len
    }

    fn copy(&self, at: u64, to: &mut [u32]) -> Result<()> {
        self.tokens.copy(at, to)
    }

    fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        check_range(self.tokens.file.path().display(), &range, self.tokens.len)?;
        self.documents.starts(&self.index, range)
    }
}

/// The paths of the `.bin` and of the `.idx` with this prefix. Other dots belong to the prefix.
pub(super) fn pair(prefix: &Path) -> (PathBuf, PathBuf) {
    let ending = prefix.extension().is_some_and(|e| e == "idx" || e == "bin");
    let prefix = if ending { prefix.with_extension("") } else { prefix.to_path_buf() };
    let with = |ending: &str| {
        let mut path = OsString::from(&prefix);
        path.push(ending);
        PathBuf::from(path)
    };
    (with(".bin"), with(".idx"))
}
