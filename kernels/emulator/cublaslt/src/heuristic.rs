//! The heuristic: one algorithm, without a workspace, for everything that is emulated.

use phalanx_emulator_link::pointer::{In, Out};

use crate::call::{Result, Status, present};
use crate::description::description;
use crate::handle::LIBRARIES;
use crate::layout::layout;
use crate::plan::Plan;

/// `cublasLtMatmulAlgo_t`.
pub(crate) type Algorithm = [u64; 8];

/// What the one algorithm looks like.
const ONLY: Algorithm = [0x7068_616c_616e_7801, 0, 0, 0, 0, 0, 0, 0];

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

const FOUND: Found = Found { algorithm: ONLY, workspace_bytes: 0, state: 0, waves: 1.0, reserved: [0; 4] };

/// The product that these handles describe.
pub(crate) fn plan(library: usize, operation: usize, [a, b, c, d]: [usize; 4]) -> Result<Plan> {
    LIBRARIES.get(library)?;
    let layouts = [layout(a, "A")?, layout(b, "B")?, layout(c, "C")?, layout(d, "D")?];
    Plan::new(description(operation)?, layouts)
}

/// An algorithm that the heuristic did not give is an error; none is the only one.
pub(crate) fn check(algorithm: In<Algorithm>) -> Result<()> {
    match algorithm.get() {
        Some(other) if other != ONLY => {
            Err(Status::INVALID_VALUE.because("the algorithm is none that this library's heuristic gave"))
        }
        _ => Ok(()),
    }
}

export! {
    fn cublasLtMatmulAlgoGetHeuristic(
        library: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, preference: usize, room: i32,
        found: Out<Found>, count: Out<i32>,
    ) {
        present(count.set(0), "returnAlgoCount")?;
        if room < 1 {
            return Err(Status::INVALID_VALUE.because("no algorithm is asked for"));
        }
        plan(library, operation, [a, b, c, d])?;
        present(found.set(FOUND), "heuristicResultsArray")?;
        present(count.set(1), "returnAlgoCount")
    }
    fn cublasLtMatmulAlgoCheck(
        library: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, algorithm: In<Algorithm>,
        found: Out<Found>,
    ) {
        plan(library, operation, [a, b, c, d])?;
        check(algorithm)?;
        present(found.set(FOUND), "result")
    }
}
