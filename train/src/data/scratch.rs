//! What the tests of this module share: a folder that goes away, and a data set of numbers.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_tensor::Tensor;

use super::{HOST, TensorDataset};

/// A folder of a test's own, removed when it is dropped.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("phalanx-data-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The path of a new file of these bytes.
    pub(super) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// What lies in the folder, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let name =
            |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&self.0).unwrap().map(name).collect();
        names.sort();
        names
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The items 0, 1, .. as i64 scalars.
pub(super) fn numbers(len: usize) -> TensorDataset {
    let values: Vec<i64> = (0..len as i64).collect();
    TensorDataset::new(vec![Tensor::from_vec(values, &[len], HOST).unwrap()]).unwrap()
}
