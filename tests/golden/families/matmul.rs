//! Products of matrices.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The matmul family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "matmul" => one(call.var("input").and_then(|a| a.matmul(call.var("other")?))),
        "linear" => one(call.var("input").and_then(|x| x.linear(call.var("weight")?, call.opt("bias")))),
        "einsum" => {
            let equation = call.attrs.str_or("equation", "");
            one(Var::einsum(equation, &call.list("operands")))
        }
        _ => None,
    }
}
