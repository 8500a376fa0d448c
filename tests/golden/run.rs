//! Running one case: the operator's outputs, its gradients, and its shapes on a device without elements.

use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx::autograd::{Options, grad};
use phalanx::{Device, Tensor, Var};

use crate::case::{Attrs, Case, Set};
use crate::compare::compare;
use crate::families::{Call, Reply};

/// What became of a case.
pub enum Outcome {
    Passed,
    Failed(String),
    Unsupported(String),
}

/// Runs a case; a panic counts as a failure.
pub fn run(set: &Set, case: &Case) -> Outcome {
    let done = catch_unwind(AssertUnwindSafe(|| run_case(set, case)));
    done.unwrap_or_else(|_| Outcome::Failed("panicked".into()))
}

fn run_case(set: &Set, case: &Case) -> Outcome {
    for special in crate::families::SPECIAL {
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
    let outputs = match crate::families::call(&call) {
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

/// Operators whose result has as many elements as the input's values say: they wait for the device, and where there are no
/// values they must refuse.
const SHAPED_BY_VALUES: &[&str] = &["bincount", "unique"];

/// The same call on a `meta` device must give the same shapes and dtypes, gradients included.
fn check_meta(set: &Set, case: &Case, outputs: &[Var]) -> Result<(), String> {
    let meta = Device::Meta(0);
    let inputs = leaves(set, case, meta)?;
    let attrs = Attrs::new(&case.attrs);
    let call = Call::new(&case.op, &attrs, seen(case, &inputs));
    let Reply::Done(made) = crate::families::call(&call) else { return Err("unknown on meta".into()) };
    let by_values = SHAPED_BY_VALUES.contains(&case.op.as_str());
    if by_values || crate::families::more_index::shaped_by_data(&call) {
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

/// What has a size that the values decide is refused where there are none.
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
