//! The memory of a run: a meta device's report has the peaks of ranks on CPUs. Alone in this file, whose ledgers no other test may touch.

use std::sync::{Arc, Mutex};

use phalanx_nn::models::{GptConfig, ModelConfig, RecomputeMode};
use phalanx_parallel::hybrid::{Layout, StagedModel, decoder};
use phalanx_tensor::{DType, Device};
use phalanx_train::data::TokenWindows;
use phalanx_train::{Callback, Config, MeshRank, Record, Result, Trainer};

const CONTEXT: usize = 16;

/// The peaks of all ranks so far.
#[derive(Clone, Default)]
struct Peaks(Arc<Mutex<Vec<usize>>>);

impl Callback for Peaks {
    fn step(&mut self, record: &Record) -> Result<()> {
        *self.0.lock().unwrap() = record.peak_bytes.clone();
        Ok(())
    }
}

fn model() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(97, CONTEXT, 3, 4, 32).with_dropout(0.1))
}

fn trainer(config: &Config) -> Trainer {
    let tokens: Vec<u32> = (0..4000).map(|i| (i * i + i / 7) % 97).collect();
    Trainer::new(config.clone()).samples(TokenWindows::new(tokens, CONTEXT, 5).unwrap(), CONTEXT)
}

fn part(config: &Config, rank: &MeshRank) -> Result<Box<dyn StagedModel>> {
    Ok(decoder(&model(), &config.layout, &rank.groups, &rank.scope(config), None)?)
}

/// The numbers of the rows of that name: at first the peak alone and within the sum's, then the bytes after backward.
fn rows(report: &str, name: &str) -> Vec<usize> {
    let rows = report.lines().filter_map(|line| line.trim_start().strip_prefix(name));
    rows.flat_map(|row| row.split_whitespace().map(|number| number.parse().unwrap())).collect()
}

#[test]
fn a_meta_devices_report_has_the_peaks_of_ranks_on_cpus_to_the_byte() {
    let lean = Layout { recompute: RecomputeMode::Always, logits_max: Some(300), ..Layout::default() };
    for (layout, zero) in [
        (Layout { tp: 2, dp: 2, sequence_parallel: true, ..lean.clone() }, 3),
        (Layout { dp: 4, ..lean.clone() }, 3),
        (Layout { dp: 2, micro_batches: 2, ..lean }, 1),
        (Layout { dp: 2, ..Layout::default() }, 0),
    ] {
        let config =
            Config { steps: 2, batch: 8, layout, zero, dtype: DType::BF16, workers: 0, ..Config::default() };
        let peaks = Peaks::default();
        trainer(&config).callback(peaks.clone()).run_parts(|rank| part(&config, rank)).unwrap();
        let meta = Config { device: Device::Meta(0), ..config.clone() };
        let report = trainer(&meta).memory(|rank| part(&meta, rank)).unwrap().swap_remove(0);
        let [alone, together, after] = rows(&report, "in all")[..] else { unreachable!("{report}") };
        assert_eq!(alone, peaks.0.lock().unwrap()[0], "{:?}, ZeRO {zero}: {report}", config.layout);
        let names = ["parameters", "gradients", "optimizer state", "activations", "buffers"];
        let of = |column: usize| names.iter().map(|name| rows(&report, name)[column]).sum::<usize>();
        assert_eq!([of(1), of(2)], [together, after], "{report}");
        assert!(together == alone && of(0) >= alone, "{report}");
    }
}
