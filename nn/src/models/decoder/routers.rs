//! The biases of routers, and their losses in a decoder's passes: each forward pass has a record of its routers, which the loss of its result takes.

use std::sync::Arc;

use phalanx_autograd::{ContextMode, Var, is_checkpointing};
use phalanx_tensor::{Context, DType, Dims, Tensor, unpoisoned};

use super::{Decoder, DecoderStage};
use crate::models::router_losses::{RouterPass, router_sums, sums_of_router, with_router_losses};
use crate::models::{Documents, RouterBias, RouterLosses};
use crate::{Error, LayerFactory, Result};

/// The routers of a whole model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routers {
    pub(crate) losses: RouterLosses,
    /// The blocks that have one.
    pub(crate) blocks: Vec<usize>,
    /// How many experts each has.
    pub(crate) experts: usize,
    /// How many of them a token takes.
    pub(crate) chosen: usize,
}

impl<L: LayerFactory> Decoder<L> {
    /// The biases of its routers that move with the loads, block by block.
    pub fn router_biases(&self) -> Vec<RouterBias> {
        self.blocks.iter().filter_map(|block| block.module().router_bias().cloned()).collect()
    }

    /// Whether routers add to the loss now: in training, where gradients are recorded, or would be but for a checkpoint.
    fn has_router_losses(&self) -> bool {
        let records = || Context::current().grad() || is_checkpointing();
        self.routers.losses.is_on() && self.mode.is_training() && records()
    }

    /// The shape and dtype of what a stage passes on beside the stream in training if the model has losses of routers: the sums of the routers
    /// of the first `blocks` blocks, f64 `[routers, 2 experts + 1]` (see [`Decoder::forward_stage`]). `None` if nothing is passed on: without
    /// such losses, outside of training, and where no block before has a router.
    pub fn router_sums(&self, blocks: usize) -> Option<(Dims, DType)> {
        let before = self.routers.blocks.iter().filter(|&&block| block < blocks).count();
        let shape = Dims::from_slice(&[before, sums_of_router(self.routers.experts)]);
        (before > 0 && self.has_router_losses()).then_some((shape, DType::F64))
    }

    /// [`Decoder::forward`] or, with documents, [`Decoder::forward_packed`], of a stage of a pipeline. `sums` are those of the routers of all blocks
    /// before it, which the stage before has passed on, [`Decoder::router_sums`]. The results are the stream and, of every stage but the last, the sums
    /// for the next stage. [`Decoder::loss`] of the last one uses the sums itself.
    ///
    /// The losses of routers are means over all blocks, so a stage cannot compute its part of them by itself. Their gradients come back to a
    /// stage as the gradient of the sums that it has passed on.
    ///
    /// # Errors
    /// If an input does not fit, or the sums have another shape or dtype, or are there without losses of routers.
    pub fn forward_stage(
        &self,
        input: &Var,
        documents: Option<&Documents>,
        sums: Option<&Var>,
    ) -> Result<(Var, Option<Var>)> {
        let wanted = self.router_sums(self.stage.layers.start);
        let got = sums.map(|sums| (Dims::from_slice(sums.shape()), sums.dtype()));
        if got != wanted {
            let told = |sums: Option<(Dims, DType)>| {
                sums.map_or("nothing".into(), |(shape, dtype)| format!("{shape:?} {dtype}"))
            };
            let (got, wanted, first) = (told(got), told(wanted), self.stage.layers.start);
            let why = format!("got {got} of the blocks before block {first}, wanted {wanted}");
            return Err(Error::invalid("sums of routers", why));
        }
        let (x, pass) = self.run(input, documents, sums)?;
        if self.stage.last {
            self.keep_router_pass(pass, &x);
            return Ok((x, None));
        }
        let sums = pass.map(|pass| router_sums(&x, &pass)).transpose()?.flatten();
        Ok((x, sums))
    }

    /// The record of a pass, after routers with these sums.
    pub(super) fn new_router_pass(&self, sums: Option<&Var>) -> Option<Arc<RouterPass>> {
        let Routers { losses, chosen, .. } = self.routers;
        self.has_router_losses().then(|| RouterPass::new(losses, chosen, sums.cloned()))
    }

