//! Stages with unlike numbers of replicas against one device.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    Group, Linear, LinearConfig, Module, Optimizer, Parameter, Parameters, Rule, Scope, Sgd, WrappedUnit,
};
use phalanx_parallel::data_parallel::{Ddp, DdpConfig};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::pipeline::ranks::{Pipeline, StageArgs, StageFn};
use phalanx_parallel::pipeline::schedule::{Schedule, replicated};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

const WIDTH: usize = 5;

/// A stage of one to three linear maps, of which the last is used by every third micro-batch only.
struct Stage(Vec<Linear>);

impl Parameters for Stage {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, phalanx_nn::Entry<'_>)) {
        self.0.visit(path, visitor);
    }
}

impl Stage {
    fn new(stage: usize, device: Device) -> Stage {
        let scope = Scope::new(7, DType::F32, device).child(stage);
        let linear = |i: usize| LinearConfig::new(WIDTH, WIDTH).init(&scope.child(i)).unwrap();
        let layers: Vec<Linear> = (0..1 + stage).map(linear).collect();
        // One parameter is frozen.
        layers[0].bias.as_ref().unwrap().freeze();
        Stage(layers)
    }

    fn run(&self, x: &Var, micro_batch: usize) -> Result<Var> {
        let used = self.0.len() - usize::from(self.0.len() > 1 && micro_batch % 3 != 1);
        let layers = self.0[..used].iter();
        layers.into_iter().try_fold(x.clone(), |x, layer| Ok(layer.forward(&x)?.tanh()?))
    }
}

fn sample(step: u64, i: usize, device: Device) -> Result<Var> {
    let rows = 1 + i % 3;
    let values: Vec<f32> =
        (0..rows * WIDTH).map(|j| ((i * 11 + j * 7 + step as usize * 5) % 13) as f32 / 6.0 - 1.0).collect();
    Ok(Var::from_slice(&values, &[rows, WIDTH], device)?)
}

fn optimizer(model: &impl Parameters) -> Optimizer<Sgd> {
    Sgd { momentum: 0.9, ..Sgd::default() }.init(vec![Group::new(model.parameters(), 0.05)]).unwrap()
}

type Bytes = Vec<u8>;

/// Losses in order, and by parameter its gradients of each step and its values.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    losses: Vec<Bytes>,
    state: BTreeMap<String, Vec<Option<Bytes>>>,
}

impl Outcome {
    fn note(&mut self, parameters: &[Parameter]) {
        for parameter in parameters {
            let grad = parameter.grad().unwrap().map(|grad| grad.to_bytes().unwrap());
            let values = parameter.tensor().to_bytes().unwrap();
            self.state.entry(parameter.name().into()).or_default().extend([grad, Some(values)]);
        }
    }
}

/// Passes of each step, whose gradients are all added.
const PASSES: u64 = 2;
const STEPS: u64 = 2;

fn alone(stages: usize, micro_batches: usize) -> Outcome {
    let model: Vec<Stage> = (0..stages).map(|stage| Stage::new(stage, Device::CPU)).collect();
    let mut optimizer = optimizer(&model);
    let mut outcome = Outcome::default();
    for step in 0..STEPS {
        for pass in 0..PASSES {
            for i in 0..micro_batches {
                let x = sample(step * PASSES + pass, i, Device::CPU).unwrap();
                let y = model.iter().fold(x, |x, stage| stage.run(&x, i).unwrap());
                let loss = y.square().unwrap().sum_all().unwrap();
                loss.backward().unwrap();
                outcome.losses.push(loss.tensor().to_bytes().unwrap());
            }
        }
        outcome.note(&model.parameters());
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    outcome.note(&model.parameters());
    outcome
}

fn work(stage: Arc<Stage>, last: usize, device: Device) -> StageFn<u64> {
    let parameters = stage.parameters();
    StageFn::new(move |args: StageArgs<'_, u64>, input: Option<&Var>| {
        let x = input.map_or_else(|| sample(*args.batch, args.micro_batch, device), |x| Ok(x.clone()))?;
        let y = stage.run(&x, args.micro_batch)?;
        Ok(if args.stage == last { y.square()?.sum_all()? } else { y })
    })
    .with_parameters(parameters)
}

