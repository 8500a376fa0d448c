//! A GPT cut into stages, trained over ranks by a schedule and on one device.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, GptConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{AdamW, Group, OneDevice, Optimizer, Parameter, Parameters, Rule, Scope, cut};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::pipeline::ranks::{Pipeline, Spec, Stages, TiedTable, place};
use phalanx_parallel::pipeline::schedule::{Action, Kind, Schedule};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, DType, Device, Dims, RngKey, Tensor};

use crate::gpt::{LENGTH, ROWS};

pub const WIDTH: usize = 16;

pub fn config(layers: usize) -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(37, LENGTH, layers, 2, WIDTH).with_dropout(0.2))
}

pub fn scope(device: Device) -> Scope {
    Scope::new(3, DType::F32, device)
}

/// The stages of a rank, and a step's micro-batches.
pub struct Work {
    pub models: Vec<(usize, Decoder)>,
    pub micro_batches: usize,
    pub step: u64,
}

impl Work {
    /// Those of `here` of a model of `layers` blocks over `stages` stages.
    pub fn new(layers: usize, stages: usize, here: &[usize], device: Device) -> Result<Work> {
        let placed = place(layers, stages)?;
        let build = |&stage: &usize| {
            let model =
                config(layers).init_stage(&Arc::new(OneDevice), &scope(device), placed[stage].clone())?;
            Ok((stage, model))
        };
        let models = here.iter().map(build).collect::<Result<_>>()?;
        Ok(Work { models, micro_batches: 1, step: 0 })
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        self.models.iter().flat_map(|(_, model)| model.parameters()).collect()
    }

    /// The tied table's part here.
    pub fn tied(&self, pipeline: &Schedule, rank: &Rank) -> Result<Option<TiedTable>> {
        let ends = [pipeline.placement[0], pipeline.placement[pipeline.placement.len() - 1]];
        let member = ends.contains(&rank.rank()) && ends[0] != ends[1];
        let group = member.then(|| rank.comm().group(&ends)).transpose()?;
        let find = |last: bool| {
            let model = self.models.iter().map(|(_, model)| model);
            model.into_iter().find(|m| if last { m.stage().last } else { m.stage().first })
        };
        let [first, last] = [false, true].map(|last| find(last).map(|model| model as &dyn Parameters));
        TiedTable::new(first, last, group.as_ref())
    }
}

impl Stages for Work {
    /// Only every second step, so that headers are sent in the others.
    fn input_spec(&self, _: usize, micro_batch: usize) -> Option<Spec> {
        let rows = cut(ROWS, self.micro_batches)[micro_batch].len();
        let spec = Spec { shape: Dims::from_slice(&[rows, LENGTH, WIDTH]), dtype: DType::F32 };
        (self.step % 2 == 1).then_some(spec)
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let (_, model) = self.models.iter().find(|(number, _)| *number == stage).unwrap();
        let rows = cut(ROWS, self.micro_batches).swap_remove(micro_batch);
        let _context = Context::with(|c| {
            c.train = true;
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
pub fn alone(layers: usize, micro_batches: usize) -> Trained {
    let mut work = Work::new(layers, 1, &[0], Device::CPU).unwrap();
    work.micro_batches = micro_batches;
    let parameters = work.parameters();
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
pub fn together(layers: usize, schedule: &Schedule, mode: RecomputeMode) -> Result<Vec<Trained>> {
    Ok(launch::threads(schedule.ranks.len(), |rank| train(layers, schedule, mode, &rank))?)
}

fn train(layers: usize, schedule: &Schedule, mode: RecomputeMode, rank: &Rank) -> Result<Trained> {
    let pipeline = Pipeline::new(schedule.clone(), rank.comm().clone(), rank.device())?.recompute(mode);
    let mut work = Work::new(layers, schedule.placement.len(), &pipeline.stages(), rank.device())?;
    work.micro_batches = schedule.micro_batches;
    let tied = work.tied(schedule, rank)?;
    let parameters = work.parameters();
    let (mut optimizer, mut trained) = (optimizer(&parameters), Trained::default());
    for step in 0..STEPS {
        work.step = step;
        let shared = Arc::new(work);
        let losses = pipeline.train(&shared)?;
        work = Arc::into_inner(shared).expect("nobody keeps the work");
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
        // A table that is tied over ranks has two copies, on one rank one after the other.
        let wanted = &alone.state[name];
        let copies = got.len() / wanted.len();
        for (i, wanted) in wanted.iter().enumerate() {
            (0..copies).for_each(|copy| assert!(got[i * copies + copy] == *wanted, "{name}: {what}"));
        }
        missing.retain(|other| *other != name);
    }
    assert!(missing.is_empty(), "{missing:?}: {what}");
}

/// A list of a rank's actions being written.
pub struct List(pub Vec<Action>);

impl List {
    fn push(&mut self, kind: Kind, stage: usize, micro_batch: usize) {
        self.0.push(Action { stage, kind, micro_batch });
    }

    fn forward(&mut self, stage: usize, stages: usize, micro_batch: usize) {
        if stage > 0 {
            self.push(Kind::RecvForward, stage, micro_batch);
        }
        self.push(Kind::Forward, stage, micro_batch);
        if stage + 1 < stages {
            self.push(Kind::SendForward, stage, micro_batch);
        }
    }

    fn backward(&mut self, kind: Kind, stage: usize, stages: usize, micro_batch: usize) {
        if stage + 1 < stages {
            self.push(Kind::RecvBackward, stage, micro_batch);
        }
        self.push(kind, stage, micro_batch);
        if stage > 0 {
            self.push(Kind::SendBackward, stage, micro_batch);
        }
    }
}

/// All forward passes, then all backward passes.
pub fn gpipe(ranks: usize, micro_batches: usize) -> Schedule {
    let list = |rank| {
        let mut list = List(vec![]);
        (0..micro_batches).for_each(|i| list.forward(rank, ranks, i));
        (0..micro_batches).for_each(|i| list.backward(Kind::Backward, rank, ranks, i));
        list.0
    };
    Schedule { placement: (0..ranks).collect(), micro_batches, ranks: (0..ranks).map(list).collect() }
}

/// One forward, one backward after a warm-up; with `split`, weights' parts at the end.
pub fn one_f_one_b(ranks: usize, micro_batches: usize, split: bool) -> Schedule {
    let kind = if split { Kind::Input } else { Kind::Backward };
    let list = |rank| {
        let mut list = List(vec![]);
        let warm_up = micro_batches.min(ranks - rank);
        (0..warm_up).for_each(|i| list.forward(rank, ranks, i));
        for i in 0..micro_batches {
            list.backward(kind, rank, ranks, i);
            if i + warm_up < micro_batches {
                list.forward(rank, ranks, i + warm_up);
            }
        }
        if split {
            (0..micro_batches).for_each(|i| list.push(Kind::Weight, rank, i));
        }
        list.0
    };
    Schedule { placement: (0..ranks).collect(), micro_batches, ranks: (0..ranks).map(list).collect() }
}
