//! [`IndexedWriter`]: writes Megatron's `.bin` and `.idx`.

use std::io::{self, Write};
use std::path::Path;

use super::super::file::write_whole;
use super::super::wrong;
use super::encoding::Encoding;
use super::index::{CODES, MAGIC, VERSION};
use super::indexed::pair;
use super::{IndexedTokens, TokenWriter};
use crate::Result;

/// Appends sequences and ends documents; [`IndexedTokens::write`] makes it.
pub struct IndexedWriter<'a> {
    tokens: TokenWriter<'a>,
    sizes: Vec<i32>,
    /// The number of the sequence after each document.
    documents: Vec<i64>,
}

/// Megatron stores tokens of smaller vocabularies in two bytes.
const TWO_BYTES_BELOW: u32 = 65_500;

impl IndexedTokens {
    /// Replaces the pair of files with this prefix by the sequences that `fill` pushes: two bytes a token for vocabularies of less than
    /// 65,500 tokens, else four. Each file is replaced once all of it is on disk; the old index goes first, so an old index never lies
    /// beside a new `.bin`. Returns the number of tokens.
    ///
    /// # Errors
    /// If the vocabulary has more than 2^31 tokens, a token is beyond it, there are no tokens, a file cannot be written, or what `fill` returned.
    ///
    /// ```
    /// use phalanx_train::data::{IndexedTokens, Tokens};
    /// let prefix = std::env::temp_dir().join(format!("phalanx-doc-indexed-{}", std::process::id()));
    /// IndexedTokens::write(&prefix, 100, |writer| {
    ///     writer.sequence(&[1, 2, 3])?;
    ///     writer.end_document();
    ///     writer.sequence(&[4, 5])?;
    ///     writer.end_document();
    ///     Ok(())
    /// })?;
    /// assert_eq!(IndexedTokens::open(&prefix)?.document_starts(0..5)?, [0, 3]);
    /// # std::fs::remove_file(prefix.with_extension("bin")).ok();
    /// # std::fs::remove_file(prefix.with_extension("idx")).ok();
    /// # Ok::<(), phalanx_train::Error>(())
    /// ```
    pub fn write(
        prefix: impl AsRef<Path>,
        vocabulary: u32,
        fill: impl FnOnce(&mut IndexedWriter<'_>) -> Result<()>,
    ) -> Result<u64> {
        let (bin, idx) = pair(prefix.as_ref());
        let encoding = if vocabulary < TWO_BYTES_BELOW { Encoding::U16 } else { Encoding::I32 };
        if u64::from(vocabulary) > encoding.vocabulary_max() {
            let why = format!(
                "got a vocabulary of {vocabulary} tokens, wanted at most {}",
                encoding.vocabulary_max()
            );
            return Err(wrong(bin.display(), why));
        }
        let (sizes, documents, tokens) = write_whole(&bin, |out| {
            let tokens = TokenWriter::new(out, &bin, encoding, vocabulary);
            let mut writer = IndexedWriter { tokens, sizes: Vec::new(), documents: vec![0] };
            fill(&mut writer)?;
            writer.end_document();
            let tokens = writer.tokens.finish()?;
            match std::fs::remove_file(&idx) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(wrong(idx.display(), e)),
                _ => Ok((writer.sizes, writer.documents, tokens)),
            }
        })?;
        write_whole(&idx, |out| {
            write_index(out, encoding, &sizes, &documents).map_err(|e| wrong(idx.display(), e))
        })?;
        Ok(tokens)
    }
}

impl IndexedWriter<'_> {
    /// Appends a sequence to the current document.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, the sequence has 2^31 tokens or more, or the file cannot be written.
    pub fn sequence(&mut self, tokens: &[u32]) -> Result<()> {
        let size = i32::try_from(tokens.len()).map_err(|_| {
            wrong(
                "IndexedTokens",
                format!("got a sequence of {} tokens, wanted at most {}", tokens.len(), i32::MAX),
            )
        })?;
        self.tokens.push(tokens)?;
        self.sizes.push(size);
        Ok(())
    }

    /// Ends the document of the sequences since the last one ended, if there are any.
    pub fn end_document(&mut self) {
        let sequences = self.sizes.len() as i64;
        if self.documents.last() != Some(&sequences) {
            self.documents.push(sequences);
        }
    }

    /// How many tokens there are so far.
    pub fn len(&self) -> u64 {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// Writes the index of a `.bin` that is there: one sequence a document, of these lengths.
pub(super) fn write_document_index(bin: &Path, encoding: Encoding, lengths: &[u64]) -> Result<()> {
    // Megatron has no unsigned type of four bytes; tokens below 2^31 are the same in a signed one.
    let encoding = if encoding == Encoding::U32 { Encoding::I32 } else { encoding };
    let (_, idx) = pair(bin);
    let size = |&length: &u64| {
        i32::try_from(length).map_err(|_| {
            wrong(bin.display(), format!("got a document of {length} tokens, wanted at most {}", i32::MAX))
        })
    };
    let sizes = lengths.iter().map(size).collect::<Result<Vec<i32>>>()?;
    let documents: Vec<i64> = (0..=sizes.len() as i64).collect();
    write_whole(&idx, |out| {
        write_index(out, encoding, &sizes, &documents).map_err(|e| wrong(idx.display(), e))
    })
}

/// See [`super::index`].
fn write_index(out: &mut dyn Write, encoding: Encoding, sizes: &[i32], documents: &[i64]) -> io::Result<()> {
    let code = CODES.iter().find(|(_, known)| *known == encoding).map_or(0, |&(code, _)| code);
    out.write_all(MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&[code])?;
    out.write_all(&(sizes.len() as u64).to_le_bytes())?;
    out.write_all(&(documents.len() as u64).to_le_bytes())?;
    sizes.iter().try_for_each(|size| out.write_all(&size.to_le_bytes()))?;
    let mut pointer = 0i64;
    for &size in sizes {
        out.write_all(&pointer.to_le_bytes())?;
        pointer += i64::from(size) * encoding.size() as i64;
    }
    documents.iter().try_for_each(|document| out.write_all(&document.to_le_bytes()))
}
