//! More losses.

use phalanx::Var;
use phalanx::autograd::Result;
use phalanx::autograd::ops::{GaussianNll, PoissonNll, TripletMargin};

use super::pointwise_loss::reduction;
use super::{Call, one};

/// The family of losses that `pointwise_loss` does not have.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
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
