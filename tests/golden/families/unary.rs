//! Functions of one tensor, elementwise.

use phalanx::Var;
use phalanx::autograd::{Error, Result};
use phalanx::kernels::Gelu;

use super::{Call, one};

/// The unary family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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
