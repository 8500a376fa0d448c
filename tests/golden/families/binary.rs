//! Functions of two tensors, or of a tensor and a number, elementwise and broadcast.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The binary family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let with = |tensors: fn(&Var, &Var) -> Result<Var>, number: fn(&Var, phalanx::Scalar) -> Result<Var>| {
        let input = call.var("input")?;
        match call.attrs.scalar("other") {
            Some(other) => number(input, other),
            None => tensors(input, call.var("other")?),
        }
    };
    match call.op {
        "add" => one(with(Var::add, |a, s| a.add_scalar(s))),
        "mul" => one(with(Var::mul, |a, s| a.mul_scalar(s))),
        _ => None,
    }
}