fn train(rank: &Rank, schedule: &Schedule, mode: RecomputeMode) -> Result<Outcome> {
    let pipeline = Pipeline::new(schedule, rank.comm().clone(), rank.device())?.recompute(mode);
    let stage = Arc::new(Stage::new(pipeline.stages()[0], rank.device()));
    let work = work(stage.clone(), schedule.stages() - 1, rank.device());
    let mut optimizer = optimizer(&*stage);
    let mut outcome = Outcome::default();
    for step in 0..STEPS {
        for pass in 0..PASSES {
            let losses = pipeline.train(&work.on(step * PASSES + pass, step))?;
            outcome.losses.extend(losses.iter().map(|loss| loss.to_bytes().unwrap()));
        }
        outcome.note(&stage.parameters());
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    outcome.note(&stage.parameters());
    let evaluated = pipeline.evaluate(&work.on(0, 0))?;
    assert_eq!(evaluated.is_empty(), outcome.losses.is_empty());
    Ok(outcome)
}

#[test]
fn replicas_of_any_number_have_the_bits_of_one_device() {
    let cases: [(&[usize], usize); 7] = [
        (&[2, 1, 3], 6),
        (&[2, 1, 3], 7),
        (&[1, 3, 1], 5),
        (&[3, 2], 3),
        (&[1, 4], 9),
        (&[2], 5),
        (&[1, 1], 3),
    ];
    for (replicas, micro_batches) in cases {
        let wanted = alone(replicas.len(), micro_batches);
        let schedule = replicated(replicas, micro_batches).unwrap();
        for mode in [RecomputeMode::Never, RecomputeMode::ExceptLast] {
            let ranks = schedule.ranks.len();
            let got = launch::threads(ranks, |rank| train(&rank, &schedule, mode)).unwrap();
            let what = format!("{replicas:?}, {micro_batches} micro-batches, {mode:?}");
            for (rank, outcome) in got.iter().enumerate() {
                // The losses are on the last rank.
                assert_eq!(outcome.losses.is_empty(), rank + 1 < ranks, "rank {rank}: {what}");
                for (name, state) in &outcome.state {
                    assert_eq!(*state, wanted.state[name], "{name} on rank {rank}: {what}");
                }
            }
            assert_eq!(got[ranks - 1].losses, wanted.losses, "{what}");
            let names: std::collections::BTreeSet<_> =
                got.iter().flat_map(|rank| rank.state.keys()).collect();
            assert!(names.into_iter().eq(wanted.state.keys()), "{what}");
        }
    }
}

#[test]
fn replicas_without_parameters_or_within_other_data_parallelism_are_refused() {
    let schedule = replicated(&[2, 1], 2).unwrap();
    let run = |rank: Rank, wraps: bool| -> Result<()> {
        let pipeline = Pipeline::new(&schedule, rank.comm().clone(), rank.device())?;
        let stage = Arc::new(Stage::new(pipeline.stages()[0], rank.device()));
        let (own, device) = (stage.clone(), rank.device());
        if wraps {
            let alone = rank.comm().group(&[rank.rank()])?;
            let ddp = Ddp::new(&*stage, alone, DdpConfig::default())?;
            ddp.begin()?;
            return pipeline.train(&work(stage, 1, device).on(0, 0)).map(drop);
        }
        let work = StageFn::new(move |args: StageArgs<'_, u64>, input: Option<&Var>| {
            let x = input.map_or_else(|| sample(0, args.micro_batch, device), |x| Ok(x.clone()))?;
            Ok(own.run(&x, args.micro_batch)?.sum_all()?)
        });
        pipeline.train(&work.on(0, 0)).map(drop)
    };
    let error = launch::threads(3, |rank| run(rank, false)).unwrap_err().to_string();
    assert!(error.contains("stage 0 has replicas: got a `StageFn` without `with_parameters`"), "{error}");
    let error = launch::threads(3, |rank| run(rank, true)).unwrap_err().to_string();
    assert!(error.contains("of a stage with replicas whose gradients are in buckets"), "{error}");
}

/// ZeRO makes the buckets of a unit when backward comes to it, after the pipeline has looked for buckets.
#[test]
fn replicas_of_a_stage_that_is_a_unit_of_zero_are_refused() {
    let schedule = replicated(&[2, 1], 2).unwrap();
    let run = |rank: Rank| -> Result<()> {
        let (pipeline, device) =
            (Pipeline::new(&schedule, rank.comm().clone(), rank.device())?, rank.device());
        let unit = Arc::new(WrappedUnit::of(Stage::new(pipeline.stages()[0], device)));
        let alone = rank.comm().group(&[rank.rank()])?;
        let zero = Arc::new(Zero::new(&*unit, alone, ZeroConfig::new(ZeroStage::Optimizer))?);
        let own = unit.clone();
        let work = StageFn::new(move |args: StageArgs<'_, u64>, input: Option<&Var>| {
            let i = args.micro_batch;
            let x = input.map_or_else(|| sample(*args.batch, i, device), |x| Ok(x.clone()))?;
            let y = own.call(&x, false, move |stage, x| Ok(stage.run(x, i).unwrap()))?;
            Ok(if args.stage == 1 { y.square()?.sum_all()? } else { y })
        });
        zero.begin()?;
        let work = work.with_parameters(unit.parameters()).with_data_parallel(zero);
        pipeline.train(&work.on(0, 0)).map(drop)
    };
    let error = launch::threads(3, run).unwrap_err().to_string();
    assert!(error.contains("of a stage with replicas whose gradients are in buckets"), "{error}");
}
