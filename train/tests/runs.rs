//! Runs through the public API: every layout trains the same model, resumes bit for bit, and names the place of an error.

#[path = "runs/answers.rs"]
mod answers;
#[path = "runs/checkpoints.rs"]
mod checkpoints;
#[path = "runs/digests.rs"]
mod digests;
#[path = "runs/experts.rs"]
mod experts;
#[path = "runs/faults.rs"]
mod faults;
#[path = "runs/generation.rs"]
mod generation;
#[path = "runs/offload.rs"]
mod offload;
#[path = "runs/packed.rs"]
mod packed;
#[path = "runs/plans.rs"]
mod plans;
#[path = "runs/recovery.rs"]
mod recovery;
#[path = "runs/reports.rs"]
mod reports;
#[path = "runs/sanity.rs"]
mod sanity;
#[path = "runs/settings.rs"]
mod settings;
#[path = "runs/skips.rs"]
mod skips;
#[path = "runs/waits.rs"]
mod waits;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    Batch, BatchNormConfig, Conv2dConfig, CrossEntropyLoss, DropoutConfig, Flatten, LinearConfig, Loss,
    MaxPool2d, Module, Relu, Schedule, Sequential, SequentialConfig,
};
use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::{DType, Device, RngKey, Tensor};
use phalanx_train::data::{Dataset, Shuffled, Subset, TensorDataset};
use phalanx_train::{
    Callback, Config, Event, OnDivergence, Record, Result, Summary, Trainer, adamw, numbers_in,
};

/// Pictures `[n, 1, 8, 8]` whose left or right half is brighter.
fn pictures(n: usize, spoilt: Option<usize>) -> TensorDataset {
    let draws = RngKey { seed: 3, step: 0 }.site(9);
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for picture in 0..n {
        let side = draws.block(picture as u64, 0)[0] % 2;
        for at in 0..64u64 {
            let noise = (draws.block(picture as u64, 1 + at)[0] % 1000) as f32 / 500.0;
            let bright = u32::from(at % 8 > 3) == side;
            pixels.push(if spoilt == Some(picture) { f32::NAN } else { noise + f32::from(u8::from(bright)) });
        }
        labels.push(i64::from(side));
    }
    let pixels = Tensor::from_slice(&pixels, &[n, 1, 8, 8], Device::CPU).unwrap();
    TensorDataset::new(vec![pixels, Tensor::from_slice(&labels, &[n], Device::CPU).unwrap()]).unwrap()
}

fn data() -> [Subset<Arc<TensorDataset>>; 2] {
    pictures(200, None).split(0.8, 1).unwrap()
}

fn layers() -> SequentialConfig {
    SequentialConfig::new()
        .with(Conv2dConfig::new(1, 4, [3, 3]).with_padding([1, 1]))
        .with(BatchNormConfig::new(4))
        .with(Relu)
        .with(MaxPool2d::new([2, 2]))
        .with(Flatten::default())
        .with(DropoutConfig::new(0.1))
        .with(LinearConfig::new(64, 2))
}

fn loss(output: &Var, batch: &Batch) -> Result<Var> {
    let [_, labels] = batch.vars()?;
    Ok(CrossEntropyLoss::default().forward(output, &labels)?)
}

fn of_module(model: &Sequential, batch: &Batch) -> Result<Var> {
    let [pixels, _] = batch.vars()?;
    loss(&model.forward(&pixels)?, batch)
}

fn config(layout: Layout, zero: u8) -> Config {
    let lr = Schedule::Constant { lr: 5e-3, warmup: 2 };
    Config {
        steps: 12,
        batch: 16,
        lr,
        layout,
        zero,
        validate_every: 4,
        threads: Some(1),
        ..Config::default()
    }
}

/// The reports of a run: the bits of its losses and of its validation losses, and its events.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    losses: Vec<u64>,
    validations: Vec<u64>,
    events: Vec<String>,
}

impl Callback for Told {
    fn step(&mut self, record: &Record) -> Result<()> {
        let mut told = self.0.lock().unwrap();
        told.losses.push(record.loss.to_bits());
        told.validations.extend(record.validation_loss.map(f64::to_bits));
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        let text = match event {
            Event::Saving { step, .. } => format!("saving {step}"),
            Event::Skipped { step, .. } => format!("skipped {step}"),
            Event::RolledBack { step, to, .. } => format!("back from {step} to {to}"),
            Event::Stopping { step, .. } => format!("stopping {step}"),
            _ => return Ok(()),
        };
        self.0.lock().unwrap().events.push(text);
        Ok(())
    }
}

