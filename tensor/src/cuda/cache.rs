//! Compiled programs on disk, so that a program's first step costs milliseconds the second time.
//!
//! One file a program, named after a hash of everything that went in (compiler's version, options, source). It holds a
//! header and a checksum: a file that is cut short, damaged or another program's counts as none, and is written anew. Files
//! come into being whole, by a rename, so that processes may share a folder. Where nothing can be written nothing is kept.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use super::Image;
use crate::io::atomic;

/// The folder; empty for none.
const FOLDER: &str = "PHALANX_KERNEL_CACHE";
const MAGIC: &[u8; 8] = b"phlxkrn1";

/// What was kept under a key.
pub(super) fn get(key: &str) -> Option<Image> {
    parse(key, &std::fs::read(path(key)?).ok()?)
}

/// Keeps an image, if that is possible.
pub(super) fn put(key: &str, image: &Image) {
    let Some(path) = path(key) else { return };
    let made = path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok());
    if made {
        let _ = atomic::write(&path, |file| file.write_all(&bytes(key, image)));
    }
}

fn path(key: &str) -> Option<PathBuf> {
    let folder = match std::env::var_os(FOLDER) {
        Some(named) if named.is_empty() => return None,
        Some(named) => PathBuf::from(named),
        None => {
            let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
            base.join("phalanx").join("kernels")
        }
    };
    let [a, b] = [0u8, 1].map(|seed| hash(&(seed, key)));
    Some(folder.join(format!("{a:016x}{b:016x}.bin")))
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Magic, checksum, length of the log, log, code.
fn bytes(key: &str, image: &Image) -> Vec<u8> {
    let log = image.log.as_bytes();
    let mut rest = (log.len() as u64).to_le_bytes().to_vec();
    rest.extend_from_slice(log);
    rest.extend_from_slice(&image.code);
    let sum = hash(&(key, &rest));
    [&MAGIC[..], &sum.to_le_bytes(), &rest].concat()
}

fn parse(key: &str, file: &[u8]) -> Option<Image> {
    let (sum, rest) = file.strip_prefix(MAGIC)?.split_at_checked(8)?;
    if u64::from_le_bytes(sum.try_into().ok()?) != hash(&(key, rest.to_vec())) {
        return None;
    }
    let (length, rest) = rest.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (log, code) = rest.split_at_checked(length)?;
    Some(Image { code: code.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_comes_back_and_a_damaged_file_counts_as_none() {
        let image = Image { code: vec![7; 100], log: "12 registers".into() };
        let file = bytes("key", &image);
        assert_eq!(parse("key", &file).as_ref(), Some(&image));
        assert_eq!(parse("another key", &file), None);
        for cut in 0..file.len() {
            assert_eq!(parse("key", &file[..cut]), None, "cut at {cut}");
            let mut damaged = file.clone();
            damaged[cut] ^= 1;
            assert_eq!(parse("key", &damaged), None, "damaged at {cut}");
        }
    }
}
