//! Megatron's `.idx`: which tokens of a `.bin` are a sequence, and which sequences are a document.
//!
//! ```text
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

use std::path::Path;

use super::super::file::Bytes;
use super::encoding::Encoding;
use crate::Result;

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
    file: Bytes,
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
        let file = Bytes::open(path)?;
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

    /// The index has the bytes that its counts ask for.
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

    /// Every sequence begins where the one before ends. Returns the number of tokens.
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

    /// Documents begin at 0 and follow each other.
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

    /// Documents that can begin: one at each entry, and one at 0 where there are no entries.
    pub(super) fn documents(&self) -> u64 {
        self.entries.max(1)
    }

    /// The token at which document `number` begins; those that begin at the end have no tokens.
    pub(super) fn document_start(&self, number: u64) -> Result<u64> {
        if number == 0 {
            return Ok(0);
        }
        let entry = self.file.bytes(self.documents_at() + 8 * number)?;
        self.sequence_start(u64::from_le_bytes(entry))
    }

    /// The token at which a sequence begins, or of the one after the last, where they end.
    pub(super) fn sequence_start(&self, number: u64) -> Result<u64> {
        if number >= self.sequences {
            return Ok(self.tokens);
        }
        let pointer = self.file.bytes(self.pointers_at() + 8 * number)?;
        Ok(u64::from_le_bytes(pointer) / self.encoding.size() as u64)
    }
}

/// Checks what comes before the counts, and says how tokens are stored.
fn header(file: &Bytes) -> Result<Encoding> {
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