impl Told {
    fn losses(&self) -> Vec<u64> {
        self.0.lock().unwrap().losses.clone()
    }

    fn validations(&self) -> Vec<u64> {
        self.0.lock().unwrap().validations.clone()
    }

    fn events(&self) -> Vec<String> {
        self.0.lock().unwrap().events.clone()
    }
}

fn run(config: Config, told: &Told) -> Result<Summary> {
    let [training, held_out] = data();
    let trainer = Trainer::new(config).data(training).validation(held_out).callback(told.clone());
    trainer.run_layers(layers, loss)
}

/// A folder of the test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("phalanx-train-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Replicas have the bits of one rank that adds as many chains; stages, ZeRO and micro-batches those of one rank with as many
/// micro-batches.
#[test]
fn every_layout_trains_and_validates_with_the_bits_of_one_rank() {
    let one = Layout::default();
    for (dp, micro_batches) in [(1, 1), (2, 1), (1, 3), (2, 2)] {
        let plain = Told::default();
        let layout = Layout { micro_batches, ..one.clone() };
        run(Config { chains: dp, ..config(layout, 0) }, &plain).unwrap();
        assert_eq!((plain.losses().len(), plain.validations().len()), (12, 3));
        for (pp, schedule, zero) in [
            (1, "1f1b", 0),
            (1, "1f1b", 3),
            (2, "1f1b", 0),
            (2, "zb-v", 2),
            (3, "gpipe", 1),
            (2, "zb-h2", 0),
            (3, "zb-h2", 3),
            (4, "zb-h2", 1),
        ] {
            let layout = Layout { dp, pp, micro_batches, schedule: schedule.into(), ..one.clone() };
            let told = Told::default();
            run(config(layout, zero), &told).unwrap();
            let case = format!("dp {dp} x pp {pp}, {micro_batches} micro-batches, {schedule}, ZeRO {zero}");
            // Batch norm's running statistics are the first replica's, as Ddp has them; a chain of one rank sees all chains.
            assert_eq!(told.losses(), plain.losses(), "{case}");
            if dp == 1 {
                assert_eq!(told.validations(), plain.validations(), "{case}");
            }
        }
    }
}

#[test]
fn a_module_under_zero_3_on_two_ranks_is_the_layers() {
    let (layered, plain) = (Told::default(), Told::default());
    let layout = Layout { dp: 2, ..Layout::default() };
    run(config(layout.clone(), 3), &layered).unwrap();
    let [training, held_out] = data();
    let trainer = Trainer::new(config(layout, 3)).data(training).validation(held_out).callback(plain.clone());
    trainer.run(|scope| Ok(layers().init(scope)?), of_module).unwrap();
    assert_eq!((layered.losses(), layered.validations()), (plain.losses(), plain.validations()));
}

/// Stops a run as a signal would, at the step after the seventh.
struct StopAt(Arc<AtomicBool>);

