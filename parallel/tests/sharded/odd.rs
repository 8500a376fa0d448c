//! Models and passes out of the ordinary.

use std::sync::Arc;

use phalanx_nn::autograd::{self, Var};
use phalanx_nn::{Group, Linear, LinearConfig, Module, Parameter, Parameters, Rule, Scope, Sgd, Unit};
use phalanx_parallel::sharded::{Reshard, Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::gpt::{self, bytes};
use crate::{STAGES, config};

#[test]
fn frozen_and_shared_parameters_and_those_of_no_unit() {
    let build = |device: Device| {
        let (linear, scope) = (LinearConfig::new(5, 5), Scope::new(2, DType::F64, device));
        let [a, b, c] = ["a", "b", "c"].map(|name| linear.init(&scope.child(name)).unwrap());
        b.parameters()[0].freeze();
        Odd { a: Unit::new(Arc::new(a)), b: Unit::new(Arc::new(b)), c }
    };
    let input = |device| Var::from_slice(&[0.5, -1.0, 2.0, 0.25, 3.0], &[1, 5], device);
    let run = |rank: launch::Rank, stage: Stage| -> Result<_> {
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
    a: Unit<Linear>,
    b: Unit<Linear>,
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
            Zero::new(&model, rank.comm().clone(), ZeroConfig { reshard, ..config(Stage::Parameters) })?;
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
    let run = |rank: &launch::Rank, stage: Stage, find_unused: bool| -> Result<Vec<bool>> {
        let scope = Scope::new(2, DType::F32, rank.device());
        let [a, b] = ["a", "b"].map(|name| LinearConfig::new(9, 9).init(&scope.child(name)).unwrap());
        let c = LinearConfig::new(9, 9).init(&scope.child("c"))?;
        let model = Odd { a: Unit::new(Arc::new(a)), b: Unit::new(Arc::new(b)), c };
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
        let zero = Zero::new(&model, rank.comm().clone(), config(Stage::Optimizer))?;
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
