//! [`TokenFile`]: nothing but tokens, as in nanoGPT's `.bin`.

use std::ops::Range;
use std::path::Path;

use super::super::file::{Bytes, write_whole};
use super::super::wrong;
use super::encoding::Encoding;
use super::{TokenWriter, Tokens, beyond, check_range, check_vocabulary};
use crate::Result;

/// Bytes of a token in a [`TokenFile`], which does not say so itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Width {
    /// Two bytes: vocabularies of up to 65,536 tokens, as in nanoGPT.
    #[default]
    U16,
    /// Four bytes.
    U32,
}

impl Width {
    pub(super) fn encoding(self) -> Encoding {
        match self {
            Width::U16 => Encoding::U16,
            Width::U32 => Encoding::U32,
        }
    }
}

/// A file of little-endian tokens without a header. It is read a window at a time, however large it is.
#[derive(Debug)]
pub struct TokenFile(Stored);

impl TokenFile {
    /// Opens a file of tokens of this width.
    ///
    /// # Errors
    /// If it cannot be opened, is empty, or does not consist of whole tokens.
    pub fn open(path: impl AsRef<Path>, width: Width) -> Result<TokenFile> {
        Ok(TokenFile(Stored::new(Bytes::open(path.as_ref())?, width.encoding())?))
    }

    /// Refuses to read tokens from `vocabulary` on.
    #[must_use]
    pub fn with_vocabulary(self, vocabulary: u32) -> TokenFile {
        TokenFile(self.0.with_vocabulary(vocabulary))
    }

    /// Replaces the file at `path` by the tokens that `fill` pushes, once all of them are on disk; after an error it is what it was.
    /// Returns their number.
    ///
    /// # Errors
    /// If the vocabulary does not fit the width, a token is beyond it, there are no tokens, the file cannot be written, or what `fill` returned.
    ///
    /// ```
    /// use phalanx_train::data::{TokenFile, Tokens, Width};
    /// let path = std::env::temp_dir().join(format!("phalanx-doc-{}.bin", std::process::id()));
    /// TokenFile::write(&path, Width::U16, 50_257, |tokens| tokens.push(&[15496, 995]))?;
    /// let tokens = TokenFile::open(&path, Width::U16)?;
    /// let mut window = [0; 2];
    /// tokens.copy(0, &mut window)?;
    /// assert_eq!((tokens.len(), window), (2, [15496, 995]));
    /// # std::fs::remove_file(&path).ok();
    /// # Ok::<(), phalanx_train::Error>(())
    /// ```
    pub fn write(
        path: impl AsRef<Path>,
        width: Width,
        vocabulary: u32,
        fill: impl FnOnce(&mut TokenWriter<'_>) -> Result<()>,
    ) -> Result<u64> {
        let path = path.as_ref();
        if u64::from(vocabulary) > width.encoding().vocabulary_max() {
            let why = format!(
                "got a vocabulary of {vocabulary} tokens, wanted at most {} for tokens of two bytes; `Width::U32` has room for more",
                width.encoding().vocabulary_max()
            );
            return Err(wrong(path.display(), why));
        }
        write_whole(path, |out| {
            let mut writer = TokenWriter::new(out, path, width.encoding(), vocabulary);
            fill(&mut writer)?;
            writer.finish()
        })
    }
}

impl Tokens for TokenFile {
    fn len(&self) -> u64 {
        self.0.len
    }

    fn copy(&self, at: u64, to: &mut [u32]) -> Result<()> {
        self.0.copy(at, to)
    }

    fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        check_range(self.0.file.path().display(), &range, self.0.len)?;
        Ok(if range.contains(&0) { vec![0] } else { vec![] })
    }
}

/// Tokens that fill a file.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) file: Bytes,
    encoding: Encoding,
    pub(super) len: u64,
    vocabulary: Option<u32>,
}

/// Tokens that are read at a time.
const BLOCK: usize = 1 << 15;

impl Stored {
    /// All bytes of a file.
    pub(super) fn new(file: Bytes, encoding: Encoding) -> Result<Stored> {
        let size = encoding.size() as u64;
        if !file.len().is_multiple_of(size) {
            return Err(file.wrong(format!("got {} bytes, wanted whole tokens of {size} bytes", file.len())));
        }
        Ok(Stored { len: file.len() / size, file, encoding, vocabulary: None })
    }

    pub(super) fn with_vocabulary(self, vocabulary: u32) -> Stored {
        Stored { vocabulary: Some(vocabulary), ..self }
    }

    pub(super) fn copy(&self, at: u64, to: &mut [u32]) -> Result<()> {
        let (size, path) = (self.encoding.size(), self.file.path());
        check_range(path.display(), &(at..at.saturating_add(to.len() as u64)), self.len)?;
        let mut bytes = vec![0; to.len().min(BLOCK) * size];
        for (block, to) in to.chunks_mut(BLOCK).enumerate() {
            let at = at + (block * BLOCK) as u64;
            let bytes = &mut bytes[..to.len() * size];
            self.file.read(at * size as u64, bytes)?;
            let vocabulary = self.vocabulary.unwrap_or(u32::MAX);
            let decoded = self.encoding.decode(bytes, to);
            decoded.map_err(|(place, value)| beyond(path.display(), value, at + place as u64, vocabulary))?;
            if self.vocabulary.is_some() {
                check_vocabulary(path.display(), to, at, vocabulary)?;
            }
        }
        Ok(())
    }
}
