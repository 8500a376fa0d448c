//! The text to learn: a file, or the sources and pages of this workspace.

use std::path::{Path, PathBuf};

use crate::args::TrainArgs;

/// What is trained on, and what is held out of it.
pub struct Corpus {
    pub training: Vec<u8>,
    pub validation: Option<Vec<u8>>,
}

/// One file of so many is held out of training.
const HELD_OUT: usize = 40;

/// The texts that the arguments name.
pub fn corpus(args: &TrainArgs) -> Result<Corpus, String> {
    let named = args.validation.as_deref().map(read).transpose()?;
    match &args.data {
        Some(path) => Ok(Corpus { training: read(path)?, validation: named }),
        None => {
            let Corpus { training, validation } = bundled()?;
            Ok(Corpus { training, validation: named.or(validation) })
        }
    }
}

/// The bytes of a file.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let text = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    if text.is_empty() { Err(format!("{}: the file is empty", path.display())) } else { Ok(text) }
}

/// The sources and pages of this workspace, in the order of their paths.
fn bundled() -> Result<Corpus, String> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut files = Vec::new();
    collect(root, &mut files);
    let (mut corpus, mut held_out) = (Corpus { training: Vec::new(), validation: None }, Vec::new());
    for (number, path) in files.iter().enumerate() {
        let to = if number % HELD_OUT == HELD_OUT / 2 { &mut held_out } else { &mut corpus.training };
        to.extend(std::fs::read(path).unwrap_or_default());
    }
    if corpus.training.is_empty() {
        let wanted =
            "the workspace's own sources, which are the default text, are not there; name a text with --data";
        return Err(format!("{}: {wanted}", root.display()));
    }
    corpus.validation = (!held_out.is_empty()).then_some(held_out);
    Ok(corpus)
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
