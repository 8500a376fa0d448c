//! Keys and configurations, there and back.

use std::path::PathBuf;

use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::Device;

use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{OneCycle, Schedule};
use phalanx_tensor::DType;

use super::*;
use crate::{Keyed, Settings, Source};

/// A configuration in which every setting that has a key is other than the default.
fn unlike() -> Config {
    let layout = Layout {
        dp: 2,
        tp: 3,
        pp: 4,
        schedule: "interleaved".into(),
        chunks: 5,
        micro_batches: 6,
        recompute: RecomputeMode::ExceptLast,
        sequence_parallel: true,
    };
    Config {
        steps: 9,
        batch: 24,
        seed: u64::MAX,
        lr: Schedule::WarmupStableDecay { lr: 0.01, warmup: 1, decay: 3, total: 9, min: 1e-9 },
        clip: None,
        dtype: DType::F16,
        grad_dtype: Some(DType::BF16),
        device: Device::Meta(0),
        threads: Some(3),
        layout,
        zero: 2,
        find_unused: true,
        chains: 1,
        asynchronous: None,
        backend: Some(Backend::Threads),
        capture: false,
        workers: 0,
        prefetch: 7,
        save_every: 5,
        keep_last: 3,
        keep_best: true,
        restore_best: true,
        validate_every: 2,
        validation_rows: Some(8),
        plateau: Some(Plateau { factor: 0.25, patience: 2 }),
        ema: Some(0.75),
        loss_scaling: Some(false),
        patience: Some(4),
        on_divergence: OnDivergence::Rollback { most: 3 },
        explodes_at: 2.5,
        out: Some("a \"b\"\n".into()),
        rescue: None,
        resume: Some("true".into()),
        trace: Some(PathBuf::from("1.5")),
    }
}

#[test]
fn a_file_of_all_keys_gives_every_setting_back() {
    let schedules = [
        unlike().lr,
        Schedule::Constant { lr: 2.0, warmup: 3 },
        Schedule::Cosine { lr: 0.1, warmup: 3, total: 9, cycles: 0.5, min: 0.01 },
        Schedule::Linear { lr: 0.1, warmup: 3, total: 9, min: 0.02 },
        Schedule::InverseSqrt { lr: 0.1, warmup: 3 },
        Schedule::Step { lr: 0.1, step_size: 4, gamma: 0.5 },
    ];
    for lr in schedules {
        let wanted = Config { lr, ..unlike() };
        let mut read = Settings::new(Config::default());
        read.read_text(&Settings::new(wanted.clone()).to_toml(&[]), "run.toml").unwrap();
        assert_eq!(read.resolve().unwrap(), wanted);
    }
}

#[test]
fn a_key_of_a_later_source_wins_over_one_that_it_rules_out() {
    let resolve = |file: &str, words: &[&str]| {
        let mut settings = Settings::new(Config::default());
        settings.read_text(file, "run.toml").unwrap();
        settings.words(words.iter().map(|word| word.to_string())).unwrap();
        settings.resolve().map(|config| config.layout.dp)
    };
    assert_eq!(resolve("dp = 1", &["--ranks", "4"]).unwrap(), 4);
    assert_eq!(resolve("ranks = 4", &["--dp", "2"]).unwrap(), 2);
    assert_eq!(resolve("ranks = 4\ntp = 2", &[]).unwrap(), 2);
    assert!(resolve("ranks = 4\ndp = 2", &[]).unwrap_err().to_string().contains("`ranks` 4 is not `dp` 2"));
    assert_eq!(
        resolve("schedule = \"interleaved\"\npp = 2\nvirtual-stages = 3", &["--schedule", "1f1b"]).unwrap(),
        1
    );
    assert!(resolve("virtual-stages = 3", &[]).is_err());
    let mut both = Settings::new(Config::default());
    both.set("steps", "5", Source::Words).unwrap();
    both.read_text("steps = 6", "run.toml").unwrap();
    assert_eq!(both.resolve().unwrap().steps, 5);
}

#[test]
fn steps_are_those_of_the_schedule_too() {
    let mut settings = Settings::new(Config::default());
    settings.words(["--lr-schedule", "one-cycle", "--steps", "50"].map(String::from)).unwrap();
    let config = settings.resolve().unwrap();
    config.check().unwrap();
    assert!(matches!(config.lr, Schedule::OneCycle(OneCycle { total: 50, .. })));
    let error = Config { steps: 51, ..config }.check().unwrap_err().to_string();
    assert!(error.contains("`steps` is 51") && error.contains("ends after 50"), "{error}");
}

#[test]
fn keys_have_names_of_their_own() {
    let mut names: Vec<&str> = Config::keys().iter().map(|key| key.name).collect();
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all);
}
