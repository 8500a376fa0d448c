//! ZeRO: the bits of one device, the memory and the traffic of the formulas. Models of any kind, trained on one device and on
//! several ranks, with any rule.

mod arriving;
mod bits;
mod bugs;
mod fsdp;
#[path = "../gpt/mod.rs"]
mod gpt;
mod ignored;
mod odd;
mod overlap;
mod state;
mod traps;
mod whole_rules;

use phalanx_nn::autograd::ContextMode;
use phalanx_nn::autograd::Var;
use phalanx_nn::{Clip, Group, Optimizer, Parameter, Parameters, Rule, grad_norm};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device};

use crate::gpt::{Trained, add_chains, bytes, loss, model, optimizer, rows, update};

const STAGES: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

fn config(stage: ZeroStage) -> ZeroConfig {
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
        let mut state = bytes(&zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
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
            let wanted = gpt::alone(dtype, ranks, micros, 3);
            assert!(wanted.0.iter().all(|&norm| norm > gpt::CLIP), "clipping has to act");
            if micros == 1 {
                same(&gpt::alone(dtype, 1, ranks, 3), &wanted, "ranks are what micro-batches are");
            }
            for stage in STAGES {
                let got = together(dtype, ranks, micros, 3, &config(stage));
                same(&got, &wanted, &format!("{stage:?}, {dtype}, {ranks} ranks, {micros} micro-batches"));
            }
        }
    }
}

/// A model and what it is trained by: the loss of a row of a step's batch.
trait Task: Parameters {
    fn loss(&self, step: u64, row: usize) -> Result<Var>;
}

type Rules = fn() -> Box<dyn Rule>;

/// How a task is trained.
#[derive(Clone)]
struct Course {
    rule: Rules,
    ranks: usize,
    micros: usize,
    steps: u64,
    grads: Option<DType>,
}

impl Course {
    fn optimizer(&self, parameters: Vec<Parameter>) -> Optimizer<Box<dyn Rule>> {
        (self.rule)().init(Group::decay_matrices(parameters, 1e-2, 0.1)).unwrap()
    }

    fn row(&self, rank: usize, micro: usize) -> usize {
        rank * self.micros + micro
    }

    /// One device: a chain of micro-batches for each rank there would be, added in order.
    fn alone<T: Task>(&self, build: impl Fn(Device) -> T) -> Trained {
        let model = build(Device::CPU);
        let _train = Context::with(|c| c.set_train(true));
        let parameters: Vec<Parameter> =
            model.parameters().into_iter().filter(Parameter::is_trained).collect();
        for p in self.grads.iter().flat_map(|&d| parameters.iter().map(move |p| (p, d))) {
            p.0.set_grad_dtype(p.1).unwrap();
        }
        let mut optimizer = self.optimizer(parameters.clone());
        let mut norms = Vec::new();
        for step in 0..self.steps {
            add_chains(&parameters, self.ranks, |rank| {
                for micro in 0..self.micros {
                    model.loss(step, self.row(rank, micro)).unwrap().backward().unwrap();
                }
            });
            let norm = grad_norm(&parameters).unwrap();
            optimizer.step_scaled(Clip::new(norm, 1.0).scale).unwrap();
            optimizer.zero_grad().unwrap();
            norms.push(norm);
        }
        let mut state = bytes(&optimizer.state_dict().unwrap());
        state.sort();
        (norms, bytes(&phalanx_nn::state_dict(&model)), state)
    }

    fn together<T: Task>(&self, config: &ZeroConfig, build: impl Fn(Device) -> T + Sync) -> Result<Trained> {
        let run = |rank: launch::Rank| -> Result<Trained> {
            let model = build(rank.device());
            let _train = Context::with(|c| c.set_train(true));
            let config = ZeroConfig { grad_dtype: self.grads, ..config.clone() };
            let zero = Zero::new(&model, rank.comm().clone(), config)?;
            let mut optimizer = self.optimizer(zero.parameters()).with_peers(Some(zero.peers()))?;
            let mut norms = Vec::new();
            for step in 0..self.steps {
                for micro in 0..self.micros {
                    let loss = model.loss(step, self.row(rank.rank(), micro))?;
                    let _accumulate = (micro + 1 < self.micros).then(|| zero.no_sync());
                    zero.backward(&loss)?;
                }
                let norm = zero.grad_norm()?;
                optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
                optimizer.zero_grad()?;
                zero.updated()?;
                norms.push(norm);
            }
            let mut state = bytes(&zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
            state.sort();
            Ok((norms, bytes(&zero.full_state_dict()?), state))
        };
        Ok(launch::threads(self.ranks, run)?.swap_remove(0))
    }
}
