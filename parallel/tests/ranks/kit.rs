//! A GPT cut into stages, trained over ranks by a schedule and on one device.
#![allow(dead_code)]

use phalanx_nn::autograd::ContextMode;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{AdamW, Group, LayerFactory, OneDevice, Optimizer, Parameter, Parameters, Rule, Scope, cut};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::launch::Rank;
use phalanx_parallel::pipeline::ranks::{Chunks, Pipeline, Spec, Stages, TiedTable};
use phalanx_parallel::pipeline::schedule::{Schedule, gpipe};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device, Dims, RngKey, Tensor};

use crate::gpt::{LENGTH, ROWS};

pub const WIDTH: usize = 16;

pub fn config(layers: usize) -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(37, LENGTH, layers, 2, WIDTH).with_dropout(0.2))
}

/// Without dropout, tied tables or learned positions.
pub fn llama(layers: usize) -> ModelConfig {
    ModelConfig::Llama(LlamaConfig::new(37, LENGTH, layers, 2, WIDTH))
}

pub fn scope(device: Device) -> Scope {
    Scope::new(3, DType::F32, device)
}

/// The stages of a rank, and a step's micro-batches.
pub struct Work<L: LayerFactory = OneDevice> {
    layers: Arc<L>,
    pub model: Chunks<Decoder<L>>,
    /// The rows of the micro-batches.
    pub rows: Vec<Range<usize>>,
    pub step: u64,
}

impl Work {
    /// That of a rank of a pipeline without tensor parallelism.
    pub fn new(config: &ModelConfig, schedule: &Schedule, rank: usize, device: Device) -> Result<Work> {
        Work::of(&Arc::new(OneDevice), config, schedule, rank, device)
    }
}

impl<L: LayerFactory> Work<L> {
    /// A rank's.
    pub fn of(
        layers: &Arc<L>,
        config: &ModelConfig,
        schedule: &Schedule,
        rank: usize,
        device: Device,
    ) -> Result<Work<L>> {
        let model = Chunks::build(config, layers, &scope(device), schedule, rank)?;
        Ok(Work { layers: layers.clone(), model, rows: cut(ROWS, schedule.micro_batches), step: 0 })
    }
}

impl<L: LayerFactory> Stages for Work<L> {
    /// Only every second step, so that headers are sent in the others.
    fn input_spec(&self, _: usize, micro_batch: usize) -> Option<Spec> {
        let (rows, length) = (self.rows[micro_batch].len(), self.layers.stream(LENGTH).unwrap().len());
        let spec = Spec { shape: Dims::from_slice(&[rows, length, WIDTH]), dtype: DType::F32 };
        (self.step % 2 == 1).then_some(spec)
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let model = self.model.of(stage)?;
        let rows = self.rows[micro_batch].clone();
        let _context = Context::with(|c| {
            c.set_train(true);
            c.rng = RngKey { seed: 5, step: self.step };
            c.batch_offset = rows.start as u64;
        });
        let tokens = |skip: usize| {
            let device = model.device();
            if device.is_meta() {
                return Ok(Var::new(Tensor::empty(&[rows.len(), LENGTH], DType::I64, device)?));
            }
            let places = rows.start * LENGTH..rows.end * LENGTH;
            let tokens: Vec<i64> =
                places.map(|i| ((i + skip) * 7919 + self.step as usize * 31) as i64 % 37).collect();
            Var::from_slice(&tokens, &[rows.len(), LENGTH], device)
        };
        let x = match input {
            Some(input) => model.forward(input)?,
            None => model.forward(&tokens(0)?)?,
        };
        if !model.stage().last {
            return Ok(x);
        }
        Ok(model.loss(&x, &tokens(1)?, 1.0 / (ROWS * LENGTH) as f64)?)
    }
}

/// Losses of all micro-batches, and by parameter its gradients of each step and its value at the end; as bytes.
#[derive(Debug, Default, PartialEq)]
pub struct Trained {
    pub losses: Vec<Vec<u8>>,
    pub state: BTreeMap<String, Vec<Vec<u8>>>,
}

