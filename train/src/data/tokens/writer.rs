//! [`TokenWriter`]: appends tokens to a file that is being written.

use std::io::Write;
use std::path::Path;

use super::super::wrong;
use super::check_vocabulary;
use super::encoding::Encoding;
use crate::Result;

/// Appends tokens; [`TokenFile::write`](super::TokenFile::write) makes it.
pub struct TokenWriter<'a> {
    out: &'a mut dyn Write,
    path: &'a Path,
    encoding: Encoding,
    vocabulary: u32,
    len: u64,
    bytes: Vec<u8>,
}

/// Tokens that are encoded at a time.
const BLOCK: usize = 1 << 15;

impl<'a> TokenWriter<'a> {
    pub(super) fn new(
        out: &'a mut dyn Write,
        path: &'a Path,
        encoding: Encoding,
        vocabulary: u32,
    ) -> TokenWriter<'a> {
        TokenWriter { out, path, encoding, vocabulary, len: 0, bytes: Vec::new() }
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// If one is not in the vocabulary, or the file cannot be written.
    pub fn push(&mut self, tokens: &[u32]) -> Result<()> {
        check_vocabulary(self.path.display(), tokens, self.len, self.vocabulary)?;
        for block in tokens.chunks(BLOCK) {
            self.bytes.clear();
            self.encoding.encode(block, &mut self.bytes);
            self.out.write_all(&self.bytes).map_err(|e| wrong(self.path.display(), e))?;
        }
        self.len += tokens.len() as u64;
        Ok(())
    }

    /// How many tokens there are so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of all tokens, of which there is to be one.
    pub(super) fn finish(self) -> Result<u64> {
        match self.len {
            0 => Err(wrong(self.path.display(), "got no tokens to write, wanted at least one")),
            len => Ok(len),
        }
    }
}
