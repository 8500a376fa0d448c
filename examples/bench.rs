//! The benchmark: one workload a run, a JSON line a measurement.
//!
//! ```text
//! cargo run --release --example bench -- gpt-s|gpt-m|gpt-bf16|ops|large-ops|sweep|dims|overhead|rayon|dist|allreduce|engine --threads N [--data FILE]
//! cargo run --release --example bench -- gpt2-124m|gpu-ops --device cuda
//! ```
//! Workloads, initial weights and batches are those of the peers that results are compared with, so the first five
//! losses are known; a run whose losses differ does other work and exits with 1.

#[path = "bench/allreduce.rs"]
mod allreduce;
#[path = "bench/dims.rs"]
mod dims;
#[path = "bench/dist.rs"]
mod dist;
#[path = "bench/engine.rs"]
mod engine;
#[path = "bench/gpt.rs"]
mod gpt;
#[path = "bench/gpu_ops.rs"]
mod gpu_ops;
#[path = "bench/inputs.rs"]
mod inputs;
#[path = "bench/ops.rs"]
mod ops;
#[path = "bench/overhead.rs"]
mod overhead;
#[path = "bench/pools.rs"]
mod pools;
#[path = "bench/report.rs"]
mod report;
#[allow(dead_code)] // the example uses all of it
#[path = "bench/sweep.rs"]
mod sweep;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use phalanx::Device;
use report::Report;

/// Measures Phalanx on workloads that other systems are measured on too.
#[derive(Parser)]
struct Args {
    #[arg(value_enum)]
    workload: Workload,
    /// Threads that compute.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Text for the GPT workloads.
    #[arg(long, default_value = "../shared/data/tinyshakespeare.txt")]
    data: PathBuf,
    /// Where the GPT workloads and `gpu-ops` run.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Of operations and products: only rows whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// `gpu-ops`: the same kernels at sizes for an emulator; times mean nothing.
    #[arg(long)]
    small: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Workload {
    GptS,
    GptM,
    GptBf16,
    #[value(name = "gpt2-124m")]
    Gpt2,
    GpuOps,
    Ops,
    LargeOps,
    Sweep,
    Dims,
    Overhead,
    Rayon,
    Dist,
    Allreduce,
    Engine,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    Device::CPU.set_threads(args.threads)?;
    let report = Report { threads: args.threads };
    match args.workload {
        Workload::GptS => gpt::run(&report, &gpt::SMALL, &args.data, args.device),
        Workload::GptM => gpt::run(&report, &gpt::MEDIUM, &args.data, args.device),
        Workload::GptBf16 => gpt::run(&report, &gpt::MEDIUM_BF16, &args.data, args.device),
        Workload::Gpt2 => gpt::run(&report, &gpt::GPT2, &args.data, args.device),
        Workload::GpuOps => gpu_ops::run(&report, args.device, &args.only, args.small).map(|()| true),
        Workload::Ops => ops::run(&report, &args.only).map(|()| true),
        Workload::LargeOps => ops::large(&report, &args.only).map(|()| true),
        Workload::Sweep => sweep::run(&report, &args.only).map(|()| true),
        Workload::Dims => Ok(dims::run(&report, &args.only)?),
        Workload::Overhead => overhead::run(&report).map(|()| true),
        Workload::Rayon => Ok(pools::run(&report).map(|()| true)?),
        Workload::Dist => dist::run(&args.data),
        Workload::Allreduce => allreduce::run(args.threads).map(|()| true),
        Workload::Engine => engine::run(&report).map(|()| true),
    }
}
