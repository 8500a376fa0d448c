//! Disks that lose power, fill up, refuse or are slow, while a run saves its checkpoints. A layer in C between the run and its files
//! (`disks/shim.c`) records and disturbs its calls. It needs Linux and a C compiler.
#![cfg(target_os = "linux")]

#[path = "disks/errors.rs"]
mod errors;
#[path = "disks/journal.rs"]
mod journal;
#[path = "disks/power.rs"]
mod power;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_nn::autograd::Var;
use phalanx_nn::{Batch, BatchNormConfig, LinearConfig, Loss, MseLoss, Relu, SequentialConfig};
use phalanx_tensor::{Device, Tensor};
use phalanx_train::data::TensorDataset;
use phalanx_train::{Config, Result, Settings, Trainer, numbers_in};

/// Steps of a run, and how often it saves.
const STEPS: u64 = 8;
const EVERY: u64 = 2;

/// A run as `FLAGS` says. Says how it ended.
#[test]
#[ignore = "a part of other tests"]
fn child() {
    match train(&std::env::var("FLAGS").unwrap()) {
        Ok(()) => println!("\nended well"),
        Err(error) => println!("\nended with: {error}"),
    }
}

fn train(flags: &str) -> Result<()> {
    let mut settings = Settings::new(Config::default());
    let common = format!("--steps {STEPS} --save-every {EVERY} --batch 4 --threads 1 --workers 0");
    settings.words(common.split(' ').chain(flags.split_whitespace()).map(String::from))?;
    let config = settings.resolve()?;
    let rows = |n: usize, by: f32| {
        let numbers: Vec<f32> = (0..n * 8).map(|i| ((i * i + i / 3) % 11) as f32 / 11.0 - by).collect();
        Tensor::from_slice(&numbers, &[n, 8], Device::CPU)
    };
    let data = |n| TensorDataset::new(vec![rows(n, 0.0)?, rows(n, 0.5)?]);
    let trainer = Trainer::new(config).settings("disks", &settings).data(data(32)?).validation(data(8)?);
    trainer.run_layers(layers, loss).map(drop)
}

fn layers() -> SequentialConfig {
    SequentialConfig::new()
        .with(LinearConfig::new(8, 12))
        .with(BatchNormConfig::new(12))
        .with(Relu)
        .with(LinearConfig::new(12, 8))
}

fn loss(output: &Var, batch: &Batch) -> Result<Var> {
    let [_, wanted] = batch.vars()?;
    Ok(MseLoss::default().forward(output, &wanted)?)
}

/// The compiled layer; none without a compiler, which is said.
fn shim(test: &str) -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{}.so", std::process::id()));
        let object = built.with_file_name("shim.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/disks/shim.c");
        let compiler = std::env::var("CC").unwrap_or("cc".into());
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]).args([&built, &source]);
        let output = command.output().ok()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Another process may build the same.
        std::fs::rename(built, &object).unwrap();
        Some(object)
    };
    let built = BUILT.get_or_init(build).as_deref();
    if built.is_none() {
        println!("disks: {test} skipped: there is no C compiler `cc`");
    }
    built
}

/// A run in a process of its own, over the layer with these variables.
fn start(shim: &Path, folder: &Path, flags: &str, variables: &[(&str, String)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--ignored", "--nocapture"]).env("FLAGS", flags);
    command.env("LD_PRELOAD", shim).env("SHIM_FOLDER", folder);
    command.envs(variables.iter().map(|(name, value)| (*name, value)));
    command.stdin(Stdio::null()).output().unwrap()
}

/// How a run says that it ended; empty if it was killed.
fn outcome(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout);
    said.lines().find_map(|line| line.strip_prefix("ended ")).unwrap_or_default().into()
}

/// A folder of the test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("phalanx-disks-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The bits of the losses in a run's folder, by step.
fn losses(run: &Path) -> Vec<(u64, u64)> {
    let numbers = numbers_in(&run.join("metrics.jsonl"), "loss");
    numbers.into_iter().map(|(step, loss)| (step, loss.to_bits())).collect()
}
