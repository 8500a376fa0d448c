//! What is learned: a text, a folder of token files that `prepare` has made, or the sources and pages of this workspace.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx::train::data::{TokenFile, Tokens, Width};
use phalanx::train::digest;
use phalanx::train::text::Codec;

use crate::args::TrainArgs;

/// The files of a prepared folder.
pub const TRAINING: &str = "train.bin";
pub const VALIDATION: &str = "validation.bin";

/// One file of so many is held out of training.
const HELD_OUT: usize = 40;
/// Tokens of a file that tell it from others, at its beginning and at its end.
const TOLD_APART: u64 = 1 << 16;

/// A text in two parts: the model trains on one, and its loss is measured on the other.
pub enum Corpus {
    Text { training: Vec<u8>, validation: Option<Vec<u8>> },
    Prepared(PathBuf),
}

impl Corpus {
    /// What the arguments name.
    pub fn of(args: &TrainArgs) -> Result<Corpus, String> {
        if let Some(folder) = args.data.as_ref().filter(|path| path.is_dir()) {
            return Ok(Corpus::Prepared(folder.clone()));
        }
        let named = args.validation.as_deref().map(read).transpose()?;
        match &args.data {
            Some(path) => Ok(Corpus::Text { training: read(path)?, validation: named }),
            None => {
                let (training, held_out) = bundled()?;
                Ok(Corpus::Text { training, validation: named.or(held_out) })
            }
        }
    }

    /// The text that byte pairs are learned from.
    pub fn text(&self) -> Result<&str, String> {
        match self {
            Corpus::Text { training, .. } => {
                std::str::from_utf8(training).map_err(|e| format!("the text is not UTF-8: {e}"))
            }
            Corpus::Prepared(folder) => {
                Err(format!("{}: its tokens are made, so --vocabulary does not go with it", folder.display()))
            }
        }
    }

    /// The tokens to train on, and those that are held out.
    pub fn tokens(&self, codec: &Codec, vocabulary: usize) -> Result<[Option<Arc<dyn Tokens>>; 2], String> {
        let encode = |text: &Vec<u8>| {
            let tokens = codec.encode(text, vocabulary).map_err(|e| e.to_string())?;
            Ok::<_, String>(Arc::new(tokens) as Arc<dyn Tokens>)
        };
        match self {
            Corpus::Text { training, validation } => {
                Ok([Some(encode(training)?), validation.as_ref().map(encode).transpose()?])
            }
            Corpus::Prepared(folder) => {
                let width = if codec.vocabulary() > 1 << 16 { Width::U32 } else { Width::U16 };
                let open = |name: &str| {
                    let file = TokenFile::open(folder.join(name), width).map_err(|e| e.to_string())?;
                    Ok::<_, String>(Arc::new(file.with_vocabulary(vocabulary as u32)) as Arc<dyn Tokens>)
                };
                let held_out = folder.join(VALIDATION).exists().then(|| open(VALIDATION)).transpose()?;
                Ok([Some(open(TRAINING)?), held_out])
            }
        }
    }

    /// What tells this text from others.
    pub fn digest(&self, tokens: &dyn Tokens) -> Result<String, String> {
        let digest = match self {
            Corpus::Text { training, .. } => digest(training),
            Corpus::Prepared(_) => {
                let some = TOLD_APART.min(tokens.len());
                let mut told = vec![0; 2 * some as usize];
                let (first, last) = told.split_at_mut(some as usize);
                tokens
                    .copy(0, first)
                    .and_then(|()| tokens.copy(tokens.len() - some, last))
                    .map_err(|e| e.to_string())?;
                let bytes: Vec<u8> = told.iter().flat_map(|token| token.to_le_bytes()).collect();
                digest(&bytes) ^ tokens.len()
            }
        };
        Ok(format!("{digest:016x}"))
    }
}

/// The bytes of a file.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let text = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    if text.is_empty() { Err(format!("{}: the file is empty", path.display())) } else { Ok(text) }
}

/// The sources and pages of this workspace, in the order of their paths, and those that are held out.
fn bundled() -> Result<(Vec<u8>, Option<Vec<u8>>), String> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut files = Vec::new();
    collect(root, &mut files);
    let (mut training, mut held_out) = (Vec::new(), Vec::new());
    for (number, path) in files.iter().enumerate() {
        let to = if number % HELD_OUT == HELD_OUT / 2 { &mut held_out } else { &mut training };
        to.extend(std::fs::read(path).unwrap_or_default());
    }
    if training.is_empty() {
        let wanted =
            "the workspace's own sources, which are the default text, are not there; name a text with --data";
        return Err(format!("{}: {wanted}", root.display()));
    }
    Ok((training, (!held_out.is_empty()).then_some(held_out)))
}

/// The sources and pages in a folder, in the order of their paths; nothing that was built or is hidden.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs" || e == "md") {
            files.push(path);
        }
    }
}
