//! Checkpoints that many ranks write and any other number of ranks reads, under any other layout.
//!
//! ```text
//! folder/rank-0.safetensors, rank-1.safetensors, ..    pieces of tensors, one file a rank
//! folder/checkpoint.json                               which pieces of which tensors are where, and their checksums
//!
//! state (a model and its optimizers as parts)
//!   ├──► saver (a save, in the background) ──► plan (which rank writes which piece where; pure), queue (copied chunks)
//!   ├──► load (an opened checkpoint) ──► index (checkpoint.json)         folder (what a killed save leaves, and the commit)
//!   └──► memory (copies in the hosts' memory) ◄── recovery (after a rank has died)       background (the thread of both savers)
//! ```
//!
//! A tensor is known by its name and the row-major order of its elements, so cuts of any kind are read by any other:
//! other numbers of ranks for data, tensor and pipeline parallelism, other stages of ZeRO.
//!
//! ```no_run
//! # use phalanx_parallel::{Result, checkpoint::{self, Checkpoint, Saver, Trained}, data_parallel::SingleDevice, launch};
//! # fn run(rank: &launch::Rank, model: &dyn phalanx_nn::Parameters) -> Result<()> {
//! # let wrapper = SingleDevice::new(model);
//! # let mut optimizer = phalanx_nn::Rule::init(phalanx_nn::Sgd::default(), vec![])?;
//! let trained = [Trained::new(model, &wrapper)];
//! let mut saver = Saver::new(rank.comm())?;
//! let settings = [("step".to_string(), "100".to_string())].into();
//! saver.save("run/checkpoint", checkpoint::parts(&trained, &[&optimizer])?, &settings)?;
//! // .. forward and backward of the next step ..
//! saver.release()?; // before the optimizer's step
//! // .. more steps ..
//! saver.wait()?; // now the checkpoint is on disk
//!
//! // Later, with as many ranks as there are then:
//! let saved = Checkpoint::open("run/checkpoint")?;
//! saved.restore(rank.comm(), &trained, &mut [&mut optimizer])?;
//! assert_eq!(saved.settings()["step"], "100");
//! # Ok(())
//! # }
//! ```

mod background;
mod chunk;
mod finite;
mod folder;
mod index;
mod load;
mod memory;
mod plan;
mod queue;
mod recovery;
mod saver;
mod state;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use load::Checkpoint;
pub use memory::{Host, MemorySaver, MemoryStore};
pub use recovery::Recovery;
pub use saver::Saver;
pub use state::{Trained, parts};

/// A run's own texts in a checkpoint, beside the tensors: its step, its place in the data, its settings.
pub type Settings = BTreeMap<String, String>;

/// Bytes that have a checksum of their own.
pub const BLOCK: usize = 4 << 20;

/// Dtypes by their names.
mod dtype_text {
    use phalanx_tensor::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        DType::parse(&name).ok_or_else(|| D::Error::custom(format!("there is no dtype {name:?}")))
    }
}

/// An error of a file or folder.
fn file_error(path: &std::path::Path, why: impl std::fmt::Display) -> crate::Error {
    phalanx_tensor::Error::file(path, why).into()
}
