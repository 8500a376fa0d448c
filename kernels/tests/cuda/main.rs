//! Every CUDA kernel against the CPU's operation, on a GPU or on the emulator.
//!
//! One table of cases ([`Case`]), three levels:
//!
//! 1. every program that the cases compiled is assembled for sm_80 and sm_90a, and none may spill registers;
//! 2. without a GPU the cases run on the emulator (`PHALANX_CUDA=emulator`, which this program sets for itself);
//! 3. with one they run there.
//!
//! On the emulator some cases run once more, while it counts ([`counters`]).
//!
//! Where neither a driver nor the compiler can be had, cases are reported as skipped. `cargo test --test cuda NAME` runs
//! those whose name contains NAME, and `--test cuda smoke` one of each family; `--test cuda counters` holds what kernels ask of memory against
//! their bounds.

mod case;
mod code;
mod counters;
mod driver;
mod families;
mod programs;

use std::process::{Child, ExitCode};
use std::time::Instant;

use case::{Case, Outcome};
use phalanx_tensor::{Device, Error, cuda};

/// The name by which one case of each family runs.
const SMOKE: &str = "smoke";
/// Set in the process that runs every other case on the emulator, beside the one that runs the rest.
const HALF: &str = "PHALANX_CUDA_HALF";

fn main() -> ExitCode {
    driver::serve("cuda", families::all().len(), &[], run)
}

fn run(filter: Option<&str>) -> bool {
    counters::check_itself();
    if std::env::var_os(counters::ALONE).is_some() {
        let counted = |name: &str| counters::COUNTED.iter().any(|begin| name.starts_with(begin));
        return run_cases(families::all(), counted).1 == 0;
    }
    if filter == Some("counters") {
        return counters::hold();
    }
    let half = std::env::var(HALF).ok();
    let is_whole = filter.is_none() && half.is_none() && cuda::emulated();
    // A list of programs is written by one process.
    let other = (is_whole && !programs::is_writing()).then(|| driver::beside(&[], &[(HALF, "1")]));
    let every = if half.is_some() || other.is_some() { 2 } else { 1 };
    let from = usize::from(half.is_some());
    let ((passed, failed), wrong) =
        programs::assembled_beside(filter.is_none(), || cases(filter, from, every));
    println!("cuda: {passed} passed, {failed} failed; {wrong} programs do not assemble as they should");
    other.is_none_or(has_passed) && failed + wrong == 0 && (!is_whole || counters::hold() && in_other_ways())
}

fn has_passed(started: std::io::Result<Child>) -> bool {
    started.and_then(|mut process| process.wait()).is_ok_and(|status| status.success())
}

/// Runs attention on an emulated A100, which has no products of warpgroups, and products without cuBLASLt.
fn in_other_ways() -> bool {
    const WAYS: [(&str, driver::Setting); 2] = [
        ("attention ", ("PHALANX_EMULATED_CAPABILITY", "80")),
        ("product ", ("PHALANX_CUDA_ALGORITHMS", "own")),
    ];
    let start = |(cases, (name, value)): (&str, driver::Setting)| {
        println!("cuda: {name}={value}");
        driver::beside(&[cases.to_string()], &[(name, value)])
    };
    if programs::is_writing() {
        // One after the other, as each adds to the list.
        return WAYS.into_iter().all(|way| has_passed(start(way)));
    }
    WAYS.map(start).map(has_passed).into_iter().all(|passed| passed)
}

/// Runs the chosen cases, or each so manieth of them; how many passed and failed.
fn cases(filter: Option<&str>, from: usize, every: usize) -> (usize, usize) {
    let all = if filter == Some(SMOKE) { families::one_of_each() } else { families::all() };
    let named = |name: &str| filter.is_none_or(|f| f == SMOKE || name.contains(f));
    run_cases(all.into_iter().skip(from).step_by(every).collect(), named)
}

/// Runs those of the cases whose names are chosen; how many passed and failed.
fn run_cases(cases: Vec<Case>, chosen: impl Fn(&str) -> bool) -> (usize, usize) {
    let mut chosen = cases.iter().filter(|case| chosen(&case.name));
    let (mut passed, mut failed, mut slowest) = (0, 0, Vec::new());
    while let Some(case) = chosen.next() {
        let start = Instant::now();
        match case.run() {
            Outcome::Passed => passed += 1,
            Outcome::Failed(why) => {
                failed += 1;
                println!("  FAILED {}: {why}", case.name);
            }
        }
        slowest.push((start.elapsed(), &case.name));
        // After a wrong access a GPU does nothing any more in this process.
        if let Err(error @ Error::Gpu { .. }) = Device::Cuda(0).synchronize() {
            let left = chosen.count();
            println!("  FAILED {}: the device is lost: {error}; {left} cases were not run", case.name);
            return (passed, failed + 1 + left);
        }
    }
    slowest.sort_by(|a, b| b.cmp(a));
    for (time, name) in slowest.iter().take(5) {
        println!("  {:.2} s {name}", time.as_secs_f64());
    }
    (passed, failed)
}
