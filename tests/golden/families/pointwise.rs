//! Functions of elements: of one tensor, of two or a tensor and a number, choices, bounds and conversions.

use phalanx::autograd::{Error, Result};
use phalanx::kernels::Gelu;
use phalanx::{DType, Scalar, Var};

use super::{Call, one};

/// The unary family.
pub fn unary(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let f: fn(&Var) -> Result<Var> = match call.op {
        "abs" => Var::abs,
        "cos" => Var::cos,
        "erf" => Var::erf,
        "exp" => Var::exp,
        "log" => Var::log,
        "neg" => Var::neg,
        "reciprocal" => Var::reciprocal,
        "relu" => Var::relu,
        "rsqrt" => Var::rsqrt,
        "sigmoid" => Var::sigmoid,
        "silu" => Var::silu,
        "sin" => Var::sin,
        "sqrt" => Var::sqrt,
        "square" => Var::square,
        "tanh" => Var::tanh,
        "elu" | "gelu" | "leaky_relu" | "softplus" => return one(with_attrs(call)),
        _ => return None,
    };
    one(call.var("input").and_then(f))
}

fn with_attrs(call: &Call<'_>) -> Result<Var> {
    let (x, attrs) = (call.var("input")?, call.attrs);
    match call.op {
        "elu" => x.elu(attrs.float_or("alpha", 1.0)),
        "leaky_relu" => x.leaky_relu(attrs.float_or("negative_slope", 0.01)),
        "softplus" => x.softplus(attrs.float_or("beta", 1.0), attrs.float_or("threshold", 20.0)),
        _ => match attrs.str_or("approximate", "none") {
            "none" => x.gelu(Gelu::Exact),
            "tanh" => x.gelu(Gelu::Tanh),
            other => Err(Error::Custom(format!("approximate {other} is unknown"))),
        },
    }
}

type Tensors = fn(&Var, &Var) -> Result<Var>;
type Number = fn(&Var, Scalar) -> Result<Var>;

/// The binary family, comparisons among it.
pub fn binary(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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

/// The family of `where`, `clamp`, `masked_fill` and `to`.
pub fn choice(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "where" | "clamp" | "masked_fill" | "to" => one(choose(call)),
        _ => None,
    }
}

fn choose(call: &Call<'_>) -> Result<Var> {
    let (x, attrs) = (call.var("input")?, call.attrs);
    let missing = |name: &str| Error::Custom(format!("the case has no {name}"));
    match call.op {
        "where" => x.where_(call.var("condition")?, call.var("other")?),
        "clamp" => x.clamp(attrs.scalar("min"), attrs.scalar("max")),
        "masked_fill" => {
            x.masked_fill(call.var("mask")?, attrs.scalar("value").ok_or_else(|| missing("value"))?)
        }
        _ => x.to(DType::parse(attrs.str_or("dtype", "")).ok_or_else(|| missing("dtype"))?),
    }
}

/// The functions of one element, of two, and those with attributes.
pub fn further(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    if let Some(f) = of_one(call.op) {
        return one(call.var("input").and_then(f));
    }
    if let Some(f) = of_two(call.op) {
        return one(call.var("input").and_then(|x| f(x, call.var("other")?)));
    }
    match call.op {
        "fmod" | "remainder" | "floor_divide" => one(quotient(call)),
        "hardtanh" | "celu" | "glu" | "prelu" | "lerp" | "addcmul" | "addcdiv" | "clamp_tensor"
        | "isclose" => one(call.var("input").and_then(|x| more_with_attrs(call, x))),
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

fn more_with_attrs(call: &Call<'_>, x: &Var) -> Result<Var> {
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
