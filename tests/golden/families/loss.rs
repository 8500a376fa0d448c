//! Losses of elements, of pairs and of triplets.

use phalanx::Var;
use phalanx::autograd::ops::{GaussianNll, KlReduction, KlTarget, PoissonNll, TripletMargin};
use phalanx::autograd::{Error, Result};
use phalanx::kernels::Reduction;

use super::{Call, one};

/// The family of pointwise losses.
pub fn pointwise(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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

/// The reduction of the items' losses.
pub fn reduction(call: &Call<'_>) -> Result<Reduction> {
    match call.attrs.str_or("reduction", "mean") {
        "none" => Ok(Reduction::None),
        "mean" => Ok(Reduction::Mean),
        "sum" => Ok(Reduction::Sum),
        other => Err(Error::Custom(format!("reduction {other} is unknown"))),
    }
}

/// The family of losses that `pointwise` does not have.
pub fn further(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "huber_loss"
        | "binary_cross_entropy"
        | "poisson_nll_loss"
        | "gaussian_nll_loss"
        | "hinge_embedding_loss" => one(of_one(call)),
        "cosine_embedding_loss" | "margin_ranking_loss" | "triplet_margin_loss" => one(of_several(call)),
        _ => None,
    }
}

fn of_one(call: &Call<'_>) -> Result<Var> {
    let (x, target, attrs) = (call.var("input")?, call.var("target")?, call.attrs);
    let (full, reduction) = (attrs.bool_or("full", false), reduction(call)?);
    match call.op {
        "huber_loss" => x.huber_loss(target, attrs.float_or("delta", 1.0), reduction),
        "binary_cross_entropy" => x.binary_cross_entropy(target, call.opt("weight"), reduction),
        "poisson_nll_loss" => {
            let log_input = attrs.bool_or("log_input", true);
            let config = PoissonNll { log_input, full, eps: attrs.float_or("eps", 1e-8), reduction };
            x.poisson_nll_loss(target, &config)
        }
        "gaussian_nll_loss" => {
            let config = GaussianNll { full, eps: attrs.float_or("eps", 1e-6), reduction };
            x.gaussian_nll_loss(target, call.var("var")?, &config)
        }
        _ => x.hinge_embedding_loss(target, attrs.float_or("margin", 1.0), reduction),
    }
}

fn of_several(call: &Call<'_>) -> Result<Var> {
    let (attrs, reduction) = (call.attrs, reduction(call)?);
    if call.op == "triplet_margin_loss" {
        let config = TripletMargin {
            margin: attrs.float_or("margin", 1.0),
            p: attrs.float_or("p", 2.0),
            eps: attrs.float_or("eps", 1e-6),
            swap: attrs.bool_or("swap", false),
            reduction,
        };
        return call.var("anchor")?.triplet_margin_loss(
            call.var("positive")?,
            call.var("negative")?,
            &config,
        );
    }
    let (a, b, target) = (call.var("input1")?, call.var("input2")?, call.var("target")?);
    let margin = attrs.float_or("margin", 0.0);
    match call.op {
        "cosine_embedding_loss" => a.cosine_embedding_loss(b, target, margin, reduction),
        _ => a.margin_ranking_loss(b, target, margin, reduction),
    }
}
