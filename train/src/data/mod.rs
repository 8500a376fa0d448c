//! What a training step reads: data sets, a loader with worker threads, token files, images and tables.
//!
//! - A [`Dataset`] has numbered items, each some tensors: [`TensorDataset`], `ImageFolder`, `Csv`, `JsonLines`, or your own. It can be
//!   split, mapped, concatenated.
//! - [`Samples`] is an endless sequence, each sample computed from its number alone: a shuffled data set ([`Shuffled`]), windows of a
//!   text ([`TokenWindows`], [`Packed`]), a mixture ([`Blend`]).
//! - A [`DataLoader`] reads the samples of steps on worker threads and hands them out as batches. Row r of step s is sample
//!   `s * batch + r`, whatever the ranks, micro-batches and workers are, so the number of the step is all that has to be saved to continue.
//! - [`Tokens`] are read where they lie in a file, a window at a time: [`TokenFile`], [`IndexedTokens`]. [`prepare`] makes such a file of texts.
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
//! let saved = loader.position(); // `with_position(saved)` goes on from here
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

#[cfg(test)]
mod scratch;

#[cfg(feature = "csv")]
pub use csv::{Csv, CsvConfig, CsvLabel};
pub use dataset::{Dataset, HOST, TensorDataset, stack};
pub use derived::{Concat, Map, Subset};
#[cfg(feature = "images")]
pub use images::{Color, ImageFolder, ImageFolderConfig};
#[cfg(feature = "json")]
pub use json_lines::{JsonItems, JsonLines, JsonTexts};
pub use loader::{DataLoader, DataLoaderConfig};
pub use phalanx_nn::{Batch, Permutation};
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

/// What a run reads.
#[derive(Clone)]
pub struct Data {
    /// Training samples. Row r of step s is sample `s * batch + r`.
    pub samples: Arc<dyn Samples>,
    /// What of a row counts in the mean loss: 1, or the tokens of a sequence.
    pub counted: usize,
    /// Data that is not trained on.
    pub validation: Option<Arc<dyn Dataset>>,
}
