//! Conformance: every case of a golden set, forward and backward, against values computed elsewhere.
//!
//! `PHALANX_GOLDEN` names a folder with an `index.json`; without it the repository's own sets run, of operators and of models, and
//! `../shared/golden` and `../shared/golden/hf` where they exist. A case whose operator, input or attribute is unknown here is *unsupported*,
//! printed by name, and fails the run unless `PHALANX_GOLDEN_ALLOW_UNSUPPORTED=1`.
//!
//! `PHALANX_GOLDEN_DEVICE` names the device, `cpu` if absent; with `cuda` on a machine without a GPU,
//! `PHALANX_CUDA=emulator` runs the kernels on the CPU.
//!
//! The harness saves each model again and lets transformers and PEFT load the saved folders (`golden/read_back.py`). It runs that program by
//! the Python that `PHALANX_PYTHON` names, or else by `python3`; if `python3` lacks those packages, it says that this is skipped.

#[path = "golden/case.rs"]
mod case;
#[path = "golden/encoders.rs"]
mod encoders;
#[path = "golden/families/mod.rs"]
mod families;
#[path = "golden/models.rs"]
mod models;
#[path = "golden/read_back.rs"]
mod read_back;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use case::{Attrs, Case, Set, compare};
use families::{Call, Reply};
use models::Models;
use phalanx::autograd::{Options, grad};
use phalanx::{Device, Tensor, Var};

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
        if let Some(models) = Models::open(&folder, device) {
            run_models(&models, filter.map(String::as_str), &mut counts);
            continue;
        }
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
    let all = ["tests/golden/data", "tests/golden/hf", "../shared/golden", "../shared/golden/hf"];
    all.map(|folder| root.join(folder))
        .into_iter()
        .filter(|folder| folder.join("index.json").exists())
        .collect()
}

fn run_set(set: &Set, filter: Option<&str>, counts: &mut BTreeMap<String, Counts>) {
    for case in set.cases.iter().filter(|c| filter.is_none_or(|f| c.name.contains(f))) {
        count(&case.name, counts.entry(case.family()).or_default(), || run_case(set, case));
    }
}

fn run_models(models: &Models, filter: Option<&str>, counts: &mut BTreeMap<String, Counts>) {
    for case in models.cases.iter().filter(|c| filter.is_none_or(|f| c.name.contains(f))) {
        count(&case.name, counts.entry(case.task.clone()).or_default(), || models.run(case));
    }
    if let Err(why) = models.read_back() {
        counts.entry("(read back)".into()).or_default()[1] += 1;
        println!("  FAILED to read back what was saved: {why}");
    }
}

