//! Models and passes out of the ordinary; parameters outside every unit, which are unsharded before the first unit and resharded
//! after the backward pass.

use std::sync::Arc;

use phalanx_nn::autograd::{Var, no_grad};
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    AdamW, Embedding, EmbeddingConfig, Group, Linear, LinearConfig, Module, Parameter, Parameters, Rule,
    Scope, Sgd, WrappedUnit, autograd, parameters,
};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::sharded::{Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::gpt::bytes;
use crate::{STAGES, config, gpt};

#[test]
fn frozen_and_shared_parameters_and_those_of_no_unit() {
    let build = |device: Device| {
        let (linear, scope) = (LinearConfig::new(5, 5), Scope::new(2, DType::F64, device));
        let [a, b, c] = ["a", "b", "c"].map(|name| linear.init(&scope.child(name)).unwrap());
        b.parameters()[0].freeze();
        Odd { a: WrappedUnit::new(Arc::new(a)), b: WrappedUnit::new(Arc::new(b)), c }
    };
    let input = |device| Var::from_slice(&[0.5, -1.0, 2.0, 0.25, 3.0], &[1, 5], device);
    let run = |rank: launch::Rank, stage: ZeroStage| -> Result<_> {
        let model = build(rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
        let mut optimizer = Sgd::default().init(vec![Group::new(zero.parameters(), 0.1)])?;
        for _ in 0..3 {
            // Twice through a, whose unit is gathered twice.
            zero.backward(&model.forward(&input(rank.device())?)?.sum_all()?)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            zero.updated()?;
        }
        let _all = zero.gathered()?;
        Ok(bytes(&phalanx_nn::state_dict(&model)))
    };
    let model = build(Device::CPU);
    let trained = model.parameters().into_iter().filter(Parameter::is_trained).collect();
    let mut optimizer = Sgd::default().init(vec![Group::new(trained, 0.1)]).unwrap();
    for _ in 0..3 {
        // Three ranks bring the same gradient; it is added twice to itself.
        for _ in 0..3 {
            model.forward(&input(Device::CPU).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
        }
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    let wanted = bytes(&phalanx_nn::state_dict(&model));
    for stage in STAGES {
        let all = launch::threads(3, |rank| run(rank, stage)).unwrap();
        assert!(all.iter().all(|got| *got == wanted), "{stage:?}");
    }
}

/// A map that is used twice, one that is partly frozen, one that is no unit.
struct Odd {
    a: WrappedUnit<Linear>,
    b: WrappedUnit<Linear>,
    c: Linear,
}
phalanx_nn::parameters!(Odd { a, b, c });

impl Odd {
    fn forward(&self, x: &Var) -> Result<Var> {
        let x = self.b.forward(&self.a.forward(x)?)?;
        Ok(self.c.forward(&self.a.forward(&x)?)?)
    }
}

#[test]
fn two_forward_passes_before_their_backward_passes_and_one_without() {
    let run = |rank: &launch::Rank, together: bool, reshard: Reshard| -> Result<_> {
        let model = gpt::model(DType::F32, rank.device());
        let zero =
            Zero::new(&model, rank.comm().clone(), ZeroConfig { reshard, ..config(ZeroStage::Parameters) })?;
        let mut optimizer = gpt::optimizer(zero.parameters());
        for step in 0..2 {
            let [a, b] = [gpt::rows(2, rank.rank(), 2)[0].clone(), gpt::rows(2, rank.rank(), 2)[1].clone()];
            let first = gpt::loss(&model, step, a)?;
            if !together {
                zero.backward(&first)?;
            }
            let second = gpt::loss(&model, step, b)?;
            if together {
                // Looked at, and left; an evaluation between the passes gathers and frees too.
                gpt::loss(&model, step, 0..1)?;
                let _eval = phalanx_nn::autograd::no_grad();
                gpt::loss(&model, step, 0..1)?;
            }
            if together {
                zero.backward(&first)?;
            }
            zero.backward(&second)?;
            gpt::update(&mut optimizer, zero.grad_norm()?)?;
            zero.updated()?;
        }
        Ok(bytes(&zero.full_state_dict()?))
    };
    for reshard in [Reshard::Always, Reshard::ExceptLast, Reshard::Never] {
        let all = |together| launch::threads(2, |rank| run(&rank, together, reshard)).unwrap();
        assert!(all(true) == all(false), "{reshard:?}");
    }
}

#[test]
fn an_unused_parameter_is_an_error_or_has_no_gradient() {
    let run = |rank: &launch::Rank, stage: ZeroStage, find_unused: bool| -> Result<Vec<bool>> {
        let scope = Scope::new(2, DType::F32, rank.device());
        let [a, b] = ["a", "b"].map(|name| LinearConfig::new(9, 9).init(&scope.child(name)).unwrap());
        let c = LinearConfig::new(9, 9).init(&scope.child("c"))?;
        let model = Odd { a: WrappedUnit::new(Arc::new(a)), b: WrappedUnit::new(Arc::new(b)), c };
        let zero =
            Zero::new(&model, rank.comm().clone(), ZeroConfig { find_unused, ..ZeroConfig::new(stage) })?;
        let x = Var::new(phalanx_tensor::Tensor::zeros(&[1, 9], DType::F32, rank.device())?);
        // All ranks use a, one uses c, none uses b.
        let y = model.a.forward(&x)?;
        let y = if rank.rank() == 1 { model.c.forward(&y)? } else { y };
        zero.backward(&y.sum_all()?)?;
        let with = |name: &str| {
            zero.parameters()
                .iter()
                .filter(|p| p.name().starts_with(name))
                .all(|p| p.grad().unwrap().is_some())
        };
        Ok(["a.", "b.", "c."].map(with).to_vec())
    };
    for stage in STAGES {
        let all = launch::threads(2, |rank| run(&rank, stage, true)).unwrap();
        let has_b = |got: &Vec<bool>| got[1];
        assert!(all.iter().all(|got| got[0] && got[2]) && !all.iter().all(has_b), "{stage:?}: {all:?}");
        let error = launch::threads(2, |rank| run(&rank, stage, false)).unwrap_err().to_string();
        assert!(error.contains("b.weight") && error.contains("find_unused"), "{error}");
    }
}

#[test]
fn values_of_before_the_last_update_are_not_gone_on_from() {
    let run = |rank: launch::Rank| -> Result<()> {
        let model = gpt::model(DType::F32, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config(ZeroStage::Optimizer))?;
        let mut optimizer = gpt::optimizer(zero.parameters());
        for step in 0..2 {
            zero.backward(&gpt::loss(&model, step, 0..2)?)?;
            gpt::update(&mut optimizer, zero.grad_norm()?)?;
        }
        Ok(())
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("`updated`"), "{error}");
}

#[test]
fn a_failure_in_any_phase_names_its_rank() {
    for stage in STAGES {
        for phase in ["forward", "backward", "optimizer"] {
            let run = |rank: launch::Rank| -> Result<()> {
                let model = gpt::model(DType::F32, rank.device());
                let zero = Zero::new(&model, rank.comm().clone(), config(stage))?;
                let mut optimizer = gpt::optimizer(zero.parameters());
                let fails = |here: &str| assert!(rank.rank() != 1 || here != phase, "rank 1 fails in {here}");
                for step in 0..2 {
                    fails("forward");
                    let loss = gpt::loss(&model, step, 0..2)?;
                    let breaks = rank.rank() == 1 && phase == "backward";
                    let broken = move || autograd::Error::Custom("rank 1 fails in backward".into());
                    loss.on_grad(move |_| if breaks { Err(broken()) } else { Ok(None) });
                    zero.backward(&loss)?;
                    gpt::update(&mut optimizer, zero.grad_norm()?)?;
                    fails("optimizer");
                    zero.updated()?;
                }
                Ok(())
            };
            let error = launch::threads(3, run).unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains(phase), "{error}");
        }
    }
}

/// A table, two maps of which units may be made, a norm's weight, and the table again as a head, used outside its unit.
struct Model {
    table: WrappedUnit<Embedding>,
    first: Linear,
    second: WrappedUnit<Linear>,
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
            table: WrappedUnit::new(Arc::new(table)),
            first: linear("first"),
            second: WrappedUnit::new(Arc::new(second)),
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
            (ZeroStage::Gradients, Reshard::ExceptLast, RecomputeMode::Never),
            (ZeroStage::Parameters, Reshard::ExceptLast, RecomputeMode::Never),
            (ZeroStage::Parameters, Reshard::Always, RecomputeMode::Always),
            (ZeroStage::Parameters, Reshard::Never, RecomputeMode::Never),
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
            let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(ZeroStage::Parameters))?;
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
        let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(ZeroStage::Parameters))?;
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
