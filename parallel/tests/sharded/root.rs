//! What lies outside every unit: one more, which is gathered with the first and freed after the backward pass.

use std::sync::Arc;

use phalanx_nn::autograd::{Var, no_grad};
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    AdamW, Embedding, EmbeddingConfig, Group, Linear, LinearConfig, Module, Parameter, Parameters, Rule,
    Scope, Unit, parameters,
};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{Reshard, Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::gpt::bytes;

/// A table, two maps of which units may be made, a norm's weight, and the table again as a head, used outside its unit.
struct Model {
    table: Unit<Embedding>,
    first: Linear,
    second: Unit<Linear>,
    scale: Parameter,
}
parameters!(Model { table, first, second, scale });

impl Model {
    fn new(device: Device) -> Model {
        let scope = Scope::new(4, DType::F32, device);
        let linear = |name: &str| LinearConfig::new(24, 24).init(&scope.child(name)).unwrap();
        let table = EmbeddingConfig::new(11, 24).init(&scope.child("table")).unwrap();
        let second = linear("second");
        second.bias.as_ref().unwrap().freeze();
        Model {
            table: Unit::new(Arc::new(table)),
            first: linear("first"),
            second: Unit::new(Arc::new(second)),
            scale: scope.parameter("scale", &[24], phalanx_nn::Init::Constant(1.5)).unwrap(),
        }
    }

    fn loss(&self, step: usize, rank: usize, recompute: bool) -> Result<Var> {
        let tokens: Vec<i64> = (0..6).map(|i| ((i * 7 + step * 3 + rank) % 11) as i64).collect();
        let tokens = Var::from_slice(&tokens, &[6], self.scale.device())?;
        let x = self.table.forward(&tokens)?;
        let x = self.first.forward(&x)?.tanh()?;
        let x = self.second.call(&x, recompute, |module, x| module.forward(x))?;
        let x = x.mul(&self.scale.var())?;
        // The table's gradient comes from two places of one graph.
        let scores = x.matmul(&self.table.module().weight.var().transpose(0, 1)?)?;
        Ok(scores.square()?.sum_all()?)
    }
}

/// Losses, values and optimizer state after three steps.
fn train(
    rank: &launch::Rank,
    model: &Model,
    share: &dyn DataParallel,
    mode: RecomputeMode,
) -> Result<Outcome> {
    let mut optimizer = AdamW::default().init(vec![Group::new(share.parameters(), 1e-2)])?;
    let (mut losses, recompute) = (Vec::new(), mode == RecomputeMode::Always);
    for step in 0..3 {
        for micro in 0..2 {
            let _accumulate = (micro == 0).then(|| share.no_sync());
            let loss = model.loss(2 * step + micro, rank.rank(), recompute)?;
            losses.push(loss.tensor().item::<f32>()?);
            share.backward(&loss)?;
        }
        let clip = share.clip_grad_norm(1.0)?;
        losses.push(clip.norm as f32);
        optimizer.step_scaled(clip.scale)?;
        share.zero_grad()?;
        share.updated()?;
        // Evaluations between the steps.
        let _no_grad = no_grad();
        losses.push(model.loss(step, rank.rank(), recompute)?.tensor().item()?);
    }
    let mut state = bytes(&share.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
    state.sort();
    Ok((losses, bytes(&share.full_state_dict(model)?), state))
}

type Outcome = (Vec<f32>, Vec<(String, Vec<u8>)>, Vec<(String, Vec<u8>)>);

#[test]
fn a_model_that_is_no_unit_in_part_trains_to_the_same_bits() {
    for ranks in [1, 2, 3] {
        let wanted = launch::threads(ranks, |rank| {
            let model = Model::new(rank.device());
            let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
            train(&rank, &model, &ddp, RecomputeMode::Never)
        });
        let wanted = wanted.unwrap();
        for (stage, reshard, mode) in [
            (Stage::Gradients, Reshard::ExceptLast, RecomputeMode::Never),
            (Stage::Parameters, Reshard::ExceptLast, RecomputeMode::Never),
            (Stage::Parameters, Reshard::Always, RecomputeMode::Always),
            (Stage::Parameters, Reshard::Never, RecomputeMode::Never),
        ] {
            let got = launch::threads(ranks, |rank| {
                let model = Model::new(rank.device());
                let config = ZeroConfig { reshard, ..ZeroConfig::new(stage) };
                let zero = Zero::new(&model, rank.comm().clone(), config)?;
                train(&rank, &model, &zero, mode)
            });
            let got = got.unwrap();
            let what = format!("{stage:?}, {reshard:?}, {mode:?} over {ranks}");
            for (got, wanted) in got.iter().zip(&wanted) {
                assert_eq!(got.0, wanted.0, "{what}");
            }
            assert!(got[0].1 == wanted[0].1 && got[0].2 == wanted[0].2, "{what}");
        }
    }
}

#[test]
fn two_forward_passes_before_their_backward_passes_find_the_values_again() {
    let all = launch::threads(2, |rank| -> Result<_> {
        let run = |together: bool| -> Result<Vec<_>> {
            let model = Model::new(rank.device());
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(Stage::Parameters))?;
            let first = model.loss(0, rank.rank(), false)?;
            if together {
                let second = model.loss(1, rank.rank(), false)?;
                zero.backward(&first)?;
                zero.backward(&second)?;
            } else {
                zero.backward(&first)?;
                zero.backward(&model.loss(1, rank.rank(), false)?)?;
            }
            let grads = zero.parameters().into_iter().map(|p| Ok(p.grad()?.unwrap().to_vec::<f32>()?));
            grads.collect()
        };
        assert_eq!(run(true)?, run(false)?);
        Ok(())
    });
    all.unwrap();
}

#[test]
fn nothing_is_whole_between_steps_nor_after_an_evaluation_that_is_over() {
    let run = |rank: launch::Rank| -> Result<()> {
        let model = Model::new(rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(Stage::Parameters))?;
        let spread = || model.parameters().iter().all(|p| p.tensor().why_withheld().is_some());
        assert!(spread(), "at first");
        zero.backward(&model.loss(0, rank.rank(), false)?)?;
        assert!(spread(), "after a pass");
        let accumulate = zero.no_sync();
        zero.backward(&model.loss(0, rank.rank(), false)?)?;
        drop(accumulate);
        assert!(spread(), "after a pass that only accumulates");
        let evaluate = || {
            let _no_grad = no_grad();
            model.loss(0, rank.rank(), false).map(drop)
        };
        evaluate()?;
        assert!(!spread(), "the root stays");
        drop(zero.gathered()?);
        assert!(spread(), "after all was gathered");
        evaluate()?;
        zero.zero_grad()?;
        zero.updated()?;
        assert!(spread(), "after `updated`");
        Ok(())
    };
    launch::threads(2, run).unwrap();
}
