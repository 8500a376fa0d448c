//! [`prepare`]: encodes text files to a token file, on all cores and in bounded memory.
//!
//! ```text
//!   Blocks         the inputs in pieces of about a MiB, cut where documents or lines end    (reads ahead)
//!   encode         the documents of each block, blocks side by side                         (rayon)
//!   DocumentSink   writes the tokens in the order of the text, each document to its file
//! ```

mod blocks;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use blocks::{Block, Blocks};
use phalanx_tensor::{PhiloxStream, RngKey};
use rayon::prelude::*;

use super::file::Encoding;
use super::indexed::{pair, write_document_index};
use super::{TokenFile, TokenWriter, Width};
use crate::Result;
use crate::data::wrong;

/// The options of [`prepare`]. By default each file is one document without an end-of-text token, tokens have two bytes, and there is no
/// validation file.
#[derive(Clone, Debug)]
#[must_use = "it prepares nothing by itself"]
pub struct PrepareOptions {
    vocabulary: u32,
    separator: Option<String>,
    end_of_text: Option<u32>,
    width: Width,
    validation: Option<(PathBuf, f64)>,
    index: bool,
    block_bytes: usize,
}

/// Bytes of text in a block.
const BLOCK_BYTES: usize = 1 << 20;
/// Blocks that are encoded at a time, for each thread. As many are read meanwhile.
const BLOCKS_PER_THREAD: usize = 2;

impl PrepareOptions {
    /// Tokens are below `vocabulary`.
    pub fn new(vocabulary: u32) -> PrepareOptions {
        PrepareOptions {
            vocabulary,
            separator: None,
            end_of_text: None,
            width: Width::U16,
            validation: None,
            index: false,
            block_bytes: BLOCK_BYTES,
        }
    }

    /// Also ends documents at this text, which is not encoded.
    pub fn with_separator(self, separator: impl Into<String>) -> PrepareOptions {
        PrepareOptions { separator: Some(separator.into()), ..self }
    }

    /// Writes this token after each document.
    pub fn with_end_of_text(self, token: u32) -> PrepareOptions {
        PrepareOptions { end_of_text: Some(token), ..self }
    }

    /// Writes tokens of this width.
    pub fn with_width(self, width: Width) -> PrepareOptions {
        PrepareOptions { width, ..self }
    }

    /// Writes `share` of the documents to a file of their own at `path`: of every 1 / `share` documents one, drawn at random, the same
    /// ones each time.
    pub fn with_validation(self, path: impl Into<PathBuf>, share: f64) -> PrepareOptions {
        PrepareOptions { validation: Some((path.into(), share)), ..self }
    }

    /// Writes Megatron's `.idx` beside each file, which says where documents begin: [`IndexedTokens`](super::IndexedTokens) reads the pair.
    pub fn with_index(self) -> PrepareOptions {
        PrepareOptions { index: true, ..self }
    }

    /// Reads about so many bytes at a time, in place of a MiB. A document, or a line where files are documents, is encoded as a whole if
    /// it has up to 16 times as many.
    pub fn with_block_bytes(self, bytes: usize) -> PrepareOptions {
        PrepareOptions { block_bytes: bytes.max(1), ..self }
    }

    /// Refuses options that would fail later.
    fn check(&self, inputs: &[PathBuf], output: &Path) -> Result<()> {
        let refuse = |why: String| Err(wrong("prepare", why));
        if inputs.is_empty() {
            return refuse("got no files to read, wanted at least one".into());
        }
        if self.separator.as_deref() == Some("") {
            return refuse("got an empty separator, wanted a text that documents are cut at".into());
        }
        if let Some(token) = self.end_of_text.filter(|&token| token >= self.vocabulary) {
            return refuse(format!(
                "got token {token} as end of text, wanted one of a vocabulary of {}",
                self.vocabulary
            ));
        }
        if let Some((_, share)) = &self.validation
            && !(*share > 0.0 && *share < 1.0)
        {
            return refuse(format!("got a validation share of {share}, wanted a number between 0 and 1"));
        }
        let outputs = [Some(output), self.validation.as_ref().map(|(path, _)| path.as_path())];
        let clash = |path: &&Path| inputs.iter().any(|input| input == path);
        if let Some(path) = outputs.iter().flatten().find(|path| clash(path)) {
            return refuse(format!(
                "got {} to read and to write, wanted another file to write",
                path.display()
            ));
        }
        if outputs[0] == outputs[1] {
            return refuse(format!(
                "got {} for training and for validation, wanted two files",
                output.display()
            ));
        }
        if let (Some((_, share)), None) = (&self.validation, &self.separator)
            && !splits_documents(inputs.len() as u64, *share)
        {
            return refuse(format!(
                "got a validation share of {share} of {} documents, wanted one that holds out some and leaves some, or a separator of documents",
                inputs.len()
            ));
        }
        if self.index && u64::from(self.vocabulary) > Encoding::I32.vocabulary_max() {
            return refuse(format!(
                "got a vocabulary of {} tokens, wanted at most 2^31 for an index",
                self.vocabulary
            ));
        }
        Ok(())
    }
}

