//! Training steps at their real size, run dry (`PHALANX_CUDA=dry`): nothing is executed, every launch, byte and floating-point operation
//! is logged. The tables in `tests/dry` hold what was logged and the time that follows from it. A launch, a byte or a byte of memory
//! more or less than in a table fails the test. One more table has the time of our own matrix products beside cuBLASLt's.
//!
//! ```text
//! cargo test --test dry                 compares
//! cargo test --test dry -- --write      writes the tables anew
//! ```

#[path = "dry/products.rs"]
mod products;
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
/// Also set for the table of our own products.
const OWN: (&str, &str) = ("PHALANX_CUDA_ALGORITHMS", "own");

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // The protocol of test runners that list a binary's tests before they run them.
    if args.iter().any(|arg| arg == "--list") {
        if !args.iter().any(|arg| arg == "--ignored") {
            println!("dry: test");
        }
        return ExitCode::SUCCESS;
    }
    let has = |(name, value): (&str, &str)| std::env::var_os(name).is_some_and(|found| found == value);
    if !has(SETTINGS[0]) {
        let succeeded = |also: &[(&str, &str)]| {
            let command = std::env::current_exe().map(|exe| {
                let mut command = Command::new(exe);
                command.args(&args).env_remove(OWN.0).envs(SETTINGS).envs(also.iter().copied());
                command
            });
            command.and_then(|mut command| command.status()).is_ok_and(|status| status.success())
        };
        let all = [succeeded(&[]), succeeded(&[OWN])];
        return if all == [true; 2] { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let own = has(OWN);
    let tables = if own { 1 } else { WORKLOADS.len() };
    if let Err(why) = cuda::require(cuda::Library::Nvrtc).and(cuda::require(cuda::Library::Driver)) {
        println!("dry: {tables} tables skipped: {why}");
        return ExitCode::SUCCESS;
    }
    let writes = args.iter().any(|arg| arg == "--write");
    let mut failed = false;
    let mut outcome = |file: &str, checked: Result<(), Box<dyn Error>>| match checked {
        Ok(()) => println!("dry: {file} ... ok"),
        Err(error) => {
            println!("dry: {file} ... FAILED: {error}");
            failed = true;
        }
    };
    if own {
        let found = products::table();
        outcome(products::FILE, found.and_then(|found| compare(products::FILE, &found, writes)));
    } else {
        WORKLOADS.iter().for_each(|workload| outcome(workload.file, check(workload, writes)));
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
    compare(workload.file, &table::table(workload, &recorded, &Ceilings::read()?), writes)
}

/// Compares a table with that in a file, or writes this anew.
fn compare(file: &str, found: &str, writes: bool) -> Result<(), Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dry").join(file);
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
    let changes = format!("{}{}", only(&kept, found, "-"), only(found, &kept, "+"));
    Err(format!(
        "this run differs from the table; to accept the run's figures: cargo test --test dry -- --write{changes}"
    )
    .into())
}
