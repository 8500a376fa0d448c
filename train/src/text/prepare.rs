//! [`PrepareConfig`]: encodes large texts into a folder for [`Corpus`](super::Corpus), on all cores and in bounded memory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use phalanx_tensor::unpoisoned;

use super::{Bpe, Codec, TRAINING, VALIDATION, check_vocabulary};
use crate::data::{PrepareOptions, Prepared, Width, prepare};
use crate::{Error, Result, keyed};

/// The number of bytes at the beginning of the texts from which byte pairs are learned.
const LEARNED_BYTES: u64 = 16 << 20;

keyed! {
    /// The settings of encoding texts.
    pub struct PrepareConfig {
        /// Texts in UTF-8.
        "data" data: Vec<String> = Vec::new(),
        /// Folder for the token files, Megatron's index of their documents, and the tokenizer.
        "out" out: Option<PathBuf> = None,
        /// Byte pairs to learn from the beginning of the texts as tokens, bytes included.
        "vocabulary" vocabulary: usize = 16384,
        /// Folder whose tokenizer.json cuts the text.
        "tokenizer" tokenizer: Option<PathBuf> = None,
        /// Text that stands between documents; without it each file is one.
        "separator" separator: Option<String> = None,
        /// Share of the documents that is held out.
        "validation-share" validation_share: f64 = 0.0,
    }
}

impl PrepareConfig {
    /// Writes the folder: training tokens and validation tokens, each with an index of its documents, and the tokenizer.
    /// `progress` gets the bytes that are done and the bytes in all.
    ///
    /// # Errors
    /// Those of [`prepare`](crate::data::prepare), and if a text cannot be encoded.
    pub fn run(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(Prepared, Codec)> {
        let (false, Some(out)) = (self.data.is_empty(), &self.out) else {
            return Err(Error::Config(
                "wanted `data`, the texts, and `out`, a folder for their tokens".into(),
            ));
        };
        check_vocabulary("vocabulary", self.vocabulary)?;
        let files: Vec<PathBuf> = self.data.iter().map(PathBuf::from).collect();
        let codec = match &self.tokenizer {
            Some(folder) => Codec::of(folder)?,
            None => Codec::Pairs(Bpe::train(&beginning(&files)?, self.vocabulary), None),
        };
        std::fs::create_dir_all(out).map_err(|e| Error::file(out, e))?;
        let done = self.written(&files, out, &codec, progress)?;
        codec.save(out)?;
        Ok((done, codec))
    }

    fn written(
        &self,
        files: &[PathBuf],
        out: &Path,
        codec: &Codec,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Prepared> {
        let [training, validation] = [TRAINING, VALIDATION[0]].map(|name| out.join(name));
        let vocabulary = codec.vocabulary();
        let width = if vocabulary > 1 << 16 { Width::U32 } else { Width::U16 };
        let mut options = PrepareOptions::new(vocabulary as u32).with_width(width).with_index();
        if let Some(separator) = &self.separator {
            options = options.with_separator(separator);
        }
        if self.validation_share != 0.0 {
            options = options.with_validation(&validation, self.validation_share);
        }
        // A text that cannot be cut has no tokens; why is said when all is read.
        let wrong = Mutex::new(None);
        let encode = |text: &str| {
            codec.encode(text.as_bytes(), vocabulary).unwrap_or_else(|error| {
                unpoisoned(wrong.lock()).get_or_insert(error);
                Vec::new()
            })
        };
        let done = prepare(files, &training, &encode, &options, progress);
        let Some(error) = unpoisoned(wrong.into_inner()) else { return done };
        // What was written lacks some of the text. That it cannot be removed would change nothing about the error.
        for path in [training, validation] {
            [path.with_extension("idx"), path].iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
        Err(error)
    }
}

/// The part of the texts from which byte pairs are learned.
fn beginning(files: &[PathBuf]) -> Result<String> {
    let mut bytes = Vec::new();
    for path in files {
        let rest = LEARNED_BYTES.saturating_sub(bytes.len() as u64);
        let read = File::open(path).and_then(|file| file.take(rest).read_to_end(&mut bytes));
        read.map_err(|e| Error::file(path, e))?;
    }
    // A character may be cut at the end; what else is no UTF-8 is found with its place when it is read.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
