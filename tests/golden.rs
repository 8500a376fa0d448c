//! Conformance: every case of a golden set, forward and backward, against values computed elsewhere.
//!
//! `PHALANX_GOLDEN` names a folder with an `index.json`; without it the repository's own small set runs, and
//! `../shared/golden` where that exists. A case whose operator, input or attribute is unknown here is *unsupported*,
//! printed by name, and fails the run unless `PHALANX_GOLDEN_ALLOW_UNSUPPORTED=1`.
//!
//! `PHALANX_GOLDEN_DEVICE` names the device, `cpu` if absent; with `cuda` on a machine without a GPU,
//! `PHALANX_CUDA=emulator` runs the kernels on the CPU.

#[path = "golden/case.rs"]
mod case;
#[path = "golden/compare.rs"]
mod compare;
#[path = "golden/families/mod.rs"]
mod families;
#[path = "golden/run.rs"]
mod run;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use case::Set;
use phalanx::Device;
use run::Outcome;

/// Counts of one family: passed, failed, unsupported.
type Counts = [usize; 3];

fn main() -> ExitCode {
    // The protocol of test runners that list a binary's tests before they run them.
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|a| a == "--list") {
        if !args.iter().any(|a| a == "--ignored") {
            println!("golden: test");
        }
        return ExitCode::SUCCESS;
    }
    let filter = args.iter().find(|a| !a.starts_with('-') && *a != "golden");
    let device = match device() {
        Ok(device) => device,
        Err(error) => {
            println!("PHALANX_GOLDEN_DEVICE: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut counts: BTreeMap<String, Counts> = BTreeMap::new();
    for folder in folders() {
        println!("golden set {}", folder.display());
        match Set::open(&folder, device) {
            Ok(set) => run_set(&set, filter.map(String::as_str), &mut counts),
            Err(error) => {
                println!("  cannot be read: {error}");
                counts.entry("(unreadable)".into()).or_default()[1] += 1;
            }
        }
    }
    summarise(&counts)
}

/// The device to run on; of a GPU, says which driver serves it.
fn device() -> Result<Device, phalanx::tensor::Error> {
    let device: Device = std::env::var("PHALANX_GOLDEN_DEVICE").as_deref().unwrap_or("cpu").parse()?;
    device.ledger()?;
    if device.is_cuda() {
        println!("{:?} by {}", device.gpu()?, phalanx::tensor::cuda::driver_name().unwrap_or("?"));
    }
    Ok(device)
}

fn folders() -> Vec<PathBuf> {
    if let Some(folder) = std::env::var_os("PHALANX_GOLDEN") {
        return vec![folder.into()];
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let all = [root.join("tests/golden/data"), root.join("../shared/golden")];
    all.into_iter().filter(|folder| folder.join("index.json").exists()).collect()
}

fn run_set(set: &Set, filter: Option<&str>, counts: &mut BTreeMap<String, Counts>) {
    for case in set.cases.iter().filter(|c| filter.is_none_or(|f| c.name.contains(f))) {
        let family = counts.entry(case.family()).or_default();
        match run::run(set, case) {
            Outcome::Passed => family[0] += 1,
            Outcome::Failed(why) => {
                family[1] += 1;
                println!("  FAILED {}: {why}", case.name);
            }
            Outcome::Unsupported(what) => {
                family[2] += 1;
                println!("  unsupported {}: {what}", case.name);
            }
        }
    }
}

fn summarise(counts: &BTreeMap<String, Counts>) -> ExitCode {
    let mut total: Counts = [0; 3];
    for (family, counts) in counts {
        println!("{family:<12} {} passed / {} failed / {} unsupported", counts[0], counts[1], counts[2]);
        (0..3).for_each(|i| total[i] += counts[i]);
    }
    let [passed, failed, unsupported] = total;
    println!("\ngolden: {passed} passed, {failed} failed, {unsupported} unsupported");
    let allowed = std::env::var("PHALANX_GOLDEN_ALLOW_UNSUPPORTED").is_ok_and(|v| v == "1");
    if failed == 0 && (unsupported == 0 || allowed) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
