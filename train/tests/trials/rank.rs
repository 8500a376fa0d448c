//! The program that every rank of a trial runs.

use std::sync::Arc;
use std::time::Duration;

use phalanx_nn::models::{GptConfig, ModelConfig};
use phalanx_parallel::hybrid::decoder;
use phalanx_tensor::{Device, Tensor};
use phalanx_train::data::TensorDataset;
use phalanx_train::{Config, Error, MeshRank, Result, Settings, Trainer, start, stop_on_signals};

pub const STEPS: u64 = 24;
pub const SAVE_EVERY: u64 = 4;
/// For collectives and for the start: much longer than a step on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(if cfg!(debug_assertions) { 6 } else { 4 });

/// The flags of every run.
pub fn flags() -> String {
    let seconds = TIMEOUT.as_secs();
    format!(
        "--steps {STEPS} --save-every {SAVE_EVERY} --batch 8 --digests {SAVE_EVERY} --threads 1 --workers 0 --timeout {seconds} \
         --join-timeout {seconds}"
    )
}

/// Trains as `FLAGS` says, on data that `SHIFT` changes. Says how that ended; returns the exit code.
pub fn run() -> i32 {
    match train() {
        Ok(()) => 0,
        Err(Error::Elsewhere) => {
            println!("\nended elsewhere");
            2
        }
        Err(error) => {
            println!("\nended with: {error}");
            2
        }
    }
}

fn train() -> Result<()> {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let mut settings = Settings::new(Config::default());
    settings.words(variable("FLAGS").split_whitespace().map(String::from))?;
    let config = settings.resolve()?;
    let shift: i64 = variable("SHIFT").parse().unwrap_or(0);
    let rows = |by: i64| {
        let tokens: Vec<i64> = (0..64 * 4).map(|i| (i * i + i / 3 + by) % 12).collect();
        Tensor::from_slice(&tokens, &[64, 4], Device::CPU)
    };
    let model = ModelConfig::Gpt(GptConfig::new(12, 4, 4, 2, 8));
    let mut stop = None;
    start(
        &config,
        |_| {},
        |process| {
            // A rank that outlives others begins here again, and there may be a checkpoint now.
            let config = settings.resolve()?;
            let stop = match &stop {
                Some(stop) => Arc::clone(stop),
                None => stop.insert(stop_on_signals()?).clone(),
            };
            let part = |rank: &MeshRank| {
                Ok(decoder(&model, &config.layout, &rank.groups, &rank.scope(&config), None)?)
            };
            let data = TensorDataset::new(vec![rows(shift)?, rows(shift + 1)?])?;
            let trainer =
                Trainer::new(config.clone()).settings("trials", &settings).in_process_group(process);
            trainer.data(data).stop_when(stop).run_parts(part).map(drop)
        },
    )
}