impl Callback for StopAt {
    fn step(&mut self, record: &Record) -> Result<()> {
        self.0.fetch_or(record.step == 6, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn an_interrupted_run_without_a_folder_locks_the_one_that_it_is_given() {
    let folder = Folder::new();
    let interrupted = || {
        let stop = Arc::new(AtomicBool::new(false));
        let rescue = Some(folder.path().to_path_buf());
        let config = Config { rescue, validate_every: 0, ..config(Layout { dp: 2, ..Layout::default() }, 0) };
        let trainer = Trainer::new(config).data(data()[0].clone()).callback(StopAt(stop.clone()));
        trainer.stop_when(stop).run_layers(layers, loss)
    };
    interrupted().unwrap();
    assert_eq!(phalanx_train::checkpoints::latest(folder.path()).unwrap().settings()["step"], "8");
    // Another run is about to write there.
    let path = folder.path().join(".lock");
    assert!(!path.exists(), "the lock is left");
    let lock = std::fs::File::create(&path).unwrap();
    lock.lock().unwrap();
    let error = interrupted().unwrap_err().to_string();
    assert!(error.contains(" is in use by another process"), "{error}");
}

#[test]
fn a_stopped_run_goes_on_bit_for_bit_under_another_layout() {
    let whole = Told::default();
    run(config(Layout { dp: 2, ..Layout::default() }, 3), &whole).unwrap();
    let folder = Folder::new();
    let out = Some(folder.path().to_path_buf());
    let config = |zero| Config {
        out: out.clone(),
        save_every: 5,
        ..config(Layout { dp: 2, ..Layout::default() }, zero)
    };
    let (stop, told) = (Arc::new(AtomicBool::new(false)), Told::default());
    let [training, held_out] = data();
    let trainer = Trainer::new(config(3)).data(training).validation(held_out).callback(told.clone());
    let trainer = trainer.callback(StopAt(stop.clone())).stop_when(stop);
    let summary = trainer.run_layers(layers, loss).unwrap();
    assert_eq!((summary.stopped.as_deref(), told.losses().len()), (Some("interrupted"), 8));
    assert_eq!(told.events(), ["saving 5", "stopping 8", "saving 8"]);
    let [training, held_out] = data();
    let trainer =
        Trainer::new(config(1)).data(training).validation(held_out).callback(told.clone()).resume_if_there();
    trainer.run_layers(layers, loss).unwrap();
    assert_eq!(told.losses(), whole.losses());
    assert_eq!(told.validations().last(), whole.validations().last());
    assert_eq!(numbers_in(&folder.path().join("metrics.jsonl"), "loss").len(), 12);
    for file in ["report.html", "loss.svg", "metrics.csv"] {
        assert!(folder.path().join(file).exists(), "{file}");
    }
}

#[test]
fn a_run_without_a_lower_validation_loss_ends_early_and_keeps_its_best() {
    let folder = Folder::new();
    let told = Told::default();
    // It learns nothing: no validation is better than the first.
    let still = Config { lr: Schedule::Constant { lr: 0.0, warmup: 0 }, ..config(Layout::default(), 0) };
    let config = Config {
        validate_every: 2,
        patience: Some(2),
        keep_best: true,
        out: Some(folder.path().into()),
        ..still
    };
    let [training, held_out] = data();
    let layers = || SequentialConfig::new().with(Flatten::default()).with(LinearConfig::new(64, 2));
    let trainer = Trainer::new(config).data(training).validation(held_out).callback(told.clone());
    let summary = trainer.run_layers(layers, loss).unwrap();
    assert_eq!(
        (told.losses().len(), told.events()),
        (6, vec!["stopping 6".to_string(), "saving 6".to_string()])
    );
    assert!(summary.stopped.is_some_and(|why| why.contains("2 validations")));
    let best = phalanx_train::checkpoints::best(folder.path()).unwrap();
    assert_eq!(best.settings()["step"], "2");
}

#[test]
fn what_cannot_be_is_refused_with_what_was_wanted() {
    let base = || config(Layout::default(), 0);
    let cases = [
        (Config { steps: 0, ..base() }, "`steps` is 0"),
        (
            Config { batch: 15, layout: Layout { dp: 2, ..Layout::default() }, ..base() },
            "15 rows cannot be shared by `dp` 2",
        ),
        (Config { zero: 4, ..base() }, "`zero` is 4"),
        (Config { clip: Some(-1.0), ..base() }, "`clip` is -1"),
        (Config { patience: Some(1), validate_every: 0, ..base() }, "validations on the way"),
        (Config { on_divergence: OnDivergence::Rollback { most: 1 }, ..base() }, "needs a folder"),
        (Config { layout: Layout { tp: 2, ..Layout::default() }, ..base() }, "got tp 2"),
        (Config { layout: Layout { pp: 9, ..Layout::default() }, ..base() }, "7 layers for 9 stages"),
    ];
    for (config, wanted) in cases {
        let error = run(config, &Told::default()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error:?}, wanted {wanted:?}");
    }
    for pp in [1, 2] {
        let layout = Layout { pp, recompute: RecomputeMode::Attention, ..Layout::default() };
        let wanted = "train: got recomputation of attention, which is a mode of transformer models; \
                      wanted never, except-last or always";
        let error = run(config(layout.clone(), 0), &Told::default()).unwrap_err();
        assert_eq!(error.to_string(), wanted);
        if pp == 1 {
            let trainer = Trainer::new(config(layout, 0)).data(data()[0].clone());
            let error = trainer.run(|scope| Ok(layers().init(scope)?), of_module).unwrap_err();
            assert_eq!(error.to_string(), wanted);
        }
    }
    let error = Trainer::new(base()).run_layers(layers, loss).unwrap_err().to_string();
    assert!(error.contains("nothing to train on"), "{error}");
}

// Losses that are no numbers or explode are found at their step, and all ranks deal with them alike.

/// The batches of a run whose items have a NaN somewhere.
fn spoilt(config: Config, told: &Told) -> Result<Summary> {
    let trainer = Trainer::new(config).data(pictures(400, Some(77))).validation(pictures(40, None));
    trainer.callback(told.clone()).run_layers(layers, loss)
}

#[test]
fn a_nan_is_found_at_its_step_on_any_rank() {
    let steps = |layout| {
        let told = Told::default();
        let error = spoilt(config(layout, 0), &told).unwrap_err().to_string();
        assert!(error.contains("the loss is NaN") && error.contains("tensor 0 of the batch"), "{error}");
        let step = format!("step {}", told.losses().len());
        assert!(error.contains(&step), "{error}, wanted {step}");
        told.losses().len()
    };
    let one = steps(Layout::default());
    assert!(one < 10);
    assert_eq!(steps(Layout { dp: 2, ..Layout::default() }), one);
}

#[test]
fn a_step_with_a_nan_is_skipped_and_training_goes_on() {
    let told = Told::default();
    let config = Config {
        on_divergence: OnDivergence::Skip { most: 1 },
        ..config(Layout { dp: 2, ..Layout::default() }, 3)
    };
    let summary = spoilt(config, &told).unwrap();
    assert_eq!((told.losses().len(), told.events().len()), (12, 1));
    assert!(summary.last_loss.is_finite());
    // Nor does the batch stay in batch norm's running statistics.
    assert!(summary.validation_loss.is_some_and(f64::is_finite));
    let odd = told.losses().iter().filter(|bits| f64::from_bits(**bits).is_nan()).count();
    assert_eq!(odd, 1);
}

#[test]
fn a_run_goes_back_to_its_checkpoint_and_on_with_other_data() {
    let (told, folder) = (Told::default(), Folder::new());
    let out = Some(folder.path().to_path_buf());
    let on_divergence = OnDivergence::Rollback { most: 1 };
    let config =
        Config { on_divergence, save_every: 1, out, ..config(Layout { dp: 2, ..Layout::default() }, 1) };
    let summary = spoilt(config.clone(), &told).unwrap();
    assert!(told.events().iter().any(|event| event.starts_with("back from")), "{:?}", told.events());
    assert!(summary.last_loss.is_finite());
    assert_eq!(numbers_in(&folder.path().join("metrics.jsonl"), "loss").len(), 12);
    let table = std::fs::read_to_string(folder.path().join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 13, "{table}");
    // There is nothing to go back to.
    let never = Config { save_every: 100, out: Some(Folder::new().path().into()), ..config };
    let error = spoilt(never, &Told::default()).unwrap_err().to_string();
    assert!(error.contains("the loss is NaN"), "{error}");
}

#[test]
fn an_exploding_loss_is_found() {
    let config = Config {
        explodes_at: 3.0,
        steps: 40,
        clip: None,
        lr: Schedule::Step { lr: 1e-3, step_size: 10, gamma: 1e7 },
        ..config(Layout::default(), 0)
    };
    let dp = Config { layout: Layout { dp: 2, ..Layout::default() }, ..config.clone() };
    for config in [config, dp] {
        let error = run(config, &Told::default()).unwrap_err().to_string();
        assert!(error.contains("more than 3 times the last ones' mean"), "{error}");
        let named = error.split("; the largest gradient is that of ").nth(1).unwrap_or_default();
        assert!(named.contains("weight") || named.contains("bias"), "{error}");
    }
}

/// What losses are compared with is in the checkpoint: a run that has just gone on knows what its losses were.
#[test]
fn an_exploding_loss_is_found_behind_a_resume() {
    let folder = Folder::new();
    let change = |config: Config| {
        let lr = Schedule::Step { lr: 1e-3, step_size: 10, gamma: 1e7 };
        Config { explodes_at: 3.0, steps: 16, clip: None, lr, ..config }
    };
    settings::on(&folder, Some(8), change);
    let base = Config { out: Some(folder.path().into()), ..config(Layout::default(), 0) };
    let trainer = Trainer::new(change(base)).data(pictures(100, None)).validation(pictures(40, None));
    let error = trainer.resume_if_there().run_layers(layers, loss).unwrap_err().to_string();
    assert!(error.contains("more than 3 times the last ones' mean"), "{error}");
}
