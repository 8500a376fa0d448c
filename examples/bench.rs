//! The benchmark: one workload a run, a JSON line a measurement.
//!
//! ```text
//! cargo run --release --example bench -- gpt-s|gpt-m|gpt-bf16|ops|large-ops|sweep|dims|cliffs|models|overhead|rayon|dist|allreduce|engine|saves|generate --threads N [--data FILE]
//! cargo run --release --example bench -- gpt2-124m|gpu-ops --device cuda
//! ```
//! Workloads, initial weights and batches are those of the peers that results are compared with, so the first five
//! losses are known; a run whose losses differ does other work and exits with 1.

#[path = "bench/cliffs.rs"]
mod cliffs;
#[path = "bench/dist.rs"]
mod dist;
#[path = "bench/generate.rs"]
mod generate;
#[path = "bench/gpt.rs"]
mod gpt;
#[path = "bench/gpu_ops.rs"]
mod gpu_ops;
#[path = "bench/measure.rs"]
mod measure;
#[path = "bench/models.rs"]
mod models;
#[path = "bench/ops.rs"]
mod ops;
#[path = "bench/overhead.rs"]
mod overhead;
#[path = "bench/saves.rs"]
mod saves;
#[allow(dead_code)] // the example uses all of it
#[path = "bench/sweep.rs"]
mod sweep;

use std::path::PathBuf;
use std::process::ExitCode;

use measure::Report;
use phalanx::Device;
use phalanx::train::{self, Error, Settings, choices, keyed};

choices! {
    enum Workload {
        GptS = "gpt-s",
        GptM = "gpt-m",
        GptBf16 = "gpt-bf16",
        Gpt2 = "gpt2-124m",
        GpuOps = "gpu-ops",
        Ops = "ops",
        LargeOps = "large-ops",
        Sweep = "sweep",
        Dims = "dims",
        Cliffs = "cliffs",
        Models = "models",
        Overhead = "overhead",
        Rayon = "rayon",
        Dist = "dist",
        Allreduce = "allreduce",
        Engine = "engine",
        Saves = "saves",
        Generate = "generate",
    }
}

keyed! {
    /// Measures Phalanx on workloads that other systems are measured on too.
    struct Args {
        /// What is measured; it may be given without its name, as the first word.
        "workload" workload: Option<Workload> = None,
        /// Threads that compute.
        "threads" threads: usize = 2,
        /// Text for the GPT workloads.
        "data" data: PathBuf = "../shared/data/tinyshakespeare.txt".into(),
        /// Where the GPT workloads and `gpu-ops` run.
        "device" device: Device = Device::CPU,
        /// Of operations, products and models: only rows whose name contains this.
        "only" only: String = String::new(),
        /// `gpu-ops` and `gpt2-124m`: the same kernels at sizes for an emulator; times mean nothing.
        "small" small: bool = false,
    }
}

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| !word.starts_with('-')) {
        words.insert(0, "--workload".into());
    }
    if words.iter().any(|word| word == "--help" || word == "-h") {
        print!("{}", Settings::new(Args::default()).help());
        return ExitCode::SUCCESS;
    }
    match given(words).map_err(Into::into).and_then(|args| run(&args)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::from(2)
        }
    }
}

fn given(words: Vec<String>) -> train::Result<Args> {
    Settings::new(Args::default()).words(words)?.resolve()
}

fn run(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    Device::CPU.set_threads(args.threads)?;
    let report = Report { threads: args.threads };
    let workload = args.workload.ok_or_else(|| Error::Config("`workload` is not given".into()))?;
    match workload {
        Workload::GptS => gpt::run(&report, &gpt::SMALL, &args.data, args.device),
        Workload::GptM => gpt::run(&report, &gpt::MEDIUM, &args.data, args.device),
        Workload::GptBf16 => gpt::run(&report, &gpt::MEDIUM_BF16, &args.data, args.device),
        Workload::Gpt2 if args.small => gpt::run(&report, &gpt::GPT2_SMALL, &args.data, args.device),
        Workload::Gpt2 => gpt::run(&report, &gpt::GPT2, &args.data, args.device),
        Workload::GpuOps => gpu_ops::run(&report, args.device, &args.only, args.small).map(|()| true),
        Workload::Ops => ops::run(&report, &args.only).map(|()| true),
        Workload::LargeOps => ops::large(&report, &args.only).map(|()| true),
        Workload::Sweep => sweep::run(&report, &args.only).map(|()| true),
        Workload::Dims => Ok(cliffs::dims(&report, &args.only)?),
        Workload::Cliffs => Ok(cliffs::cliffs(&report, &args.only)?),
        Workload::Models => models::run(&report, &args.only),
        Workload::Overhead => overhead::chains(&report).map(|()| true),
        Workload::Rayon => Ok(overhead::pools(&report).map(|()| true)?),
        Workload::Dist => dist::training(&args.data),
        Workload::Allreduce => dist::allreduce(args.threads).map(|()| true),
        Workload::Engine => overhead::engine(&report).map(|()| true),
        Workload::Generate => generate::run(&report),
        Workload::Saves => saves::run(&report, args.threads),
    }
}
