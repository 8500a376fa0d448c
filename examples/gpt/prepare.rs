//! `prepare`: large texts into token files, on all cores and in bounded memory.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};
use phalanx::train::data::{PrepareOptions, Prepared, Width, prepare};
use phalanx::train::text::{Bpe, Codec};

use crate::args::PrepareArgs;
use crate::check::check_vocabulary;
use crate::text::{TRAINING, VALIDATION};

/// Bytes of the first texts that byte pairs are learned from.
const LEARNED_BYTES: u64 = 16 << 20;

/// Writes a folder for `train --data`: tokens to train on, tokens held out, and what cuts text into them.
pub fn run(args: &PrepareArgs) -> Result<(), String> {
    check_vocabulary(args.vocabulary)?;
    let codec = match &args.tokenizer {
        Some(folder) => Codec::of(folder).map_err(|e| e.to_string())?,
        None => Codec::Pairs(Bpe::train(&beginning(&args.data)?, args.vocabulary), None),
    };
    std::fs::create_dir_all(&args.out).map_err(|e| format!("{}: {e}", args.out.display()))?;
    let vocabulary = codec.vocabulary();
    let width = if vocabulary > 1 << 16 { Width::U32 } else { Width::U16 };
    let mut options = PrepareOptions::new(vocabulary as u32).with_width(width);
    if let Some(separator) = &args.separator {
        options = options.with_separator(separator);
    }
    if args.validation_share > 0.0 {
        options = options.with_validation(args.out.join(VALIDATION), args.validation_share);
    }
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{bar:32} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    // A text that cannot be cut has no tokens; why is said when all is read.
    let wrong = Mutex::new(None);
    let encode = |text: &str| {
        codec.encode(text.as_bytes(), vocabulary).unwrap_or_else(|error| {
            wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.to_string());
            Vec::new()
        })
    };
    let mut progress = |done: u64, all: u64| {
        bar.set_length(all);
        bar.set_position(done);
    };
    let done = prepare(&args.data, args.out.join(TRAINING), &encode, &options, &mut progress);
    bar.finish_and_clear();
    if let Some(error) = wrong.into_inner().unwrap_or_else(PoisonError::into_inner) {
        // What was written lacks some of the text. That it cannot be removed would change nothing about the error.
        [TRAINING, VALIDATION].iter().for_each(|name| drop(std::fs::remove_file(args.out.join(name))));
        return Err(error);
    }
    let done = done.map_err(|e| e.to_string())?;
    codec.save(&args.out).map_err(|e| e.to_string())?;
    let Prepared { documents, tokens, validation_documents, validation_tokens } = done;
    crate::say(&format!(
        "{}: {tokens} tokens of {documents} documents, {validation_tokens} of {validation_documents} held out; {}",
        args.out.display(),
        codec.source()
    ));
    Ok(())
}

/// The beginning of the texts, up to what is learned from.
fn beginning(files: &[PathBuf]) -> Result<String, String> {
    let mut bytes = Vec::new();
    for path in files {
        let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let rest = LEARNED_BYTES.saturating_sub(bytes.len() as u64);
        file.take(rest).read_to_end(&mut bytes).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    // A character may be cut at the end; what else is no UTF-8 is found with its place when it is read.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
