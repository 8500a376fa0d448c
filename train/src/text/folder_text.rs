//! [`text_of_folder`]: the text of many files.

use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The text of a folder's files with these endings, in the order of their paths, and of those that are held out: one file of `held_out`.
/// Hidden files and cargo's build folders are left out.
///
/// # Errors
/// If there are no such files, or one cannot be read.
pub fn text_of_folder(root: &Path, endings: &[&str], held_out: usize) -> Result<[Vec<u8>; 2]> {
    let mut files = Vec::new();
    collect(root, endings, &mut files);
    let mut texts = [Vec::new(), Vec::new()];
    for (number, path) in files.iter().enumerate() {
        let to = usize::from(number % held_out.max(1) == held_out / 2);
        texts[to].extend(std::fs::read(path).map_err(|e| Error::file(path, e))?);
    }
    match texts[0].is_empty() {
        true => Err(Error::file(root, format!("got no files that end in {}", endings.join(" or ")))),
        false => Ok(texts),
    }
}

fn collect(folder: &Path, endings: &[&str], files: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            collect(&path, endings, files);
        } else if path.extension().is_some_and(|ending| endings.iter().any(|known| ending == *known)) {
            files.push(path);
        }
    }
}