/// The counts of documents and tokens that [`prepare`] has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Documents in the output.
    pub documents: u64,
    /// Tokens in the output, ends of text among them.
    pub tokens: u64,
    /// Documents in the validation file.
    pub validation_documents: u64,
    /// Tokens in the validation file, ends of text among them.
    pub validation_tokens: u64,
}

/// Encodes UTF-8 text files to a [`TokenFile`], in their order. Documents are encoded side by side on rayon's threads; for each thread
/// some MiB of text and its tokens are in memory. Files are replaced once they are complete.
///
/// `encode` gets whole documents, or, if files are documents, runs of whole lines. A text much longer than a block (see
/// [`PrepareOptions::with_block_bytes`]) is cut, at the end of a line if it has one, else between two characters. Documents
/// without text are skipped. `progress` gets the bytes that are done and the bytes in all.
///
/// # Errors
/// If a setting makes no sense, a file cannot be read or written, text is not UTF-8 (the file and the byte are named), the vocabulary does
/// not fit the width, a token is beyond it, or a file would be without tokens.
///
/// ```
/// use phalanx_train::data::{PrepareOptions, prepare};
/// # let folder = std::env::temp_dir().join(format!("phalanx-doc-prepare-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// let (text, tokens) = (folder.join("text.txt"), folder.join("train.bin"));
/// std::fs::write(&text, "one<|end|>three").unwrap();
/// let bytes = |text: &str| text.bytes().map(u32::from).collect();
/// let options = PrepareOptions::new(257).with_separator("<|end|>").with_end_of_text(256);
/// let done = prepare(&[text], &tokens, &bytes, &options, &mut |_, _| {})?;
/// assert_eq!((done.documents, done.tokens), (2, 10));
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), phalanx_train::Error>(())
/// ```
pub fn prepare(
    inputs: &[PathBuf],
    output: impl AsRef<Path>,
    encode: &(dyn Fn(&str) -> Vec<u32> + Sync),
    options: &PrepareOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Prepared> {
    let output = output.as_ref();
    options.check(inputs, output)?;
    let (width, vocabulary) = (options.width, options.vocabulary);
    let mut done = Default::default();
    TokenFile::write(output, width, vocabulary, |training| match &options.validation {
        None => {
            done = encode_files(
                inputs,
                encode,
                options,
                progress,
                DocumentSink::new(options.end_of_text, training, None),
            )?;
            remove_index(output)
        }
        Some((path, share)) => {
            TokenFile::write(path, width, vocabulary, |validation| {
                let sink = DocumentSink::new(options.end_of_text, training, Some((validation, *share)));
                done = encode_files(inputs, encode, options, progress, sink)?;
                remove_index(path)
            })?;
            remove_index(output)
        }
    })?;
    let (prepared, lengths): (Prepared, [Vec<u64>; 2]) = done;
    let outputs = [Some(output), options.validation.as_ref().map(|(path, _)| path.as_path())];
    for (path, lengths) in outputs.into_iter().zip(&lengths).filter(|_| options.index) {
        path.map_or(Ok(()), |path| write_document_index(path, width.encoding(), lengths))?;
    }
    Ok(prepared)
}

/// Removes an old index, so that it is never beside new tokens.
fn remove_index(path: &Path) -> Result<()> {
    let (_, idx) = pair(path);
    match std::fs::remove_file(&idx) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(wrong(idx.display(), e)),
        _ => Ok(()),
    }
}

/// Reads, encodes and writes. The next blocks are read while these are encoded.
fn encode_files(
    inputs: &[PathBuf],
    encode: &(dyn Fn(&str) -> Vec<u32> + Sync),
    options: &PrepareOptions,
    progress: &mut dyn FnMut(u64, u64),
    mut sink: DocumentSink<'_, '_, '_>,
) -> Result<(Prepared, [Vec<u64>; 2])> {
    let separator = options.separator.as_deref();
    let mut blocks = Blocks::new(inputs, separator, options.block_bytes)?;
    let (mut done, all) = (0, blocks.all_bytes());
    let at_once = rayon::current_num_threads() * BLOCKS_PER_THREAD;
    let mut read = blocks.take(at_once)?;
    while !read.is_empty() {
        let encoded = || -> Vec<Vec<EncodedPart>> {
            read.par_iter().map(|block| encode_block(block, separator, encode)).collect()
        };
        let (next, encoded) = rayon::join(|| blocks.take(at_once), encoded);
        for (block, parts) in read.iter().zip(encoded) {
            parts.iter().try_for_each(|part| sink.put(part))?;
            done += block.bytes;
            progress(done, all);
        }
        read = next?;
    }
    Ok(sink.prepared())
}

