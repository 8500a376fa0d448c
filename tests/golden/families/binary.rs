//! Functions of two tensors, or of a tensor and a number, elementwise and broadcast.

use phalanx::autograd::Result;
use phalanx::{Scalar, Var};

use super::{Call, one};

type Tensors = fn(&Var, &Var) -> Result<Var>;
type Number = fn(&Var, Scalar) -> Result<Var>;

/// The binary family, comparisons among it.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let (tensors, right, left): (Tensors, Option<Number>, Option<Number>) = match call.op {
        "add" => (Var::add, Some(Var::add_scalar), None),
        "sub" => (Var::sub, Some(Var::sub_scalar), Some(Var::rsub_scalar)),
        "mul" => (Var::mul, Some(Var::mul_scalar), None),
        "div" => (Var::div, Some(Var::div_scalar), Some(Var::rdiv_scalar)),
        "pow" => (Var::pow, Some(Var::pow_scalar), Some(Var::rpow_scalar)),
        "maximum" => (Var::maximum, None, None),
        "minimum" => (Var::minimum, None, None),
        "eq" => (Var::eq, Some(Var::eq_scalar), None),
        "ne" => (Var::ne, Some(Var::ne_scalar), None),
        "lt" => (Var::lt, Some(Var::lt_scalar), None),
        "le" => (Var::le, Some(Var::le_scalar), None),
        "gt" => (Var::gt, Some(Var::gt_scalar), None),
        "ge" => (Var::ge, Some(Var::ge_scalar), None),
        _ => return None,
    };
    let second = if call.op == "pow" { "exponent" } else { "other" };
    let number = |f: Option<Number>, name: &str| Some((f?, call.attrs.scalar(name)?));
    one(match (number(left, "self"), number(right, second)) {
        (Some((f, number)), _) => call.var(second).and_then(|x| f(x, number)),
        (None, Some((f, number))) => call.var("input").and_then(|x| f(x, number)),
        (None, None) => call.var("input").and_then(|a| tensors(a, call.var(second)?)),
    })
}
