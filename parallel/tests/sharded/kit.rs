//! Models of any kind, trained on one device and on several, with any rule.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Clip, Group, Optimizer, Parameter, Parameters, Rule, grad_norm};
use phalanx_parallel::sharded::{Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device};

use crate::gpt::{Trained, add_chains, bytes};

/// A model and what it is trained by: the loss of a row of a step's batch.
pub trait Task: Parameters {
    fn loss(&self, step: u64, row: usize) -> Result<Var>;
}

pub type Rules = fn() -> Box<dyn Rule>;

/// How a task is trained.
#[derive(Clone)]
pub struct Course {
    pub rule: Rules,
    pub ranks: usize,
    pub micros: usize,
    pub steps: u64,
    pub grads: Option<DType>,
}

impl Course {
    fn optimizer(&self, parameters: Vec<Parameter>) -> Optimizer<Box<dyn Rule>> {
        (self.rule)().init(Group::decay_matrices(parameters, 1e-2, 0.1)).unwrap()
    }

    fn row(&self, rank: usize, micro: usize) -> usize {
        rank * self.micros + micro
    }

    /// One device: a chain of micro-batches for each rank there would be, added in order.
    pub fn alone<T: Task>(&self, build: impl Fn(Device) -> T) -> Trained {
        let model = build(Device::CPU);
        let _train = Context::with(|c| c.train = true);
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

    pub fn together<T: Task>(
        &self,
        config: &ZeroConfig,
        build: impl Fn(Device) -> T + Sync,
    ) -> Result<Trained> {
        let run = |rank: launch::Rank| -> Result<Trained> {
            let model = build(rank.device());
            let _train = Context::with(|c| c.train = true);
            let config = ZeroConfig { grad_dtype: self.grads, ..config.clone() };
            let zero = Zero::new(&model, rank.comm().clone(), config)?;
            let mut optimizer = self.optimizer(zero.parameters());
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
