//! Softmax, normalisations, losses over classes, attention, products of matrices: operations with kernels of their own.

use phalanx::Var;
use phalanx::autograd::ops::{Attention, BatchNorm, CrossEntropy, NllLoss, Reduction, Rope};
use phalanx::autograd::{Error, Result};

use super::{Call, one};

/// The fused family.
pub fn fused(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "softmax" => one(call.int("dim").and_then(|dim| call.var("input")?.softmax(dim))),
        "log_softmax" => one(call.int("dim").and_then(|dim| call.var("input")?.log_softmax(dim))),
        "layer_norm" => one(layer_norm(call)),
        "rms_norm" => one(rms_norm(call)),
        "group_norm" => one(group_norm(call)),
        "batch_norm" => Some(batch_norm(call)),
        "nll_loss" => one(nll_loss(call)),
        "cross_entropy" => one(cross_entropy(call)),
        "rope" => one(rope(call)),
        "scaled_dot_product_attention" => one(attention(call)),
        _ => None,
    }
}

fn rope(call: &Call<'_>) -> Result<Var> {
    let config = Rope { base: call.attrs.float_or("base", 10000.0), offset: call.attrs.int_or("offset", 0) };
    call.var("input")?.rope(call.opt("position_ids"), &config)
}

fn attention(call: &Call<'_>) -> Result<Var> {
    let config = Attention {
        is_causal: call.attrs.bool_or("is_causal", false),
        scale: call.attrs.float("scale"),
        enable_gqa: call.attrs.bool_or("enable_gqa", false),
        dropout: None,
    };
    let (key, value) = (call.var("key")?, call.var("value")?);
    call.var("query")?.scaled_dot_product_attention(key, value, call.opt("attn_mask"), &config)
}

fn normalized_shape(call: &Call<'_>) -> Result<Vec<usize>> {
    call.attrs.sizes("normalized_shape").ok_or_else(|| Error::Custom("no normalized_shape".into()))
}

fn layer_norm(call: &Call<'_>) -> Result<Var> {
    let (weight, bias) = (call.opt("weight"), call.opt("bias"));
    call.var("input")?.layer_norm(&normalized_shape(call)?, weight, bias, call.attrs.float_or("eps", 1e-5))
}

fn rms_norm(call: &Call<'_>) -> Result<Var> {
    let input = call.var("input")?;
    let smallest = match input.dtype() {
        phalanx::DType::F64 => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    };
    let eps = call.attrs.float_or("eps", smallest);
    input.rms_norm(&normalized_shape(call)?, call.opt("weight"), eps)
}

fn reduction(call: &Call<'_>) -> Result<Reduction> {
    match call.attrs.str_or("reduction", "mean") {
        "none" => Ok(Reduction::None),
        "mean" => Ok(Reduction::Mean),
        "sum" => Ok(Reduction::Sum),
        other => Err(Error::Custom(format!("reduction {other}"))),
    }
}

fn cross_entropy(call: &Call<'_>) -> Result<Var> {
    let config = CrossEntropy {
        weight: call.opt("weight").map(|w| w.tensor().clone()),
        ignore_index: call.attrs.int_or("ignore_index", -100),
        label_smoothing: call.attrs.float_or("label_smoothing", 0.0),
        reduction: reduction(call)?,
        ..CrossEntropy::default()
    };
    call.var("input")?.cross_entropy(call.var("target")?, &config)
}

fn nll_loss(call: &Call<'_>) -> Result<Var> {
    let config = NllLoss {
        weight: call.opt("weight").map(|w| w.tensor().clone()),
        ignore_index: call.attrs.int_or("ignore_index", -100),
        reduction: reduction(call)?,
        scale: 1.0,
    };
    call.var("input")?.nll_loss(call.var("target")?, &config)
}

fn group_norm(call: &Call<'_>) -> Result<Var> {
    let groups = usize::try_from(call.int("num_groups")?).map_err(|e| Error::Custom(e.to_string()))?;
    let (weight, bias) = (call.opt("weight"), call.opt("bias"));
    call.var("input")?.group_norm(groups, weight, bias, call.attrs.float_or("eps", 1e-5))
}

/// The output, and in training the running statistics after the call.
fn batch_norm(call: &Call<'_>) -> Result<Vec<Var>> {
    let config = BatchNorm {
        training: call.attrs.bool_or("training", false),
        momentum: call.attrs.float_or("momentum", 0.1),
        eps: call.attrs.float_or("eps", 1e-5),
    };
    let copy = |name: &str| call.opt(name).map(|v| v.tensor().copy()).transpose();
    let mut running = copy("running_mean")?.zip(copy("running_var")?);
    let given = running.as_mut().map(|(mean, var)| [mean, var]);
    let y = call.var("input")?.batch_norm(given, call.opt("weight"), call.opt("bias"), &config)?;
    let after = running.filter(|_| config.training).map(|(mean, var)| [Var::new(mean), Var::new(var)]);
    Ok([y].into_iter().chain(after.into_iter().flatten()).collect())
}

/// The matmul family.
pub fn matmul(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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