/// The documents of a block, encoded. The last may continue in the next block.
fn encode_block(
    block: &Block,
    separator: Option<&str>,
    encode: &(dyn Fn(&str) -> Vec<u32> + Sync),
) -> Vec<EncodedPart> {
    let texts: Vec<&str> = match separator {
        Some(separator) => block.text.split(separator).collect(),
        None => vec![&block.text],
    };
    let last = texts.len() - 1;
    let part = |(index, text): (usize, &str)| EncodedPart {
        tokens: if text.is_empty() { vec![] } else { encode(text) },
        has_text: !text.is_empty(),
        ends_document: index < last || block.ends_document,
    };
    texts.into_iter().enumerate().map(part).collect()
}

/// A document, or a part of one.
pub(super) struct EncodedPart {
    pub(super) tokens: Vec<u32>,
    pub(super) has_text: bool,
    /// Whether the document ends here.
    pub(super) ends_document: bool,
}

/// Writes encoded documents to the training file or to the validation file.
pub(super) struct DocumentSink<'a, 't, 'v> {
    end_of_text: Option<u32>,
    training: &'a mut TokenWriter<'t>,
    validation: Option<(&'a mut TokenWriter<'v>, ValidationDraw)>,
    /// The number of the current document.
    document: u64,
    /// Whether the current document has text so far.
    has_text: bool,
    /// Tokens of the current document so far.
    length: u64,
    /// Tokens of each document of the training file, and of the validation file.
    lengths: [Vec<u64>; 2],
    prepared: Prepared,
}

impl<'a, 't, 'v> DocumentSink<'a, 't, 'v> {
    /// If there is a validation file, it gets this share of the documents.
    pub(super) fn new(
        end_of_text: Option<u32>,
        training: &'a mut TokenWriter<'t>,
        validation: Option<(&'a mut TokenWriter<'v>, f64)>,
    ) -> DocumentSink<'a, 't, 'v> {
        let validation = validation.map(|(writer, share)| (writer, ValidationDraw::new(share)));
        DocumentSink {
            end_of_text,
            training,
            validation,
            document: 0,
            has_text: false,
            length: 0,
            lengths: Default::default(),
            prepared: Prepared::default(),
        }
    }

    /// Writes the next part of the text.
    pub(super) fn put(&mut self, part: &EncodedPart) -> Result<()> {
        self.has_text |= part.has_text;
        let validates = self.validation.as_ref().is_some_and(|(_, draw)| draw.has(self.document));
        self.push(validates, &part.tokens)?;
        if part.ends_document && self.has_text {
            let end_of_text = self.end_of_text;
            self.push(validates, end_of_text.as_slice())?;
            self.lengths[usize::from(validates)].push(std::mem::take(&mut self.length));
            match validates {
                true => self.prepared.validation_documents += 1,
                false => self.prepared.documents += 1,
            }
            (self.document, self.has_text) = (self.document + 1, false);
        }
        Ok(())
    }

    fn push(&mut self, validates: bool, tokens: &[u32]) -> Result<()> {
        self.length += tokens.len() as u64;
        match &mut self.validation {
            Some((writer, _)) if validates => writer.push(tokens),
            _ => self.training.push(tokens),
        }
    }

    /// The counts, and the lengths of each file's documents.
    pub(super) fn prepared(self) -> (Prepared, [Vec<u64>; 2]) {
        let validation_tokens = self.validation.as_ref().map_or(0, |(writer, _)| writer.len());
        (Prepared { tokens: self.training.len(), validation_tokens, ..self.prepared }, self.lengths)
    }
}

/// Whether some of so many documents are drawn for validation, and some are not.
pub(super) fn splits_documents(documents: u64, share: f64) -> bool {
    let draw = ValidationDraw::new(share);
    let drawn = (0..documents).filter(|&document| draw.has(document)).count() as u64;
    drawn > 0 && drawn < documents
}

/// Draws the documents of the validation file: one at random of each run of 1 / share documents.
struct ValidationDraw {
    /// The share, as a part of 2^32.
    share: u64,
    stream: PhiloxStream,
}

/// The draws of validation documents.
const SITE: u64 = 0x7661_6c69;
/// Fixed-point bits of a share.
const BITS: u32 = 32;

impl ValidationDraw {
    fn new(share: f64) -> ValidationDraw {
        let share = (share * (1u64 << BITS) as f64).round().clamp(1.0, (1u64 << BITS) as f64) as u64;
        ValidationDraw { share, stream: RngKey { seed: 0, step: 0 }.site(SITE) }
    }

    fn has(&self, document: u64) -> bool {
        let share = u128::from(self.share);
        let run = (u128::from(document) * share) >> BITS;
        let start = |run: u128| ((run << BITS).div_ceil(share)) as u64;
        let (first, end) = (start(run), start(run + 1));
        let [word, ..] = self.stream.block(run as u64, 0);
        document - first == u64::from(word) % (end - first)
    }
}
