//! Training steps at their real size, run dry (`PHALANX_CUDA=dry`): nothing is executed, every launch, byte and floating-point operation
//! is logged. The tables in `tests/dry` hold what was logged and the time that follows from it. A launch, a byte or a byte of memory
//! more or less than in a table fails the test.
//!
//! ```text
//! cargo test --test dry                 compares
//! cargo test --test dry -- --write      writes the tables anew
//! ```

#[path = "dry/roofline.rs"]
mod roofline;
#[path = "dry/table.rs"]
mod table;
#[path = "dry/workloads.rs"]
mod workloads;

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode};

use phalanx::tensor::cuda;

use roofline::{Ceilings, Class, class};
use workloads::{WORKLOADS, Workload};

/// Set for the run itself: no device executes anything, and there are as many as ranks.
const SETTINGS: [(&str, &str); 3] = [
    ("PHALANX_CUDA", "dry"),
    ("PHALANX_EMULATED_DEVICES", "8"),
    ("PHALANX_EMULATED_MEMORY_BYTES", "85520809984"),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // The protocol of test runners that list a binary's tests before they run them.
    if args.iter().any(|arg| arg == "--list") {
        if !args.iter().any(|arg| arg == "--ignored") {
            println!("dry: test");
        }
        return ExitCode::SUCCESS;
    }
    if std::env::var_os(SETTINGS[0].0).is_none_or(|mode| mode != SETTINGS[0].1) {
        let again =
            std::env::current_exe().and_then(|exe| Command::new(exe).args(&args).envs(SETTINGS).status());
        let succeeded = again.is_ok_and(|status| status.success());
        return if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if let Err(why) = cuda::require(cuda::Library::Nvrtc).and(cuda::require(cuda::Library::Driver)) {
        println!("dry: {} tables skipped: {why}", WORKLOADS.len());
        return ExitCode::SUCCESS;
    }
    let writes = args.iter().any(|arg| arg == "--write");
    let mut failed = false;
    for workload in &WORKLOADS {
        match check(workload, writes) {
            Ok(()) => println!("dry: {} ... ok", workload.file),
            Err(error) => {
                println!("dry: {} ... FAILED: {error}", workload.file);
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn check(workload: &Workload, writes: bool) -> Result<(), Box<dyn Error>> {
    let recorded = (workload.run)()?;
    let products = recorded.logs[2].operations.iter().filter(|o| o.device == 0 && class(o) == Class::Product);
    let flops: u64 = products.map(|o| o.traffic.flops).sum();
    if flops != workload.product_flops {
        return Err(format!("products of {flops} FLOPs are logged, wanted {}", workload.product_flops).into());
    }
    let found = table::table(workload, &recorded, &Ceilings::read()?);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dry").join(workload.file);
    if writes {
        return Ok(std::fs::write(path, found)?);
    }
    let kept = std::fs::read_to_string(&path)?;
    if kept == found {
        return Ok(());
    }
    let only = |a: &str, b: &str, mark: &str| -> String {
        a.lines()
            .filter(|line| !b.lines().any(|other| other == *line))
            .map(|line| format!("\n{mark} {line}"))
            .collect()
    };
    let changes = format!("{}{}", only(&kept, &found, "-"), only(&found, &kept, "+"));
    Err(format!(
        "the step is not the table's; if it is meant to change: cargo test --test dry -- --write{changes}"
    )
    .into())
}
