//! The data of training steps: data sets, a loader with worker threads, token files, images and tables.
//!
//! - A [`Dataset`] has numbered items, each some tensors: [`TensorDataset`], `ImageFolder`, `Csv`, `JsonLines`, or your own. It can be
//!   split, mapped, concatenated.
//! - [`Samples`] is an endless sequence, each sample computed from its number alone: a shuffled data set ([`Shuffled`]), windows of a
//!   text ([`TokenWindows`], [`Packed`]), a mixture ([`Blend`]).
//! - A [`DataLoader`] reads the samples of steps on worker threads and returns them as batches. Row r of step s is sample
//!   `s * batch + r`, whatever the ranks, micro-batches and workers are. So a checkpoint saves the number of the step only.
//! - [`Tokens`] are read from a file a window at a time: [`TokenFile`], [`IndexedTokens`]. [`prepare`] makes such a file from texts.
//!
//! ```
//! use phalanx_tensor::{Device, Tensor};
//! use phalanx_train::data::{DataLoaderConfig, Dataset, TensorDataset};
//!
//! let x = Tensor::from_vec((0..200).map(|i| i as f32).collect(), &[100, 2], Device::CPU)?;
//! let y = Tensor::from_vec((0..100i64).collect(), &[100], Device::CPU)?;
//! let [training, validation] = TensorDataset::new(vec![x, y])?.split(0.9, 1)?;
//!
//! let config = DataLoaderConfig::new(16).with_workers(2);
//! let mut loader = config.clone().train(training, 7)?; // without end: epoch after epoch
//! for _ in 0..20 {
//!     for batch in loader.next_step()? {
//!         assert_eq!(batch.tensors[0].shape(), [16, 2]);
//!     }
//! }
//! let saved = loader.position(); // `with_position(saved)` continues from here
//! # assert_eq!(saved, 20);
//!
//! for step in config.evaluate(validation)? {
//!     for batch in step? {
//!         assert_eq!(batch.tensors[1].shape(), [10]); // all that is left
//!     }
//! }
//! # Ok::<(), phalanx_train::Error>(())
//! ```

#[cfg(feature = "csv")]
mod csv;
mod dataset;
mod derived;
mod file;
#[cfg(feature = "images")]
mod images;
#[cfg(feature = "json")]
mod json_lines;
mod loader;

mod samples;
mod tokens;

#[cfg(feature = "csv")]
pub use csv::{Csv, CsvConfig, CsvLabel};
pub use dataset::{Dataset, HOST, TensorDataset, stack};
pub use derived::{Concat, Map, Subset};
#[cfg(feature = "images")]
pub use images::{Color, ImageFolder, ImageFolderConfig};
#[cfg(feature = "chat")]
pub(crate) use json_lines::kind;
#[cfg(feature = "json")]
pub use json_lines::{JsonItems, JsonLines, JsonTexts};
pub use loader::{DataLoader, DataLoaderConfig};
pub use phalanx_nn::{Batch, Permutation};
pub use phalanx_parallel::Content;
pub use samples::{Ordered, Samples, Shuffled};
pub use tokens::prepare::{PrepareOptions, Prepared, prepare};
pub use tokens::{
    Blend, EndOfText, IndexedTokens, IndexedWriter, Packed, TokenFile, TokenWindows, TokenWriter, Tokens,
    Width,
};

use std::sync::Arc;

use crate::Error;

/// An [`Error::Data`].
pub(crate) fn wrong(what: impl std::fmt::Display, why: impl std::fmt::Display) -> Error {
    Error::Data { what: what.to_string(), why: why.to_string() }
}

/// The data of a run.
#[derive(Clone)]
pub struct Data {
    /// Training samples. Row r of step s is sample `s * batch + r`.
    pub samples: Arc<dyn Samples>,
    /// How often a row counts in the mean loss: once, or as often as a sequence has tokens. If [`Samples::counted`] has other numbers, this is
    /// the positions of a row, by which only the throughput is measured.
    pub counted: usize,
    /// Data to measure the loss on, which is not trained on.
    pub validation: Option<Arc<dyn Dataset>>,
}

/// A folder that goes away and a data set of numbers, for this module's tests.
#[cfg(test)]
mod scratch {
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

        /// The entries of the folder, sorted.
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
}
