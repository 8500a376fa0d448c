//! What a kernel costs: sectors of global memory and bank conflicts, as the interpreter counts them, and registers that the assembler spills.

use std::sync::Arc;

use phalanx_ptx::{Counters, Module, Traffic};

use crate::case::{Case, Cost};
use crate::{compiler, counters};

/// Sectors touched for each one that is needed, wavefronts of a phase: more than these are a loss.
const SECTORS_MAX: f64 = 1.1;
const WAYS_MAX: f64 = 1.1;

/// Which costs of a variant are too high.
pub fn high(module: &Arc<Module>, case: &Case, variant: &str) -> Result<Vec<Cost>, String> {
    let Counters { lines, .. } = counters(module, case, variant).map_err(|fault| fault.to_string())?;
    let worst = |figure: fn(Traffic) -> f64| lines.values().map(|line| figure(*line)).fold(1.0, f64::max);
    let spills = spilled(&compiler::assembled(&case.text(variant), "sm_90a")?)?;
    let costs = [
        (Cost::Sectors, worst(Traffic::excess) > SECTORS_MAX),
        (Cost::Banks, worst(Traffic::ways) > WAYS_MAX),
        (Cost::Registers, spills > 0),
    ];
    Ok(costs.into_iter().filter(|(_, high)| *high).map(|(cost, _)| cost).collect())
}

/// The bytes that the assembler's log says are spilled to local memory.
fn spilled(log: &str) -> Result<u32, String> {
    let said = log.split(" bytes spill stores").next().filter(|before| before.len() < log.len());
    let number = said.and_then(|before| before.rsplit(' ').next()?.parse().ok());
    number.ok_or_else(|| format!("the assembler's log says nothing of spills: {log}"))
}
