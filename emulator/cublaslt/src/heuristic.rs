//! The heuristic: one algorithm for everything that is emulated, and a second for products that are mostly a sum, which wants
//! a workspace as algorithms that cut the sum do. It uses none; it spoils it, so that whoever else has something there notices.

use phalanx_emulator_link::pointer::{In, Out};

use crate::call::{Result, Status, present};
use crate::description::description;
use crate::handle::LIBRARIES;
use crate::layout::layout;
use crate::plan::Plan;
use crate::preference::PREFERENCES;

/// `cublasLtMatmulAlgo_t`.
pub(crate) type Algorithm = [u64; 8];

/// How an algorithm begins; the bytes of its workspace follow.
const MARK: u64 = 0x7068_616c_616e_7801;
/// A workspace begins at a multiple of this, and is as long as one.
pub(crate) const WORKSPACE_ALIGNMENT: u64 = 256;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

/// The algorithm with such a workspace.
fn found(workspace_bytes: u64) -> Found {
    let algorithm = [MARK, workspace_bytes, 0, 0, 0, 0, 0, 0];
    Found { algorithm, workspace_bytes: workspace_bytes as usize, state: 0, waves: 1.0, reserved: [0; 4] }
}

/// The workspace of a product whose sums are cut in two, if it is longer than it is wide and there may be one.
fn workspace(plan: &Plan, bytes_max: u64) -> u64 {
    let parts = 2 * (plan.m * plan.n * plan.d.batches * size_of::<f32>()) as u64;
    let bytes = parts.next_multiple_of(WORKSPACE_ALIGNMENT);
    if plan.k >= 2 * plan.m.max(plan.n) && bytes <= bytes_max { bytes } else { 0 }
}

/// The product that these handles describe.
pub(crate) fn plan(library: usize, operation: usize, [a, b, c, d]: [usize; 4]) -> Result<Plan> {
    LIBRARIES.get(library)?;
    let layouts = [layout(a, "A")?, layout(b, "B")?, layout(c, "C")?, layout(d, "D")?];
    Plan::new(description(operation)?, layouts)
}

/// The bytes of an algorithm's workspace; none is the one without. One that the heuristic did not give is an error.
pub(crate) fn check(algorithm: In<Algorithm>) -> Result<u64> {
    match algorithm.get() {
        None => Ok(0),
        Some([MARK, bytes, 0, 0, 0, 0, 0, 0]) => Ok(bytes),
        Some(_) => {
            Err(Status::INVALID_VALUE.because("the algorithm is none that this library's heuristic gave"))
        }
    }
}

export! {
    fn cublasLtMatmulAlgoGetHeuristic(
        library: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, preference: usize, room: i32,
        results: Out<Found>, count: Out<i32>,
    ) {
        present(count.set(0), "returnAlgoCount")?;
        if room < 1 {
            return Err(Status::INVALID_VALUE.because("no algorithm is asked for"));
        }
        let plan = plan(library, operation, [a, b, c, d])?;
        let bytes_max = if preference == 0 { 0 } else { PREFERENCES.get(preference)? };
        present(results.set(found(workspace(&plan, bytes_max))), "heuristicResultsArray")?;
        present(count.set(1), "returnAlgoCount")
    }
    fn cublasLtMatmulAlgoCheck(
        library: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, algorithm: In<Algorithm>,
        result: Out<Found>,
    ) {
        plan(library, operation, [a, b, c, d])?;
        present(result.set(found(check(algorithm)?)), "result")
    }
}
