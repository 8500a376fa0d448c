//! [`IndexedTokens`]: Megatron's pair of a `.bin` with the tokens and an `.idx` with the sequences and documents; [`IndexedWriter`], which
//! writes it.
//!
//! ```text
//! The .idx:
//! magic       9 bytes   MMIDIDX\0\0
//! version     u64       1
//! type        u8        1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
//! sequences   u64       S
//! documents   u64       D, the number of entries below: one more than there are documents
//! sizes       i32 x S   tokens of each sequence
//! pointers    i64 x S   the byte of the .bin at which it begins
//! documents   i64 x D   0, and the number of the sequence after each document
//! modes       i8 x S    only of several modalities; not read here
//! ```

use std::ffi::OsString;
use std::io;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_parallel::Content;

use super::file::{EncodedTokens, Encoding};
use super::{TokenWriter, Tokens, check_range};

use crate::Result;
use crate::data::file::{RandomAccessFile, write_whole};
use crate::data::wrong;

/// Tokens with an index of their sequences and documents, as Megatron-LM writes them. They are read a window at a time; of the index
/// one document in 256 is kept in memory.
#[derive(Debug)]
pub struct IndexedTokens {
    index: Index,
    documents: DocumentIndex,
    tokens: EncodedTokens,
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
        let file = RandomAccessFile::open(&bin)?;
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
        let tokens = EncodedTokens::new(file, index.encoding)?;
        Ok(IndexedTokens { documents: DocumentIndex::new(&index)?, index, tokens })
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

