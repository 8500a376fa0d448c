//! The share of a step's time that saves cost: a run that saves every tenth step beside one that saves at its end only, in turns.

use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx::nn::models::{GptConfig, ModelConfig};
use phalanx::parallel::hybrid::decoder;
use phalanx::train::data::TensorDataset;
use phalanx::train::{Callback, Config, MeshRank, Record, Result, Trainer};
use phalanx::{Device, Tensor};

use crate::measure::{Report, median};

const EVERY: u64 = 10;
/// Measured steps: four saves fall into them.
const STEPS: u64 = 4 * EVERY;
const ROUNDS: usize = 5;
const CONTEXT: usize = 128;

/// When each step ended.
#[derive(Clone, Default)]
struct Clock(Arc<Mutex<Vec<Instant>>>);

impl Callback for Clock {
    fn step(&mut self, _: &Record) -> Result<()> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(Instant::now());
        Ok(())
    }
}

/// How long the steps take after the first one, saves included that begin among them.
fn time(threads: usize, save_every: u64, save_memory_mib: usize) -> Result<Duration> {
    let out = std::env::temp_dir().join(format!("phalanx-bench-saves-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&out);
    let config = Config {
        steps: STEPS + 1,
        batch: 8,
        threads: Some(threads),
        save_every,
        save_memory_mib,
        out: Some(out.clone()),
        ..Config::default()
    };
    let rows = |by: i64| {
        let tokens: Vec<i64> = (0..64 * CONTEXT as i64).map(|i| ((i + by) * 7919 % 1013) % 256).collect();
        Tensor::from_slice(&tokens, &[64, CONTEXT], Device::CPU)
    };
    let (clock, model) = (Clock::default(), ModelConfig::Gpt(GptConfig::new(256, CONTEXT, 6, 4, 256)));
    let trainer = Trainer::new(config.clone()).data(TensorDataset::new(vec![rows(0)?, rows(1)?])?);
    let part =
        |rank: &MeshRank| Ok(decoder(&model, &config.layout, &rank.groups, &rank.scope(&config), None)?);
    let done = trainer.callback(clock.clone()).run_parts(part);
    let _ = std::fs::remove_dir_all(&out);
    done?;
    let times = clock.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(times[times.len() - 1] - times[0])
}

/// Emits a step's time without saves, and the share of it that saves cost when they copy what the disk has not taken, and when updates
/// wait for the disk. Returns whether the first is at most 3 %.
pub fn run(report: &Report, threads: usize) -> Result<bool, Box<dyn Error>> {
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (times, (every, memory)) in times.iter_mut().zip([(0, 0), (EVERY, 1024), (EVERY, 0)]) {
            times.push(time(threads, every, memory)?.as_secs_f64() * 1e3 / STEPS as f64);
        }
    }
    let [plain, copied, waited] = times.map(|mut times| median(&mut times));
    let share = |with: f64| 100.0 * (with / plain - 1.0);
    report.emit("saves", "step", plain, "ms");
    report.emit("saves", "copied", share(copied), "%");
    report.emit("saves", "waited", share(waited), "%");
    Ok(share(copied) <= 3.0)
}
