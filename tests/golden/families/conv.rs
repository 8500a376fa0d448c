//! Convolutions.

use phalanx::Var;
use phalanx::autograd::{Error, Result};
use phalanx::kernels::{Conv1dOptions, ConvOptions};

use super::{Call, one};

/// The conv family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "conv1d" => one(conv1d(call)),
        "conv2d" => one(conv2d(call)),
        "conv_transpose2d" => one(conv_transpose2d(call)),
        _ => None,
    }
}

fn conv1d(call: &Call<'_>) -> Result<Var> {
    let list = |name: &str, default: usize| pair(call, name, default).map(|p| p[1]);
    let options = Conv1dOptions {
        stride: list("stride", 1)?,
        padding: list("padding", 0)?,
        dilation: list("dilation", 1)?,
        groups: groups(call)?,
    };
    call.var("input")?.conv1d(call.var("weight")?, call.opt("bias"), &options)
}

fn conv2d(call: &Call<'_>) -> Result<Var> {
    call.var("input")?.conv2d(call.var("weight")?, call.opt("bias"), &options(call)?)
}

fn conv_transpose2d(call: &Call<'_>) -> Result<Var> {
    let output_padding = pair(call, "output_padding", 0)?;
    let (weight, bias) = (call.var("weight")?, call.opt("bias"));
    call.var("input")?.conv_transpose2d(weight, bias, &options(call)?, output_padding)
}

fn options(call: &Call<'_>) -> Result<ConvOptions> {
    Ok(ConvOptions {
        stride: pair(call, "stride", 1)?,
        padding: pair(call, "padding", 0)?,
        dilation: pair(call, "dilation", 1)?,
        groups: groups(call)?,
    })
}

fn groups(call: &Call<'_>) -> Result<usize> {
    usize::try_from(call.attrs.int_or("groups", 1)).map_err(|e| Error::Custom(format!("groups: {e}")))
}

/// Two sizes; a single one stands for both.
pub fn pair(call: &Call<'_>, name: &str, default: usize) -> Result<[usize; 2]> {
    if !call.attrs.has(name) {
        return Ok([default; 2]);
    }
    match call.attrs.sizes(name).as_deref() {
        Some(&[both]) => Ok([both; 2]),
        Some(&[a, b]) => Ok([a, b]),
        _ => Err(Error::Custom(format!("{name} is not one or two sizes"))),
    }
}
