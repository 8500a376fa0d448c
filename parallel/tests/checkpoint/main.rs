//! Sharded checkpoints: any layout reads what any other has saved, and nothing that is torn or damaged is read.

mod boxes;
mod damage;
#[path = "../gpt/mod.rs"]
mod gpt;
mod layouts;
#[path = "../comm/port.rs"]
mod port;
mod saves;
mod wires;

use std::path::{Path, PathBuf};

use phalanx_parallel::checkpoint::{Saver, Settings};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, launch};

/// A folder of a test's own, removed when it ends.
struct Place(PathBuf);

impl Place {
    fn new(test: &str) -> Place {
        let path = std::env::temp_dir().join(format!("phalanx-checkpoint-{}-{test}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Place(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Saves and waits, with small blocks, so that tensors have several.
fn save(rank: &launch::Rank, folder: &Path, parts: Vec<ShardedTensor>, settings: &Settings) -> Result<()> {
    let mut saver = Saver::new(rank.comm())?.with_block(64)?;
    saver.save(folder, parts, settings)?;
    saver.wait()
}

fn settings(step: u64) -> Settings {
    [("step".to_string(), step.to_string()), ("text".to_string(), "\"quoted\" \u{1f600}".to_string())].into()
}
