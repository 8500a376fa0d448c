//! Training without flushes on one device: a plain loop that keeps every version of every stage's weights and takes, for each
//! micro-batch at each stage, the one that the papers' formulas say.
#![allow(dead_code)]

use phalanx_nn::autograd::ContextMode;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig, ModelConfig};
use phalanx_nn::{
    AdamW, Clip, Group, OneDevice, Optimizer, Parameter, Parameters, Rule, Scope, Sgd, grad_norm,
};
use phalanx_parallel::Result;
use phalanx_parallel::pipeline::ranks::{Chunks, Spec, Stages, Weights};
use phalanx_parallel::pipeline::schedule::{
    Asynchronous, double_buffered_over, one_f_one_b, vertical_sync_over, weight_stashing_over,
};
use phalanx_tensor::{Context, DType, Device, Dims, RngKey, Tensor};

use crate::gpt::{LENGTH, add_chains};
use crate::kit::WIDTH;

/// A schedule without flushes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// PipeDream.
    Stashing,
    /// PipeDream with vertical sync.
    VerticalSync,
    /// PipeDream-2BW, an update every so many micro-batches.
    DoubleBuffered(usize),
}

#[derive(Clone, Copy, Debug)]
pub enum By {
    Momentum,
    AdamW,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Case {
    pub scheme: Scheme,
    pub stages: usize,
    /// Of each stage.
    pub replicas: Vec<usize>,
    pub micro_batches: usize,
    pub by: By,
    pub dtype: DType,
    /// The bound of each stage's norm; none if 0.
    pub clip: f64,
    /// Whether the head and the embedding share a table.
    pub tied: bool,
}

impl Case {
    /// By AdamW, in f32, not clipped, not tied.
    pub fn new(scheme: Scheme, stages: usize, micro_batches: usize) -> Case {
        Case::over(scheme, &vec![1; stages], micro_batches)
    }

    /// [`Case::new`] over stages with replicas.
    pub fn over(scheme: Scheme, replicas: &[usize], micro_batches: usize) -> Case {
        let (stages, replicas) = (replicas.len(), replicas.to_vec());
        let (by, dtype) = (By::AdamW, DType::F32);
        Case { scheme, stages, replicas, micro_batches, by, dtype, clip: 0.0, tied: false }
    }

    pub fn config(&self) -> ModelConfig {
        let config = GptConfig::new(37, LENGTH, 4, 2, WIDTH).with_dropout(0.2);
        ModelConfig::Gpt(GptConfig { tied: self.tied, ..config })
    }

    pub fn plan(&self) -> Asynchronous {
        match self.scheme {
            Scheme::Stashing => weight_stashing_over(&self.replicas, self.micro_batches),
            Scheme::VerticalSync => vertical_sync_over(&self.replicas, self.micro_batches),
            Scheme::DoubleBuffered(interval) => {
                double_buffered_over(&self.replicas, interval, self.micro_batches)
            }
        }
        .unwrap()
    }

    pub fn ranks(&self) -> usize {
        self.replicas.iter().sum()
    }

    /// The micro-batches of a mini-batch.
    pub fn interval(&self) -> usize {
        match self.scheme {
            Scheme::Stashing => 1,
            Scheme::VerticalSync => (1..).find(|n| self.replicas.iter().all(|r| n % r == 0)).unwrap(),
            Scheme::DoubleBuffered(interval) => interval,
        }
    }

    /// The micro-batches of an update of a stage.
    fn interval_of(&self, stage: usize) -> usize {
        match self.scheme {
            Scheme::Stashing => self.replicas[stage],
            _ => self.interval(),
        }
    }

    /// PipeDream, section 3.3: a micro-batch is injected after the updates of all that have come back by then. With replicas a
    /// replica of `r` has every `r`-th micro-batch, and its share of the ranks behind it in flight. 2BW, section 3.1:
    /// W(t + 1) = W(t) - lr * gradient(W(t - 1)), with W(0) in the place of W(-1).
    fn version(&self, stage: usize, micro_batch: usize) -> usize {
        let back = |stage: usize| {
            let (own, behind) = (self.replicas[stage], self.replicas[stage + 1..].iter().sum::<usize>());
            (micro_batch / own).saturating_sub(behind.div_ceil(own))
        };
        match self.scheme {
            Scheme::Stashing => back(stage),
            // At every stage the version of the first.
            Scheme::VerticalSync => back(0) * self.replicas[0] / self.interval(),
            Scheme::DoubleBuffered(interval) => (micro_batch / interval).saturating_sub(1),
        }
    }

    pub fn optimizer(&self, parameters: Vec<Parameter>) -> Optimizer<Box<dyn Rule>> {
        let rule: Box<dyn Rule> = match self.by {
            By::Momentum => Box::new(Sgd { momentum: 0.9, ..Sgd::default() }),
            By::AdamW => Box::new(AdamW::default()),
        };
        rule.init(Group::decay_matrices(parameters, 1e-2, 0.1)).unwrap()
    }

