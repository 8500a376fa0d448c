//! Functions of one tensor, elementwise.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The unary family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let f: fn(&Var) -> Result<Var> = match call.op {
        "tanh" => Var::tanh,
        _ => return None,
    };
    one(call.var("input").and_then(f))
}
