//! Text files in blocks, cut where documents or lines end.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::super::super::wrong;
use crate::Result;

/// Some text of one file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Without the separator after it.
    pub(super) text: String,
    /// Whether a document ends here.
    pub(super) ends_document: bool,
    /// Bytes of the file in this block, with the separator.
    pub(super) bytes: u64,
}

/// The blocks of some files, in order.
pub(super) struct Blocks<'a> {
    inputs: std::slice::Iter<'a, PathBuf>,
    separator: Option<&'a [u8]>,
    block: usize,
    /// A block of this size is cut even if no document or line ends in it.
    block_max: usize,
    all_bytes: u64,
    current: Option<OpenFile<'a>>,
}

/// A file that is being read.
struct OpenFile<'a> {
    file: File,
    path: &'a Path,
    /// Bytes that were read and are in no block yet.
    rest: Vec<u8>,
    /// Their offset in the file.
    at: u64,
    /// All of the file has been read.
    ended: bool,
}

/// A block grows to so many times its size in search of the end of a document or line.
const GROWTH: usize = 16;
/// Bytes of the longest character.
const CHARACTER: usize = 4;

/// Where a block ends, and where the next begins.
struct Cut {
    end: usize,
    next: usize,
    ends_document: bool,
}

impl<'a> Blocks<'a> {
    /// Blocks of about `block` bytes.
    pub(super) fn new(inputs: &'a [PathBuf], separator: Option<&'a str>, block: usize) -> Result<Blocks<'a>> {
        let bytes =
            |path: &PathBuf| std::fs::metadata(path).map(|m| m.len()).map_err(|e| wrong(path.display(), e));
        let all_bytes = inputs.iter().map(bytes).sum::<Result<u64>>()?;
        let separator = separator.map(str::as_bytes);
        let block_max = GROWTH * block.max(CHARACTER).max(separator.map_or(0, <[u8]>::len));
        Ok(Blocks { inputs: inputs.iter(), separator, block, block_max, all_bytes, current: None })
    }

    /// Bytes of all files.
    pub(super) fn all_bytes(&self) -> u64 {
        self.all_bytes
    }

    /// The next blocks, up to so many; none at the end.
    pub(super) fn take(&mut self, blocks: usize) -> Result<Vec<Block>> {
        (0..blocks).map_while(|_| self.next().transpose()).collect()
    }

    fn next(&mut self) -> Result<Option<Block>> {
        let Some(mut current) = self.current.take().map_or_else(|| self.open(), |c| Ok(Some(c)))? else {
            return Ok(None);
        };
        let mut size = self.block;
        loop {
            current.fill(size)?;
            let cut = match current.ended {
                true => Some(Cut { end: current.rest.len(), next: current.rest.len(), ends_document: true }),
                false if size < self.block_max => self.natural_cut(&current.rest),
                false => self.natural_cut(&current.rest).or_else(|| Some(self.forced_cut(&current.rest))),
            };
            if let Some(cut) = cut {
                let block = current.cut(&cut)?;
                self.current = (!current.ended).then_some(current);
                return Ok(Some(block));
            }
            size = (size * 2).min(self.block_max);
        }
    }

    fn open(&mut self) -> Result<Option<OpenFile<'a>>> {
        let Some(path) = self.inputs.next() else { return Ok(None) };
        let file = File::open(path).map_err(|e| wrong(path.display(), e))?;
        Ok(Some(OpenFile { file, path, rest: Vec::new(), at: 0, ended: false }))
    }

    /// The end of the last document, or of the last line where files are documents.
    fn natural_cut(&self, text: &[u8]) -> Option<Cut> {
        match self.separator {
            Some(separator) => {
                let end = text.windows(separator.len()).rposition(|part| part == separator)?;
                Some(Cut { end, next: end + separator.len(), ends_document: true })
            }
            None => Some(Cut::inside(last_line_end(text)?)),
        }
    }

    /// The end of the last line, or else of the last character: not within the last bytes, where a separator may have begun.
    fn forced_cut(&self, text: &[u8]) -> Cut {
        let most = text.len().saturating_sub(self.separator.map_or(1, <[u8]>::len).max(2) - 1);
        let is_start = |at: &usize| text[*at] & 0xC0 != 0x80;
        let character = || (most.saturating_sub(CHARACTER - 1)..=most).rev().find(is_start);
        Cut::inside(last_line_end(&text[..most]).or_else(character).unwrap_or(most))
    }
}

impl Cut {
    /// A cut in the middle of a document.
    fn inside(end: usize) -> Cut {
        Cut { end, next: end, ends_document: false }
    }
}

/// The offset after the last complete line.
fn last_line_end(text: &[u8]) -> Option<usize> {
    text.iter().rposition(|&byte| byte == b'\n').map(|place| place + 1)
}

impl OpenFile<'_> {
    /// Reads until there are `size` bytes or the file has ended.
    fn fill(&mut self, size: usize) -> Result<()> {
        let missing = size.saturating_sub(self.rest.len()) as u64;
        let read = (&mut self.file).take(missing).read_to_end(&mut self.rest);
        let read = read.map_err(|e: io::Error| wrong(self.path.display(), e))?;
        self.ended = (read as u64) < missing;
        Ok(())
    }

    /// Takes a block off the rest.
    fn cut(&mut self, cut: &Cut) -> Result<Block> {
        let rest = self.rest.split_off(cut.next);
        let mut text = std::mem::replace(&mut self.rest, rest);
        text.truncate(cut.end);
        let text = String::from_utf8(text).map_err(|e| {
            let at = self.at + e.utf8_error().valid_up_to() as u64;
            wrong(
                self.path.display(),
                format!("got bytes that are not UTF-8 at byte {at}, wanted UTF-8 text"),
            )
        })?;
        self.at += cut.next as u64;
        Ok(Block { text, ends_document: cut.ends_document, bytes: cut.next as u64 })
    }
}
