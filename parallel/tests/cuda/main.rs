//! Ranks with a GPU each, under a GPU's driver or the emulator: every collective, by way of the host and over NCCL; faults of a
//! rank; training; the dependency engine over two devices; offload to the host.
//!
//! There are as many logical devices as ranks, dealt out over the GPUs at hand.

#[allow(dead_code)] // other tests use the rest
#[path = "../layouts/case.rs"]
mod case;
#[path = "../../../kernels/tests/cuda/code.rs"]
mod code;
#[path = "../../../kernels/tests/cuda/driver.rs"]
mod driver;
mod engine;
#[cfg(feature = "nccl")]
mod nccl;
mod offload;
#[path = "../comm/port.rs"]
mod port;
#[path = "../../../kernels/tests/cuda/programs.rs"]
mod programs;
#[allow(dead_code)]
#[path = "../layouts/run.rs"]
mod run;
mod staged;
#[path = "../comm/suite.rs"]
mod suite;
#[cfg(feature = "nccl")]
mod sync_batch_norm;
mod training;
#[allow(dead_code)]
#[path = "../comm/twin.rs"]
mod twin;

use std::process::ExitCode;

/// A claim, and what finds out.
type Test = (&'static str, fn() -> Result<(), String>);

/// Set before anything asks for a device: enough of them, and that NCCL may put several on a GPU.
const SETTINGS: [driver::Setting; 2] = [("PHALANX_CUDA_DEVICES", "4"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1")];

fn main() -> ExitCode {
    let mut tests: Vec<Test> = staged::TESTS.to_vec();
    #[cfg(feature = "nccl")]
    {
        tests.extend(nccl::TESTS);
        tests.extend(sync_batch_norm::TESTS);
        tests.extend(engine::TESTS);
    }
    tests.extend(training::tests());
    tests.extend(offload::TESTS);
    driver::serve("cuda", tests.len(), &SETTINGS, |filter| {
        let chosen = tests.iter().filter(|(name, _)| filter.is_none_or(|f| name.contains(f)));
        // All of them run, whichever fails.
        let run_all = || chosen.map(run).filter(|passed| !passed).count();
        let (failed, wrong) = programs::assembled_beside(filter.is_none(), run_all);
        failed + wrong == 0
    })
}

fn run((name, test): &Test) -> bool {
    let start = std::time::Instant::now();
    let outcome = std::panic::catch_unwind(test).unwrap_or_else(|_| Err("panicked".into()));
    let seconds = start.elapsed().as_secs_f64();
    match &outcome {
        Ok(()) => println!("cuda: {name} ... ok ({seconds:.1} s)"),
        Err(why) => println!("cuda: {name} ... FAILED ({seconds:.1} s): {why}"),
    }
    outcome.is_ok()
}