    pub fn scope(&self, device: Device) -> Scope {
        Scope::new(3, self.dtype, device)
    }

    /// By how much gradients are scaled down.
    fn clipped(&self, parameters: &[Parameter]) -> Result<f64> {
        let clip = || Ok(Clip::new(grad_norm(parameters)?, self.clip).scale);
        if self.clip > 0.0 { clip() } else { Ok(1.0) }
    }
}

/// One to three rows, unlike from micro-batch to micro-batch.
fn rows(micro_batch: usize) -> Range<usize> {
    let start = micro_batch * 5 % 7;
    start..start + 1 + micro_batch % 3
}

/// A stage's part of a micro-batch's pass.
pub fn pass(model: &Decoder, micro_batch: usize, interval: usize, input: Option<&Var>) -> Result<Var> {
    let rows = rows(micro_batch);
    let step = (micro_batch / interval) as u64;
    let _context = Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 5, step };
        c.batch_offset = rows.start as u64;
    });
    let device = model.device();
    let tokens = |skip: usize| {
        if device.is_meta() {
            return Ok(Var::new(Tensor::empty(&[rows.len(), LENGTH], DType::I64, device)?));
        }
        let places = rows.start * LENGTH..rows.end * LENGTH;
        let tokens: Vec<i64> = places.map(|i| ((i + skip) * 7919 + micro_batch * 31) as i64 % 37).collect();
        Var::from_slice(&tokens, &[rows.len(), LENGTH], device)
    };
    let x = match input {
        Some(input) => model.forward(input)?,
        None => model.forward(&tokens(0)?)?,
    };
    if !model.stage().last {
        return Ok(x);
    }
    Ok(model.loss(&x, &tokens(1)?, 1.0 / (3 * LENGTH * interval) as f64)?)
}

/// A rank's stages.
pub struct Work {
    pub model: Arc<Chunks<Decoder>>,
    pub interval: usize,
    /// The number of the first micro-batch, in all runs.
    pub first: usize,
    /// Whether shapes are known to all ranks, so that a transfer is one call.
    pub known: bool,
}

impl Work {
    pub fn new(case: &Case, rank: usize, device: Device) -> Result<Work> {
        let schedule = case.plan().schedule;
        let model =
            Chunks::build(&case.config(), &Arc::new(OneDevice), &case.scope(device), &schedule, rank)?;
        Ok(Work { model: Arc::new(model), interval: case.interval(), first: 0, known: false })
    }
}

impl Stages for Work {
    fn input_spec(&self, _: usize, micro_batch: usize) -> Option<Spec> {
        let dtype = self.model.parameters()[0].dtype();
        let spec =
            Spec { shape: Dims::from_slice(&[rows(self.first + micro_batch).len(), LENGTH, WIDTH]), dtype };
        self.known.then_some(spec)
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        pass(self.model.of(stage)?, self.first + micro_batch, self.interval, input)
    }
}

/// A rank's parameters and what steps them.
pub struct Descent {
    pub case: Case,
    pub optimizer: Optimizer<Box<dyn Rule>>,
}

impl Descent {
    pub fn new(case: &Case, work: &Work) -> Descent {
        Descent { case: case.clone(), optimizer: case.optimizer(work.model.parameters()) }
    }
}

impl Weights for Descent {
    fn parameters(&self, _: usize) -> Result<Vec<Parameter>> {
        Ok(self.optimizer.parameters())
    }

    fn update(&mut self, _: usize, _: usize) -> Result<()> {
        let scale = self.case.clipped(&self.optimizer.parameters())?;
        Ok(self.optimizer.step_scaled(scale)?)
    }
}

/// The losses of all micro-batches; by parameter its value in the end, and the gradients that no update took.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    pub losses: Vec<Vec<u8>>,
    pub state: BTreeMap<String, (Vec<u8>, Option<Vec<u8>>)>,
}

impl Outcome {
    pub fn add(&mut self, losses: &[Tensor], parameters: &[Parameter]) {
        self.losses.extend(losses.iter().map(|loss| loss.to_bytes().unwrap()));
        for parameter in parameters {
            let left = parameter.grad().unwrap().map(|grad| grad.to_bytes().unwrap());
            self.state.insert(parameter.name().into(), (parameter.tensor().to_bytes().unwrap(), left));
        }
    }
}

/// The names of the parameters of each stage; a tied table's is the first stage's.
fn names(case: &Case) -> Vec<Vec<String>> {
    let schedule = one_f_one_b(case.stages, 1).unwrap();
    let of_stage = |stage| {
        let scope = case.scope(Device::Meta(9));
        let part = Chunks::<Decoder>::build(&case.config(), &Arc::new(OneDevice), &scope, &schedule, stage);
        part.unwrap().parameters().iter().map(|p| p.name().to_string()).collect()
    };
    let mut names: Vec<Vec<String>> = (0..case.stages).map(of_stage).collect();
    let (first, rest) = names.split_at_mut(1);
    rest.iter_mut().for_each(|stage| stage.retain(|name| !first[0].contains(name)));
    names
}

