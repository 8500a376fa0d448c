//! The kernel cache: a folder of files that hold what takes long to find, compiled kernels and the fastest algorithms of products.
//!
//! A file is named after a hash of its key, which says everything that decides its content, and holds a checksum of key and content. A file
//! that is cut short, damaged or of another key counts as absent. Processes may share the folder: a file gets its name when it is whole.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The folder; empty for none.
const FOLDER: &str = "PHALANX_KERNEL_CACHE";
const MAGIC: &[u8; 8] = b"phlxkrn1";

/// What a file holds: the ending of its name.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Kernel,
    Algorithm,
}

/// The content that is kept under a key.
pub(crate) fn load(kind: Kind, key: &str) -> Option<Vec<u8>> {
    parse(key, &std::fs::read(path(kind, key)?).ok()?)
}

/// Keeps a content, where the folder can be written, in place of one that is there.
pub(crate) fn store(kind: Kind, key: &str, content: &[u8]) {
    write(kind, key, content, |from, to| std::fs::rename(from, to));
}

/// Keeps a content, where the folder can be written and no file is there, not even a damaged one.
pub(crate) fn store_first(kind: Kind, key: &str, content: &[u8]) {
    // A link fails where the name is taken; a rename would replace the file.
    write(kind, key, content, |from, to| {
        std::fs::hard_link(from, to).and_then(|()| std::fs::remove_file(from))
    });
}

fn write(kind: Kind, key: &str, content: &[u8], name: impl Fn(&Path, &Path) -> std::io::Result<()>) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let Some(path) = path(kind, key) else { return };
    let made = path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok());
    if made {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}.{number}.tmp", std::process::id()));
        let written = std::fs::write(&temporary, bytes(key, content));
        if written.and_then(|()| name(&temporary, &path)).is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
    }
}

fn path(kind: Kind, key: &str) -> Option<PathBuf> {
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
    let ending = match kind {
        Kind::Kernel => "bin",
        Kind::Algorithm => "algorithm",
    };
    Some(folder.join(format!("{a:016x}{b:016x}.{ending}")))
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Magic, checksum, content.
fn bytes(key: &str, content: &[u8]) -> Vec<u8> {
    let sum = hash(&(key, content));
    [&MAGIC[..], &sum.to_le_bytes(), content].concat()
}

fn parse(key: &str, file: &[u8]) -> Option<Vec<u8>> {
    let (sum, content) = file.strip_prefix(MAGIC)?.split_at_checked(8)?;
    (u64::from_le_bytes(sum.try_into().ok()?) == hash(&(key, content))).then(|| content.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_comes_back_and_a_damaged_file_counts_as_none() {
        let content = [7; 100];
        let file = bytes("key", &content);
        assert_eq!(parse("key", &file).as_deref(), Some(&content[..]));
        assert_eq!(parse("another key", &file), None);
        for cut in 0..file.len() {
            assert_eq!(parse("key", &file[..cut]), None, "cut at {cut}");
            let mut damaged = file.clone();
            damaged[cut] ^= 1;
            assert_eq!(parse("key", &damaged), None, "damaged at {cut}");
        }
    }
}