    /// Refuses a forward pass of a stage without the sums of the others, and keeps the record of one of a whole model for its loss.
    pub(super) fn end_router_pass(&self, pass: Option<Arc<RouterPass>>, x: &Var) -> Result<()> {
        if pass.is_some() && self.stage != DecoderStage::whole(self.blocks_of_all) {
            let why = "got a stage of a model, wanted a whole one or `forward_stage`: the loads of all blocks count together";
            return Err(Error::invalid("router losses", why));
        }
        self.keep_router_pass(pass, x);
        Ok(())
    }

    /// Keeps the record of a pass with the result `x` for its loss.
    fn keep_router_pass(&self, pass: Option<Arc<RouterPass>>, x: &Var) {
        *unpoisoned(self.last_routers.lock()) = pass.map(|pass| (x.tensor().clone(), pass));
    }

    /// The loss of `x` with the losses of the routers of its pass, as many times as there are targets that count.
    pub(super) fn with_router_losses(&self, loss: Var, x: &Var, targets: &Var, scale: f64) -> Result<Var> {
        if !self.has_router_losses() {
            return Ok(loss);
        }
        let last = unpoisoned(self.last_routers.lock()).take();
        match last {
            Some((of, pass)) if of.shares_storage(x.tensor()) => {
                with_router_losses(&loss, &pass, scale * counted(targets.tensor())? as f64)
            }
            _ => {
                let why = "got a stream that is not the last forward pass's, or a second loss of it; wanted one loss of each pass";
                Err(Error::invalid("router losses", why))
            }
        }
    }
}

/// How many targets count; all on a meta device.
fn counted(targets: &Tensor) -> Result<usize> {
    if targets.device().is_meta() {
        return Ok(targets.numel());
    }
    Ok(targets.to_vec::<i64>()?.into_iter().filter(|&target| target != -100).count())
}

#[cfg(test)]
mod tests {
    use phalanx_autograd::Var;
    use phalanx_tensor::{DType, Device};

    use crate::models::{Decoder, DecoderStage, Family, RecomputeMode, RouterLosses, TransformerConfig};
    use crate::{OneDevice, Parameters, Scope};

    fn config(family: Family, losses: RouterLosses) -> TransformerConfig {
        let size =
            TransformerConfig { key_heads: 1, ..TransformerConfig::new(Family::Llama, 37, 12, 3, 2, 16) };
        let found = Family::samples(&size).into_iter().find(|config| config.family == family);
        let mut config = found.unwrap();
        config.experts.as_mut().unwrap().losses = losses;
        config
    }

    fn model(family: Family, losses: RouterLosses) -> Decoder {
        config(family, losses).init(&Scope::new(3, DType::F64, Device::CPU)).unwrap()
    }

    fn tokens(skip: usize) -> Var {
        let tokens: Vec<i64> = (0..24).map(|i| ((i + skip) * 7919 % 37) as i64).collect();
        Var::from_slice(&tokens, &[2, 12], Device::CPU).unwrap()
    }

    /// The loss of a batch of which one target does not count.
    fn loss(model: &Decoder) -> Var {
        let mut targets = tokens(1).into_tensor().to_vec::<i64>().unwrap();
        targets[5] = -100;
        let targets = Var::from_slice(&targets, &[2, 12], Device::CPU).unwrap();
        model.loss(&model.forward(&tokens(0)).unwrap(), &targets, 1.0 / 23.0).unwrap()
    }

    const LOSSES: RouterLosses = RouterLosses { balance: 0.5, z: 0.2 };

