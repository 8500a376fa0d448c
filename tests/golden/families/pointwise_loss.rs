//! Pointwise losses.

use phalanx::Var;
use phalanx::autograd::ops::{KlReduction, KlTarget};
use phalanx::autograd::{Error, Result};
use phalanx::kernels::Reduction;

use super::{Call, one};

/// The family of pointwise losses.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "mse_loss" | "l1_loss" | "smooth_l1_loss" | "binary_cross_entropy_with_logits" | "kl_div" => {
            one(loss(call))
        }
        _ => None,
    }
}

fn loss(call: &Call<'_>) -> Result<Var> {
    let (x, target) = (call.var("input")?, call.var("target")?);
    match call.op {
        "mse_loss" => x.mse_loss(target, reduction(call)?),
        "l1_loss" => x.l1_loss(target, reduction(call)?),
        "smooth_l1_loss" => x.smooth_l1_loss(target, call.attrs.float_or("beta", 1.0), reduction(call)?),
        "kl_div" => {
            let reduction = match call.attrs.str_or("reduction", "mean") {
                "batchmean" => KlReduction::BatchMean,
                _ => KlReduction::Elements(reduction(call)?),
            };
            let log = call.attrs.bool_or("log_target", false);
            let kind = if log { KlTarget::LogProbabilities } else { KlTarget::Probabilities };
            x.kl_div(target, kind, reduction)
        }
        _ => {
            let (weight, positive) = (call.opt("weight"), call.opt("pos_weight"));
            x.binary_cross_entropy_with_logits(target, weight, positive, reduction(call)?)
        }
    }
}

/// What becomes of the items' losses.
pub fn reduction(call: &Call<'_>) -> Result<Reduction> {
    match call.attrs.str_or("reduction", "mean") {
        "none" => Ok(Reduction::None),
        "mean" => Ok(Reduction::Mean),
        "sum" => Ok(Reduction::Sum),
        other => Err(Error::Custom(format!("reduction {other} is unknown"))),
    }
}
