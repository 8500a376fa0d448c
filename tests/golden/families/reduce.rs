//! Reductions over dimensions.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The reductions.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "sum" | "mean" => one(call.var("input").and_then(|x| over_dims(call, x))),
        _ => None,
    }
}

/// All dimensions where none is named.
fn over_dims(call: &Call<'_>, x: &Var) -> Result<Var> {
    let dims = call.attrs.ints("dim").unwrap_or_else(|| (0..x.rank() as i64).collect());
    let keepdim = call.attrs.bool_or("keepdim", false);
    match call.op {
        "sum" => x.sum(&dims, keepdim),
        _ => x.mean(&dims, keepdim),
    }
}