/// The loop over one run of micro-batches.
pub fn simulated(case: &Case) -> Outcome {
    let mut twin = Twin::new(case);
    twin.run(0..case.micro_batches);
    twin.end()
}

/// The state of that loop: it runs the micro-batches one after another, and can be flushed between two runs of them.
pub struct Twin {
    case: Case,
    model: Decoder,
    stages: Vec<Vec<Parameter>>,
    optimizers: Vec<Optimizer<Box<dyn Rule>>>,
    outcome: Outcome,
}

impl Twin {
    pub fn new(case: &Case) -> Twin {
        let model = case.config().init(&case.scope(Device::CPU)).unwrap();
        let parameters = model.parameters();
        let of = |names: &Vec<String>| {
            parameters.iter().filter(|p| names.iter().any(|n| n == p.name())).cloned().collect()
        };
        let stages: Vec<Vec<Parameter>> = names(case).iter().map(of).collect();
        assert_eq!(stages.iter().map(Vec::len).sum::<usize>(), parameters.len(), "each on one stage");
        let optimizers = stages.iter().map(|stage| case.optimizer(stage.clone())).collect();
        Twin { case: case.clone(), model, stages, optimizers, outcome: Outcome::default() }
    }

    /// These micro-batches from full to empty: version 0 is what the parameters hold, and in the end they hold the newest.
    pub fn run(&mut self, micro_batches: Range<usize>) {
        let copies = |stage: &Vec<Parameter>| -> Vec<Tensor> {
            stage.iter().map(|p| p.tensor().copy().unwrap()).collect()
        };
        let load = |stage: &Vec<Parameter>, values: &Vec<Tensor>| {
            stage.iter().zip(values).for_each(|(p, values)| p.load(values).unwrap());
        };
        let (case, stages) = (&self.case, &self.stages);
        // By stage and version.
        let mut versions: Vec<Vec<Vec<Tensor>>> = stages.iter().map(|stage| vec![copies(stage)]).collect();
        for number in 0..micro_batches.len() {
            for (s, stage) in stages.iter().enumerate() {
                load(stage, &versions[s][case.version(s, number)]);
            }
            let loss = pass(&self.model, micro_batches.start + number, case.interval(), None).unwrap();
            loss.backward().unwrap();
            self.outcome.add(&[loss.into_tensor()], &[]);
            let updated = |&(s, _): &(usize, _)| (number + 1) % case.interval_of(s) == 0;
            for (s, stage) in stages.iter().enumerate().filter(updated) {
                load(stage, versions[s].last().unwrap());
                self.optimizers[s].step_scaled(case.clipped(stage).unwrap()).unwrap();
                self.optimizers[s].zero_grad().unwrap();
                versions[s].push(copies(stage));
            }
        }
        stages.iter().zip(&versions).for_each(|(stage, versions)| load(stage, versions.last().unwrap()));
    }

    /// The same with replicas, which take micro-batches in turn; each adds its own of an update, then the replicas are added.
    pub fn run_replicas(&mut self, replicas: usize) {
        let (case, interval, parameters) = (&self.case, self.case.interval(), self.model.parameters());
        let values = || -> Vec<Tensor> { parameters.iter().map(|p| p.tensor().copy().unwrap()).collect() };
        let load = |values: &Vec<Tensor>| {
            parameters.iter().zip(values).for_each(|(p, values)| p.load(values).unwrap());
        };
        // Of the whole model: here every stage makes its versions at once.
        let mut versions = vec![values()];
        for update in 0..case.micro_batches / interval {
            add_chains(&parameters, replicas, |replica| {
                for micro_batch in update * interval..(update + 1) * interval {
                    for (s, stage) in self.stages.iter().enumerate() {
                        let version = &versions[case.version(s, micro_batch)];
                        let of_stage = parameters.iter().zip(version);
                        let of_stage = of_stage.filter(|(p, _)| stage.iter().any(|own| own.is(p)));
                        of_stage.for_each(|(p, values)| p.load(values).unwrap());
                    }
                    let number = micro_batch * replicas + replica;
                    pass(&self.model, number, interval, None).unwrap().backward().unwrap();
                }
            });
            load(versions.last().unwrap());
            self.optimizers.iter_mut().for_each(|optimizer| optimizer.step().unwrap());
            self.optimizers.iter().for_each(|optimizer| optimizer.zero_grad().unwrap());
            versions.push(values());
        }
    }

    pub fn end(mut self) -> Outcome {
        self.outcome.add(&[], &self.model.parameters());
        self.outcome
    }
}