/// Runs a case and counts its outcome; a panic counts as a failure.
fn count(name: &str, family: &mut Counts, run: impl FnOnce() -> Outcome) {
    let done = catch_unwind(AssertUnwindSafe(run));
    match done.unwrap_or_else(|_| Outcome::Failed("panicked".into())) {
        Outcome::Passed => family[0] += 1,
        Outcome::Failed(why) => {
            family[1] += 1;
            println!("  FAILED {name}: {why}");
        }
        Outcome::Unsupported(what) => {
            family[2] += 1;
            println!("  unsupported {name}: {what}");
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

/// The outcome of a case.
enum Outcome {
    Passed,
    Failed(String),
    Unsupported(String),
}

fn run_case(set: &Set, case: &Case) -> Outcome {
    for special in families::SPECIAL {
        match special(set, case) {
            Some(Ok(())) => return Outcome::Passed,
            Some(Err(why)) => return Outcome::Failed(why),
            None => {}
        }
    }
    let inputs = match leaves(set, case, set.device) {
        Ok(inputs) => inputs,
        Err(why) => return Outcome::Failed(why),
    };
    let attrs = Attrs::new(&case.attrs);
    let call = Call::new(&case.op, &attrs, seen(case, &inputs));
    let outputs = match families::call(&call) {
        Reply::Unknown => return Outcome::Unsupported(format!("operator {}", case.op)),
        Reply::Done(outputs) => outputs,
    };
    let unsupported = if outputs.is_ok() { call.unsupported() } else { call.refused() };
    if let Some(what) = unsupported {
        return Outcome::Unsupported(format!("{what} of {}", case.op));
    }
    let outputs = match outputs {
        Ok(outputs) => outputs,
        Err(error) => return Outcome::Failed(error.to_string()),
    };
    let checked = check_outputs(set, case, &outputs)
        .and_then(|()| check_gradients(set, case, &call.leaves(&inputs), &outputs))
        .and_then(|()| check_meta(set, case, &outputs));
    checked.map_or_else(Outcome::Failed, |()| Outcome::Passed)
}

/// The stored tensors as leaves or constants.
fn leaves(set: &Set, case: &Case, device: Device) -> Result<Vec<Var>, String> {
    let leaf = |input: &crate::case::Input| {
        let tensor = set.tensor(case, &input.key)?;
        let tensor = tensor.to_device(device, false).map_err(|e| e.to_string())?;
        if input.requires_grad { Var::leaf(tensor).map_err(|e| e.to_string()) } else { Ok(Var::new(tensor)) }
    };
    case.inputs.iter().map(leaf).collect()
}

/// The inputs as the operator gets them, by name.
fn seen(case: &Case, leaves: &[Var]) -> Vec<(String, Var)> {
    let view = |(input, leaf): (&crate::case::Input, &Var)| {
        let var = match &input.permute {
            Some(dims) => leaf.permute(dims).unwrap_or_else(|e| panic!("permute {dims:?}: {e}")),
            None => leaf.clone(),
        };
        (input.name.clone(), var)
    };
    case.inputs.iter().zip(leaves).map(view).collect()
}

fn check_outputs(set: &Set, case: &Case, outputs: &[Var]) -> Result<(), String> {
    if outputs.len() != case.outputs.len() {
        return Err(format!("gave {} outputs, wanted {}", outputs.len(), case.outputs.len()));
    }
    for (key, output) in case.outputs.iter().zip(outputs) {
        compare(short(key), output.tensor(), &set.tensor(case, key)?, case.rtol, case.atol)?;
    }
    Ok(())
}

fn check_gradients(set: &Set, case: &Case, inputs: &[Var], outputs: &[Var]) -> Result<(), String> {
    if case.cotangents.is_empty() {
        return Ok(());
    }
    let cotangent =
        |(key, output): (&String, &Var)| Ok((output.clone(), Some(Var::new(set.tensor(case, key)?))));
    let roots: Vec<_> = case.cotangents.iter().zip(outputs).map(cotangent).collect::<Result<_, String>>()?;
    let wanted: Vec<&Var> = inputs.iter().collect();
    let grads = grad(&roots, &wanted, Options::default()).map_err(|e| e.to_string())?;
    for ((key, input), grad) in case.grads.iter().zip(inputs).zip(grads) {
        let Some(key) = key else { continue };
        let grad = match grad {
            Some(grad) => grad.into_tensor(),
            None => input.tensor().zeros_like().map_err(|e| e.to_string())?,
        };
        compare(short(key), &grad, &set.tensor(case, key)?, case.rtol, case.atol)?;
    }
    Ok(())
}

/// Operators whose result's size depends on the input's values: they wait for the device, and on a device without
/// values they must return an error.
const SHAPED_BY_VALUES: &[&str] = &["bincount", "unique"];

/// The same call on a `meta` device must give the same shapes and dtypes, gradients included.
fn check_meta(set: &Set, case: &Case, outputs: &[Var]) -> Result<(), String> {
    let meta = Device::Meta(0);
    let inputs = leaves(set, case, meta)?;
    let attrs = Attrs::new(&case.attrs);
    let call = Call::new(&case.op, &attrs, seen(case, &inputs));
    let Reply::Done(made) = families::call(&call) else { return Err("unknown on meta".into()) };
    let by_values = SHAPED_BY_VALUES.contains(&case.op.as_str());
    if by_values || families::index::shaped_by_data(&call) {
        return must_refuse(made);
    }
    let made = made.map_err(|e| format!("on meta: {e}"))?;
    let form = |t: &Tensor| format!("{:?} {}", t.shape(), t.dtype());
    for (made, output) in made.iter().zip(outputs) {
        if form(made.tensor()) != form(output.tensor()) {
            return Err(format!("on meta: {}, wanted {}", form(made.tensor()), form(output.tensor())));
        }
    }
    let cotangent = |output: &Var| output.tensor().empty_like().map(|t| (output.clone(), Some(Var::new(t))));
    let roots: Result<Vec<_>, _> = made.iter().take(case.cotangents.len()).map(cotangent).collect();
    let roots = roots.map_err(|e| e.to_string())?;
    if !roots.is_empty() {
        let wanted = call.leaves(&inputs);
        let wanted: Vec<&Var> = wanted.iter().collect();
        grad(&roots, &wanted, Options::default()).map_err(|e| format!("gradients on meta: {e}"))?;
    }
    Ok(())
}

/// On a `meta` device, a result whose size depends on values is an error.
fn must_refuse(made: phalanx::autograd::Result<Vec<Var>>) -> Result<(), String> {
    let refused = made.is_err_and(|error| error.to_string().contains("meta:"));
    if refused {
        Ok(())
    } else {
        Err("on meta: wanted an error that says that the values decide the size".into())
    }
}

/// A key without the case's name.
pub fn short(key: &str) -> &str {
    key.rsplit_once('/').map_or(key, |(_, name)| name)
}
