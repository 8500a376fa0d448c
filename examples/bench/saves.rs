//! What a save every tenth step costs, as a share of the steps' time.
//!
//! A run saves every twentieth step, and each ten steps into which a save falls are set beside the ten after them. So what else the
//! machine does, which changes within seconds, meets both alike.

use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use phalanx::nn::models::{GptConfig, ModelConfig};
use phalanx::parallel::hybrid::decoder;
use phalanx::train::data::TensorDataset;
use phalanx::train::{Callback, Config, MeshRank, Record, Result, Trainer};
use phalanx::{Device, Tensor};

use crate::measure::{Report, median};

const EVERY: u64 = 10;
/// Saves of a run, after one that is not counted.
const SAVES: u64 = 8;
const ROUNDS: usize = 3;
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

/// How long ten steps take with a save and without one after them, in ms, for each save of a run.
fn pairs(threads: usize, save_memory_mib: usize) -> Result<Vec<[f64; 2]>> {
    let out = std::env::temp_dir().join(format!("phalanx-bench-saves-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&out);
    let config = Config {
        steps: 2 * EVERY * (SAVES + 2),
        batch: 8,
        threads: Some(threads),
        save_every: 2 * EVERY,
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
    let ends = clock.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // Ten steps begin before the callback of the step after which there is a save.
    let ends: Vec<Instant> =
        ends.iter().copied().skip(2 * 2 * EVERY as usize - 2).step_by(EVERY as usize).collect();
    let tens: Vec<f64> = ends.windows(2).map(|ends| (ends[1] - ends[0]).as_secs_f64() * 1e3).collect();
    Ok(tens.as_chunks().0.to_vec())
}

/// Emits a step's time without saves, and the share of it that saves cost when they copy what the disk has not taken, and when updates
/// wait for the disk: the middle of all saves, and its quartiles. Returns whether the first is at most 3 %.
pub fn run(report: &Report, threads: usize) -> Result<bool, Box<dyn Error>> {
    let mut pairs_of = [const { Vec::new() }; 2];
    for _ in 0..ROUNDS {
        for (of, memory) in pairs_of.iter_mut().zip([1024, 0]) {
            of.extend(pairs(threads, memory)?);
        }
    }
    let mut plain: Vec<f64> = pairs_of.iter().flatten().map(|[_, without]| without / EVERY as f64).collect();
    report.emit("saves", "step", median(&mut plain), "ms");
    let [copied, _] = [("copied", 0), ("waited", 1)].map(|(name, at)| {
        let mut shares: Vec<f64> =
            pairs_of[at].iter().map(|[with, without]| 100.0 * (with / without - 1.0)).collect();
        let share = median(&mut shares);
        report.emit("saves", name, share, "%");
        report.emit("saves", &format!("{name}, lower quartile"), shares[shares.len() / 4], "%");
        report.emit("saves", &format!("{name}, upper quartile"), shares[shares.len() * 3 / 4], "%");
        share
    });
    Ok(copied <= 3.0)
}
