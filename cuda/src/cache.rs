//! The kernel cache: a folder of files that hold what takes long to find, compiled kernels and the fastest algorithms of products.
//!
//! A file is named after a hash of its key, which says everything that decides its content, and holds a checksum of key and content. A file
//! that is cut short, damaged or of another key counts as absent. Processes may share the folder: a file gets its name when it is whole.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
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

/// A folder of such files; without a folder nothing is kept.
pub(crate) struct Cache {
    pub(crate) folder: Option<PathBuf>,
}

impl Cache {
    /// That of the environment.
    pub(crate) fn of_environment() -> Cache {
        let folder = match std::env::var_os(FOLDER) {
            Some(named) if named.is_empty() => None,
            Some(named) => Some(PathBuf::from(named)),
            None => {
                let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
                let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
                base.or_else(home).map(|base| base.join("phalanx").join("kernels"))
            }
        };
        Cache { folder }
    }

    /// The content that is kept under a key.
    pub(crate) fn load(&self, kind: Kind, key: &str) -> Option<Vec<u8>> {
        parse(key, &fs::read(self.path(kind, key)?).ok()?)
    }

    /// Keeps a content in place of one that is there.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn store(&self, kind: Kind, key: &str, content: &[u8]) -> io::Result<()> {
        self.path(kind, key).map_or(Ok(()), |path| replace(&path, &bytes(key, content)))
    }

    /// Keeps a content where no file is there, not even a damaged one.
    ///
    /// # Errors
    /// If there is one, or the folder cannot be written.
    pub(crate) fn store_first(&self, kind: Kind, key: &str, content: &[u8]) -> io::Result<()> {
        // A link fails where the name is taken; a rename would replace the file.
        let link = |from: &Path, to: &Path| fs::hard_link(from, to).and_then(|()| fs::remove_file(from));
        self.path(kind, key).map_or(Ok(()), |path| write(&path, &bytes(key, content), link))
    }

    pub(crate) fn path(&self, kind: Kind, key: &str) -> Option<PathBuf> {
        let [a, b] = [0u8, 1].map(|seed| hash(&(seed, key)));
        Some(self.folder.as_ref()?.join(format!("{a:016x}{b:016x}.{}", kind.ending())))
    }
}

impl Kind {
    pub(crate) fn ending(self) -> &'static str {
        match self {
            Kind::Kernel => "bin",
            Kind::Algorithm => "algorithm",
        }
    }
}

/// Writes a file whole, or not at all.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(path, bytes, |from, to| fs::rename(from, to))
}

/// Writes a file beside, which `name` then gives its name.
fn write(path: &Path, bytes: &[u8], name: impl Fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}.{number}.tmp", std::process::id()));
    let written = fs::write(&temporary, bytes).and_then(|()| name(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

pub(crate) fn hash(what: &impl Hash) -> u64 {
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