    fn contents(&self) -> Vec<Content> {
        let (bin, idx) = pair(self.tokens.file.path());
        vec![Content::File(bin), Content::File(idx)]
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

/// What every index begins with.
pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// The version that there is.
pub(super) const VERSION: u64 = 1;
/// Bytes before the sizes.
const HEADER: u64 = 34;
/// Bytes that are checked at a time: whole numbers of every width.
const BLOCK: usize = 1 << 16;

/// The integers that tokens are stored as, by their code.
pub(super) const CODES: [(u8, Encoding); 6] = [
    (1, Encoding::U8),
    (2, Encoding::I8),
    (3, Encoding::I16),
    (4, Encoding::I32),
    (5, Encoding::I64),
    (8, Encoding::U16),
];

/// An open index, whose contents have been checked.
#[derive(Debug)]
pub(super) struct Index {
    file: RandomAccessFile,
    pub(super) encoding: Encoding,
    pub(super) sequences: u64,
    /// Entries of the list of documents.
    entries: u64,
    /// Tokens of all sequences.
    pub(super) tokens: u64,
}

impl Index {
    /// Opens an index, and goes through it once to see that it holds together.
    pub(super) fn open(path: &Path) -> Result<Index> {
        let file = RandomAccessFile::open(path)?;
        let encoding = header(&file)?;
        let (sequences, entries) = (u64::from_le_bytes(file.bytes(18)?), u64::from_le_bytes(file.bytes(26)?));
        let mut index = Index { file, encoding, sequences, entries, tokens: 0 };
        index.check_length()?;
        index.tokens = index.check_sequences()?;
        index.check_documents()?;
        Ok(index)
    }

    fn pointers_at(&self) -> u64 {
        HEADER + 4 * self.sequences
    }

    fn documents_at(&self) -> u64 {
        HEADER + 12 * self.sequences
    }

    /// Checks that the index has as many bytes as its counts need.
    fn check_length(&self) -> Result<()> {
        let (sequences, entries) = (u128::from(self.sequences), u128::from(self.entries));
        let wanted = u128::from(HEADER) + 12 * sequences + 8 * entries;
        let len = u128::from(self.file.len());
        if len == wanted || len == wanted + sequences {
            return Ok(());
        }
        let kind = if len < wanted { "a truncated index of" } else { "an index of" };
        let why = format!(
            "got {kind} {len} bytes, wanted {wanted} for {sequences} sequences and {entries} entries of documents"
        );
        Err(self.file.wrong(why))
    }

    /// Checks that each sequence begins where the one before ends. Returns the number of tokens.
    fn check_sequences(&self) -> Result<u64> {
        let (size, mut tokens, mut number) = (self.encoding.size() as u64, 0u64, 0u64);
        self.file.each_block(HEADER..self.pointers_at(), BLOCK / 2, |at, sizes| {
            let mut pointers = vec![0; sizes.len() * 2];
            self.file.read(self.pointers_at() + (at - HEADER) * 2, &mut pointers)?;
            let pairs = sizes.as_chunks::<4>().0.iter().zip(pointers.as_chunks::<8>().0);
            for (&length, &pointer) in pairs {
                let (length, pointer) = (i32::from_le_bytes(length), i64::from_le_bytes(pointer));
                let length = u64::try_from(length).map_err(|_| {
                    self.file.wrong(format!("got sequence {number} of {length} tokens, wanted 0 or more"))
                })?;
                if u64::try_from(pointer) != Ok(tokens * size) {
                    let why = format!(
                        "got sequence {number} at byte {pointer}, wanted it at {}, where the one before ends",
                        tokens * size
                    );
                    return Err(self.file.wrong(why));
                }
                (tokens, number) = (tokens + length, number + 1);
            }
            Ok(())
        })?;
        Ok(tokens)
    }

    /// Checks that documents begin at 0 and follow each other.
    fn check_documents(&self) -> Result<()> {
        let (mut last, mut number) = (0, 0u64);
        let all = self.documents_at()..self.documents_at() + 8 * self.entries;
        self.file.each_block(all, BLOCK, |_, block| {
            for &entry in block.as_chunks::<8>().0 {
                let entry = i64::from_le_bytes(entry);
                let fits = entry >= last && entry as u64 <= self.sequences && (number > 0 || entry == 0);
                if !fits {
                    let wanted = if number == 0 { 0..=0 } else { last..=self.sequences as i64 };
                    let why = format!(
                        "got {entry} as entry {number} of the documents, wanted a sequence of {wanted:?}"
                    );
                    return Err(self.file.wrong(why));
                }
                (last, number) = (entry, number + 1);
            }
            Ok(())
        })
    }

    /// The number of document starts: one for each entry, and one at 0 if there are no entries.
    pub(super) fn documents(&self) -> u64 {
        self.entries.max(1)
    }

    /// The token at which document `number` begins. A document that begins at the end has no tokens.
    pub(super) fn document_start(&self, number: u64) -> Result<u64> {
        if number == 0 {
            return Ok(0);
        }
        let entry = self.file.bytes(self.documents_at() + 8 * number)?;
        self.sequence_start(u64::from_le_bytes(entry))
    }

    /// The token at which a sequence begins; for the number after the last sequence, the number of tokens.
    pub(super) fn sequence_start(&self, number: u64) -> Result<u64> {
        if number >= self.sequences {
            return Ok(self.tokens);
        }
        let pointer = self.file.bytes(self.pointers_at() + 8 * number)?;
        Ok(u64::from_le_bytes(pointer) / self.encoding.size() as u64)
    }
}

/// Checks the magic and the version, and returns how tokens are stored.
fn header(file: &RandomAccessFile) -> Result<Encoding> {
    if file.len() < HEADER {
        return Err(
            file.wrong(format!("got a truncated index of {} bytes, wanted at least {HEADER}", file.len()))
        );
    }
    let magic = file.bytes::<9>(0)?;
    if &magic != MAGIC {
        let (got, wanted) = (magic.escape_ascii(), MAGIC.escape_ascii());
        return Err(
            file.wrong(format!("got the magic `{got}`, wanted `{wanted}`: this is no index of tokens"))
        );
    }
    let version = u64::from_le_bytes(file.bytes(9)?);
    if version != VERSION {
        return Err(file.wrong(format!("got version {version}, wanted {VERSION}")));
    }
    let [code] = file.bytes(17)?;
    let known = CODES.iter().find(|(known, _)| *known == code).map(|&(_, encoding)| encoding);
    known.ok_or_else(|| {
        let name = match code {
            6 => " (f64)",
            7 => " (f32)",
            _ => "",
        };
        file.wrong(format!(
            "got tokens of type {code}{name}, wanted an integer: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16"
        ))
    })
}

/// One document in so many is kept in memory.
const STRIDE: u64 = 256;

/// The first tokens of documents 0, 256, 512, ..
#[derive(Debug)]
pub(super) struct DocumentIndex(Vec<u64>);

impl DocumentIndex {
    pub(super) fn new(index: &Index) -> Result<DocumentIndex> {
        let kept = (0..index.documents()).step_by(STRIDE as usize);
        Ok(DocumentIndex(kept.map(|number| index.document_start(number)).collect::<Result<_>>()?))
    }

    /// The places in `range` at which a document with tokens begins.
    pub(super) fn starts(&self, index: &Index, range: Range<u64>) -> Result<Vec<u64>> {
        let mut starts = Vec::new();
        for number in self.first_from(index, range.start)?..index.documents() {
            let start = index.document_start(number)?;
            if start >= range.end {
                break;
            }
            // A document without tokens begins where the next does.
            if starts.last() != Some(&start) {
                starts.push(start);
            }
        }
        Ok(starts)
    }

    /// The first document that begins at `place` or later.
    fn first_from(&self, index: &Index, place: u64) -> Result<u64> {
        let kept = self.0.partition_point(|&start| start < place) as u64;
        // The one kept before it begins earlier, so the search is among those between.
        let (mut low, mut high) = ((kept.max(1) - 1) * STRIDE, (kept * STRIDE).min(index.documents()));
        while low < high {
            let middle = low + (high - low) / 2;
            match index.document_start(middle)? < place {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Ok(low)
    }
}

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

/// Writes the `.idx`, in the format of this module's page.
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