impl Trained {
    pub fn step(&mut self, losses: Vec<Tensor>, optimizer: &mut Optimizer<AdamW>, all: &[Parameter]) {
        self.losses.extend(losses.iter().map(|loss| loss.to_bytes().unwrap()));
        for parameter in all {
            let grad = parameter.grad().unwrap().unwrap().to_bytes().unwrap();
            self.state.entry(parameter.name().into()).or_default().push(grad);
        }
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }

    pub fn end(mut self, all: &[Parameter]) -> Trained {
        for parameter in all {
            let value = parameter.tensor().to_bytes().unwrap();
            self.state.entry(parameter.name().into()).or_default().push(value);
        }
        self
    }
}

pub const STEPS: u64 = 2;

pub fn optimizer(parameters: &[Parameter]) -> Optimizer<AdamW> {
    AdamW::default().init(Group::decay_matrices(parameters.to_vec(), 1e-2, 0.1)).unwrap()
}

/// One device that runs the micro-batches one after the other.
pub fn alone(config: &ModelConfig, micro_batches: usize) -> Trained {
    let mut work = Work::new(config, &gpipe(1, micro_batches).unwrap(), 0, Device::CPU).unwrap();
    let parameters = work.model.parameters();
    let (mut optimizer, mut trained) = (optimizer(&parameters), Trained::default());
    for step in 0..STEPS {
        work.step = step;
        let run = |i: usize| {
            let loss = work.forward(0, i, None).unwrap();
            loss.backward().unwrap();
            loss.into_tensor()
        };
        trained.step((0..micro_batches).map(run).collect(), &mut optimizer, &parameters);
    }
    trained.end(&parameters)
}

/// The ranks of a schedule.
pub fn together(config: &ModelConfig, schedule: &Schedule, mode: RecomputeMode) -> Result<Vec<Trained>> {
    Ok(launch::threads(schedule.ranks.len(), |rank| train(config, schedule, mode, &rank))?)
}

pub fn train(config: &ModelConfig, schedule: &Schedule, mode: RecomputeMode, rank: &Rank) -> Result<Trained> {
    train_on(&Arc::new(OneDevice), rank.comm(), config, schedule, mode, rank.device())
}

/// Trains one rank of a pipeline, with or without tensor parallelism.
pub fn train_on<L: LayerFactory>(
    layers: &Arc<L>,
    line: &Comm,
    config: &ModelConfig,
    schedule: &Schedule,
    mode: RecomputeMode,
    device: Device,
) -> Result<Trained> {
    let pipeline = Pipeline::new(schedule, line.clone(), device)?.recompute(mode);
    let mut work = Work::of(layers, config, schedule, line.rank(), device)?;
    let tied = TiedTable::new(&work.model, schedule, line)?;
    let parameters = work.model.parameters();
    let (mut optimizer, mut trained) = (optimizer(&parameters), Trained::default());
    for step in 0..STEPS {
        work.step = step;
        let shared = Arc::new(work);
        let losses = pipeline.train(&shared)?;
        work = Arc::into_inner(shared).expect("the work has other owners");
        tied.iter().try_for_each(TiedTable::exchange)?;
        trained.step(losses, &mut optimizer, &parameters);
    }
    Ok(trained.end(&parameters))
}

/// Panics unless the ranks together have what the one device has.
pub fn assert_equal(ranks: Vec<Trained>, alone: &Trained, what: &str) {
    let losses: Vec<_> = ranks.iter().flat_map(|rank| rank.losses.clone()).collect();
    assert_eq!(losses, alone.losses, "losses: {what}");
    let mut missing: Vec<&String> = alone.state.keys().collect();
    for (name, got) in ranks.iter().flat_map(|rank| &rank.state) {
        assert!(*got == alone.state[name], "{name}: {what}");
        missing.retain(|other| *other != name);
    }
    assert!(missing.is_empty(), "{missing:?}: {what}");
}
