//! Whether a run can fit into this machine's memory at all, asked before any of it is taken.

use phalanx::nn::models::ModelConfig;

use crate::args::{Precision, TrainArgs};

/// Refuses sizes that need more memory than there is: of a step's tokens, and of a model that is made new.
pub fn check(args: &TrainArgs, fresh: Option<&ModelConfig>) -> Result<(), String> {
    let Some(room) = memory_bytes() else { return Ok(()) };
    // The weights, their gradients, two moments and perhaps a master.
    let parameter_bytes = match args.dtype {
        Precision::F32 | Precision::Bf16 => 16.0,
        Precision::F64 => 32.0,
    };
    let fresh = fresh.filter(|_| !args.device.is_meta());
    let model = fresh.map_or(0.0, |config| config.matrix_elements() * parameter_bytes);
    // Inputs and targets.
    let batch = 16.0 * args.batch as f64 * args.context as f64;
    if model + batch <= room {
        return Ok(());
    }
    Err(format!(
        "the model takes at least {model:.2e} bytes and a step's tokens {batch:.2e}, and this machine has {room:.2e}: \
         wanted a smaller --layers, --width, --batch or --context"
    ))
}

/// All memory of this machine, where the system tells.
fn memory_bytes() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}
