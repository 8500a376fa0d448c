//! ZeRO: the bits of one device, the memory and the traffic of the formulas.

mod gpt;

use gpt::{Trained, alone, bytes, loss, model, optimizer, rows, update};
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::{Group, Linear, LinearConfig, Module, Parameter, Parameters, Rule, Scope, Sgd, Unit};
use phalanx_parallel::sharded::{Ownership, Reshard, Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

const STAGES: [Stage; 3] = [Stage::Optimizer, Stage::Gradients, Stage::Parameters];

fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig { grad_dtype: Some(DType::F32), ..ZeroConfig::new(stage) }
}

fn together(dtype: DType, ranks: usize, micros: usize, steps: u64, config: &ZeroConfig) -> Trained {
    let run = |rank: launch::Rank| -> Result<Trained> {
        let model = model(dtype, rank.device());
        let zero = Zero::new(&model, rank.comm().clone(), config.clone())?;
        let mut optimizer = optimizer(zero.parameters());
        let mut norms = Vec::new();
        for step in 0..steps {
            for (number, rows) in rows(ranks, rank.rank(), micros).into_iter().enumerate() {
                let loss = loss(&model, step, rows)?;
                let _accumulate = (number + 1 < micros).then(|| zero.no_sync());
                zero.backward(&loss)?;
            }
            norms.push(update(&mut optimizer, zero.grad_norm()?)?);
            zero.updated()?;
        }
        let mut state = bytes(&zero.full_optimizer_state(&optimizer)?);
        state.sort();
        Ok((norms, bytes(&zero.full_state_dict()?), state))
    };
    let mut all = launch::threads(ranks, run).unwrap();
    let first = all.swap_remove(0);
    assert!(all.iter().all(|other| other.0 == first.0), "norms differ");
    first
}

fn same(got: &Trained, wanted: &Trained, what: &str) {
    assert_eq!(got.0, wanted.0, "{what}");
    assert!(got.1 == wanted.1, "{what}: values differ");
    assert!(got.2 == wanted.2, "{what}: optimizer state differs");
}

#[test]
fn every_stage_has_the_bits_of_one_device() {
    for (dtype, micros) in [(DType::F32, 1), (DType::F32, 2), (DType::BF16, 1)] {
        for ranks in [1, 2, 3, 4, 8] {
            let wanted = alone(dtype, ranks, micros, 3);
            assert!(wanted.0.iter().all(|&norm| norm > gpt::CLIP), "clipping has to act");
            for stage in STAGES {
                let got = together(dtype, ranks, micros, 3, &config(stage));
                same(&got, &wanted, &format!("{stage:?}, {dtype}, {ranks} ranks, {micros} micro-batches"));
            }
        }
    }
}

#[test]
fn choices_change_no_bit() {
    let wanted = alone(DType::F32, 3, 2, 3);
    for stage in STAGES {
        for (ownership, reshard, prefetch, offload) in [
            (Ownership::Whole, Reshard::ExceptLast, true, None),
            (Ownership::Even, Reshard::Always, false, None),
            (Ownership::Even, Reshard::Never, true, None),
            (Ownership::Whole, Reshard::Always, true, Some(Device::Cpu(9))),
        ] {
            let config = ZeroConfig { ownership, reshard, prefetch, offload, ..config(stage) };
            same(&together(DType::F32, 3, 2, 3, &config), &wanted, &format!("{config:?}"));
        }
    }
}

#[test]
fn frozen_and_shared_parameters_and_those_of_no_unit() {
    let build = |device: Device| {
        let (linear, scope) = (LinearConfig::new(5, 5), Scope::new(2, DType::F64, device));
        let [a, b, c] = ["a", "b", "c"].map(|name| linear.clone().init(&scope.child(name)).unwrap());
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