    #[test]
    fn gradients_of_losses_of_routers_are_differences_of_the_loss() {
        for family in [Family::Mixtral, Family::Qwen3Moe, Family::OlmoE] {
            let model = model(family, LOSSES);
            loss(&model).backward().unwrap();
            let names =
                ["layers.0.mlp.gate.weight", "layers.2.mlp.gate.weight", "layers.0.self_attn.v_proj.weight"];
            for p in model.parameters().iter().filter(|p| names.contains(&p.name())) {
                let grad = p.grad().unwrap().unwrap().to_vec::<f64>().unwrap();
                let values = p.tensor().to_vec::<f64>().unwrap();
                for at in [0, 7, grad.len() - 1] {
                    let moved = |step: f64| {
                        let mut values = values.clone();
                        values[at] += step;
                        let shape = p.tensor().shape().to_vec();
                        p.load(&phalanx_tensor::Tensor::from_slice(&values, &shape, Device::CPU).unwrap())
                            .unwrap();
                        loss(&model).item::<f64>().unwrap()
                    };
                    let wanted = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    moved(0.0);
                    assert!(
                        (grad[at] - wanted).abs() < 1e-7,
                        "{family:?} {}: {}, {wanted}",
                        p.name(),
                        grad[at]
                    );
                }
            }
        }
    }

    /// With a plain router of logits 0 the balancing loss is the number of experts that a token takes, and the z-loss ln(experts)^2.
    #[test]
    fn level_routers_have_the_losses_of_the_formulas() {
        let value = |losses| {
            let model = model(Family::Mixtral, losses);
            for p in model.parameters().iter().filter(|p| p.name().ends_with("gate.weight")) {
                p.load(&p.tensor().zeros_like().unwrap()).unwrap();
            }
            loss(&model).item::<f64>().unwrap()
        };
        let plain = value(RouterLosses::default());
        assert!((value(RouterLosses { balance: 0.5, z: 0.0 }) - plain - 0.5 * 2.0).abs() < 1e-12);
        assert!(
            (value(RouterLosses { balance: 0.0, z: 0.5 }) - plain - 0.5 * 4f64.ln().powi(2)).abs() < 1e-12
        );
    }

    #[test]
    fn recomputed_blocks_have_the_same_bits_with_losses_of_routers() {
        let run = |mode| {
            let mut model = model(Family::Qwen3Moe, LOSSES);
            model.set_recompute(mode);
            let loss = loss(&model);
            loss.backward().unwrap();
            let grads =
                model.parameters().into_iter().map(|p| p.grad().unwrap().unwrap().to_bytes().unwrap());
            (loss.tensor().to_bytes().unwrap(), grads.collect::<Vec<_>>())
        };
        let plain = run(RecomputeMode::Never);
        for mode in [RecomputeMode::Always, RecomputeMode::ExceptLast, RecomputeMode::Attention] {
            assert!(run(mode) == plain, "{mode}");
        }
    }

    #[test]
    fn losses_of_routers_are_for_training_of_whole_models() {
        let model = model(Family::Mixtral, LOSSES);
        let plain = {
            let _inference = crate::inference();
            loss(&model).item::<f64>().unwrap()
        };
        assert!(loss(&model).item::<f64>().unwrap() > plain + 0.5);
        let x = model.forward(&tokens(0)).unwrap();
        model.loss(&x, &tokens(1), 1.0).unwrap();
        let refused = model.loss(&x, &tokens(1), 1.0).unwrap_err().to_string();
        assert!(refused.contains("wanted one loss of each pass"), "{refused}");
        let scope = Scope::new(3, DType::F64, Device::CPU);
        let stage = |layers, first| {
            let stage = DecoderStage { layers, first, last: !first };
            config(Family::Mixtral, LOSSES)
                .init_stage(&std::sync::Arc::new(OneDevice), &scope, stage)
                .unwrap()
        };
        let (first, last) = (stage(0..2, true), stage(2..3, false));
        let refused = first.forward(&tokens(0)).unwrap_err().to_string();
        assert!(refused.contains("got a stage of a model, wanted a whole one"), "{refused}");
        let (x, sums) = first.forward_stage(&tokens(0), None, None).unwrap();
        let refused = last.forward_stage(&x, None, None).unwrap_err().to_string();
        let wanted = "got nothing of the blocks before block 2, wanted [2, 9] f64";
        assert!(refused.contains(wanted), "{refused}");
        last.forward_stage(&x, None, sums.as_ref()).unwrap();
        let refused = first.forward_stage(&tokens(0), None, sums.as_ref()).unwrap_err().to_string();
        assert!(refused.contains("got [2, 9] f64 of the blocks before block 0, wanted nothing"), "{refused}");
    }
}
