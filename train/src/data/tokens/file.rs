//! [`TokenFile`]: a file of tokens without a header, as nanoGPT's `.bin`; [`TokenWriter`], which writes one; [`Encoding`], the integers
//! that tokens are stored as.

use std::io::Write;
use std::ops::Range;
use std::path::Path;

use phalanx_parallel::Content;

use super::{Tokens, beyond, check_range, check_vocabulary};

use crate::Result;
use crate::data::file::{RandomAccessFile, write_whole};
use crate::data::wrong;

/// Bytes of a token in a [`TokenFile`]. The file itself does not store them.
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
pub struct TokenFile(EncodedTokens);

impl TokenFile {
    /// Opens a file of tokens of this width.
    ///
    /// # Errors
    /// If it cannot be opened, is empty, or does not consist of whole tokens.
    pub fn open(path: impl AsRef<Path>, width: Width) -> Result<TokenFile> {
        Ok(TokenFile(EncodedTokens::new(RandomAccessFile::open(path.as_ref())?, width.encoding())?))
    }

    /// Refuses to read tokens from `vocabulary` on.
    #[must_use]
    pub fn with_vocabulary(self, vocabulary: u32) -> TokenFile {
        TokenFile(self.0.with_vocabulary(vocabulary))
    }

    /// Replaces the file at `path` by the tokens that `fill` pushes, once all of them are on disk. After an error the old file is
    /// unchanged. Returns the number of tokens.
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

    fn contents(&self) -> Vec<Content> {
        vec![Content::File(self.0.file.path().into())]
    }
}

/// Tokens that fill a file.
#[derive(Debug)]
pub(super) struct EncodedTokens {
    pub(super) file: RandomAccessFile,
    encoding: Encoding,
    pub(super) len: u64,
    vocabulary: Option<u32>,
}

/// Tokens that are read or written at a time.
const BLOCK: usize = 1 << 15;

impl EncodedTokens {
    /// All bytes of a file.
    pub(super) fn new(file: RandomAccessFile, encoding: Encoding) -> Result<EncodedTokens> {
        let size = encoding.size() as u64;
        if !file.len().is_multiple_of(size) {
            return Err(file.wrong(format!("got {} bytes, wanted whole tokens of {size} bytes", file.len())));
        }
        Ok(EncodedTokens { len: file.len() / size, file, encoding, vocabulary: None })
    }

    pub(super) fn with_vocabulary(self, vocabulary: u32) -> EncodedTokens {
        EncodedTokens { vocabulary: Some(vocabulary), ..self }
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

/// Appends tokens to a file; [`TokenFile::write`](super::TokenFile::write) makes it.
pub struct TokenWriter<'a> {
    out: &'a mut dyn Write,
    path: &'a Path,
    encoding: Encoding,
    vocabulary: u32,
    len: u64,
    bytes: Vec<u8>,
}

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

    /// The number of all tokens, or an error if there are none.
    pub(super) fn finish(self) -> Result<u64> {
        match self.len {
            0 => Err(wrong(self.path.display(), "got no tokens to write, wanted at least one")),
            len => Ok(len),
        }
    }
}

/// The integer that a token is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl Encoding {
    /// Bytes of a token.
    pub(super) const fn size(self) -> usize {
        match self {
            Encoding::U8 | Encoding::I8 => 1,
            Encoding::U16 | Encoding::I16 => 2,
            Encoding::U32 | Encoding::I32 => 4,
            Encoding::I64 => 8,
        }
    }

    /// How many tokens, counted from 0, can be stored.
    pub(super) const fn vocabulary_max(self) -> u64 {
        match self {
            Encoding::I8 => 1 << 7,
            Encoding::U8 => 1 << 8,
            Encoding::I16 => 1 << 15,
            Encoding::U16 => 1 << 16,
            Encoding::I32 => 1 << 31,
            Encoding::U32 | Encoding::I64 => 1 << 32,
        }
    }

    /// Reads as many tokens as `to` has from `bytes`. The error has the index and the value of a number that is no token.
    pub(super) fn decode(self, bytes: &[u8], to: &mut [u32]) -> Result<(), (usize, i64)> {
        let mut wrong = None;
        let mut signed = |place: usize, value: i64| {
            u32::try_from(value).unwrap_or_else(|_| {
                wrong.get_or_insert((place, value));
                0
            })
        };
        macro_rules! each {
            ($type:ty, $convert:expr) => {{
                let (values, _) = bytes.as_chunks::<{ size_of::<$type>() }>();
                to.iter_mut().zip(values).enumerate().for_each(|(place, (to, &value))| {
                    *to = $convert(place, <$type>::from_le_bytes(value));
                })
            }};
        }
        match self {
            Encoding::U8 => each!(u8, |_, value: u8| value.into()),
            Encoding::U16 => each!(u16, |_, value: u16| value.into()),
            Encoding::U32 => each!(u32, |_, value: u32| value),
            Encoding::I8 => each!(i8, |place, value: i8| signed(place, value.into())),
            Encoding::I16 => each!(i16, |place, value: i16| signed(place, value.into())),
            Encoding::I32 => each!(i32, |place, value: i32| signed(place, value.into())),
            Encoding::I64 => each!(i64, |place, value: i64| signed(place, value)),
        }
        wrong.map_or(Ok(()), Err)
    }

    /// Appends tokens, which are below [`Encoding::vocabulary_max`].
    pub(super) fn encode(self, tokens: &[u32], bytes: &mut Vec<u8>) {
        for &token in tokens {
            let wide = u64::from(token).to_le_bytes();
            bytes.extend_from_slice(&wide[..self.size()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Encoding; 7] = [
        Encoding::U8,
        Encoding::I8,
        Encoding::U16,
        Encoding::I16,
        Encoding::U32,
        Encoding::I32,
        Encoding::I64,
    ];

    #[test]
    fn what_is_written_is_read_up_to_the_largest_token() {
        for encoding in ALL {
            let largest = (encoding.vocabulary_max() - 1) as u32;
            let tokens = [0, 1, largest, largest / 2];
            let mut bytes = Vec::new();
            encoding.encode(&tokens, &mut bytes);
            assert_eq!(bytes.len(), 4 * encoding.size());
            let mut read = [9; 4];
            encoding.decode(&bytes, &mut read).unwrap();
            assert_eq!(read, tokens, "{encoding:?}");
        }
    }

    #[test]
    fn the_first_number_that_is_no_token_is_found() {
        let mut to = [0; 3];
        assert_eq!(Encoding::I8.decode(&[1, 0xff, 0xfe], &mut to), Err((1, -1)));
        assert_eq!(Encoding::I16.decode(&[1, 0, 2, 0, 0, 0x80], &mut to), Err((2, -32768)));
        let mut bytes = (-5i32).to_le_bytes().to_vec();
        bytes.extend([0; 8]);
        assert_eq!(Encoding::I32.decode(&bytes, &mut to), Err((0, -5)));
        let wide: Vec<u8> = [3i64, 1 << 32, -1].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(Encoding::I64.decode(&wide, &mut to), Err((1, 1 << 32)));
    }
}
