//! Further functions of elements: roundings, inverses, activations, quotients, logic.

use phalanx::Var;
use phalanx::autograd::Result;

use super::{Call, one};

/// The functions of one element, of two, and those with attributes.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    if let Some(f) = of_one(call.op) {
        return one(call.var("input").and_then(f));
    }
    if let Some(f) = of_two(call.op) {
        return one(call.var("input").and_then(|x| f(x, call.var("other")?)));
    }
    match call.op {
        "fmod" | "remainder" | "floor_divide" => one(quotient(call)),
        "hardtanh" | "celu" | "glu" | "prelu" | "lerp" | "addcmul" | "addcdiv" | "clamp_tensor"
        | "isclose" => one(call.var("input").and_then(|x| with_attrs(call, x))),
        _ => None,
    }
}

fn of_one(op: &str) -> Option<fn(&Var) -> Result<Var>> {
    Some(match op {
        "exp2" => Var::exp2,
        "log2" => Var::log2,
        "log10" => Var::log10,
        "log1p" => Var::log1p,
        "expm1" => Var::expm1,
        "sinh" => Var::sinh,
        "cosh" => Var::cosh,
        "tan" => Var::tan,
        "asin" => Var::asin,
        "acos" => Var::acos,
        "atan" => Var::atan,
        "asinh" => Var::asinh,
        "acosh" => Var::acosh,
        "atanh" => Var::atanh,
        "erfc" => Var::erfc,
        "hardswish" => Var::hardswish,
        "hardsigmoid" => Var::hardsigmoid,
        "mish" => Var::mish,
        "selu" => Var::selu,
        "logsigmoid" => Var::logsigmoid,
        "relu6" => Var::relu6,
        "softsign" => Var::softsign,
        "tanhshrink" => Var::tanhshrink,
        "floor" => Var::floor,
        "ceil" => Var::ceil,
        "round" => Var::round,
        "trunc" => Var::trunc,
        "frac" => Var::frac,
        "sign" => Var::sign,
        "isnan" => Var::isnan,
        "isinf" => Var::isinf,
        "isfinite" => Var::isfinite,
        "logical_not" => Var::logical_not,
        _ => return None,
    })
}

fn of_two(op: &str) -> Option<fn(&Var, &Var) -> Result<Var>> {
    Some(match op {
        "atan2" => Var::atan2,
        "hypot" => Var::hypot,
        "logaddexp" => Var::logaddexp,
        "xlogy" => Var::xlogy,
        "bitwise_and" => Var::bitwise_and,
        "bitwise_or" => Var::bitwise_or,
        "bitwise_xor" => Var::bitwise_xor,
        "logical_and" => Var::logical_and,
        "logical_or" => Var::logical_or,
        "logical_xor" => Var::logical_xor,
        _ => return None,
    })
}

/// By a tensor or a number.
fn quotient(call: &Call<'_>) -> Result<Var> {
    let x = call.var("input")?;
    match (call.op, call.attrs.scalar("other")) {
        ("fmod", Some(other)) => x.fmod_scalar(other),
        ("fmod", None) => x.fmod(call.var("other")?),
        ("remainder", Some(other)) => x.remainder_scalar(other),
        ("remainder", None) => x.remainder(call.var("other")?),
        (_, Some(other)) => x.floor_divide_scalar(other),
        (_, None) => x.floor_divide(call.var("other")?),
    }
}

fn with_attrs(call: &Call<'_>, x: &Var) -> Result<Var> {
    let attrs = call.attrs;
    let value = || attrs.scalar("value").unwrap_or(1.into());
    match call.op {
        "hardtanh" => x.hardtanh(attrs.float_or("min_val", -1.0), attrs.float_or("max_val", 1.0)),
        "celu" => x.celu(attrs.float_or("alpha", 1.0)),
        "glu" => x.glu(attrs.int_or("dim", -1)),
        "prelu" => x.prelu(call.var("weight")?),
        "lerp" => match attrs.float("weight") {
            Some(weight) => x.lerp_scalar(call.var("end")?, weight),
            None => x.lerp(call.var("end")?, call.var("weight")?),
        },
        "addcmul" => x.addcmul(call.var("tensor1")?, call.var("tensor2")?, value()),
        "addcdiv" => x.addcdiv(call.var("tensor1")?, call.var("tensor2")?, value().to_f64()),
        "clamp_tensor" => x.clamp_tensor(call.opt("min"), call.opt("max")),
        _ => {
            let (rtol, atol) = (attrs.float_or("rtol", 1e-5), attrs.float_or("atol", 1e-8));
            x.isclose(call.var("other")?, rtol, atol, attrs.bool_or("equal_nan", false))
        }
    }
}
