//! Normalisation over replicas inside of a pipeline: under split backward passes, ZeRO and recomputation.

use phalanx_nn::autograd::ContextMode;
use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode::{self, Always, Never};
use phalanx_nn::{
    AnyUnit, BatchNormConfig, Entry, Group, LinearConfig, Module, Optimizer, Parameters, Rule, Scope,
    Sequential, Sgd, Tanh, WrappedUnit, join_path,
};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, NoSync, SyncBatchNorm};
use phalanx_parallel::hybrid::MeshParallel;
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::ranks::{Chunks, Pipeline, Stages};
use phalanx_parallel::pipeline::schedule::{Schedule, by_name};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Error, Result, launch};
use phalanx_tensor::{Context, DType, Device, Tensor};

const ROWS: usize = 3;
const WIDTH: usize = 5;
const MICRO_BATCHES: usize = 3;
const STEPS: usize = 2;

/// A stage's layers, whose names begin with its number.
struct Numbered(usize, Sequential);

impl Parameters for Numbered {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.1.visit(&join_path(path, &self.0.to_string()), visitor);
    }
    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.1.visit_units(visitor);
    }
}

/// Two units, the first of which normalises before its end, over `replicas` if there are any.
fn stage(stage: usize, replicas: Option<&Comm>, device: Device) -> Result<Numbered> {
    let scope = Scope::new(9, DType::F64, device).child(stage);
    let unit = |number: usize| -> Result<WrappedUnit<Sequential>> {
        let scope = scope.child(number);
        let linear = LinearConfig::new(WIDTH, WIDTH).init(&scope.child("linear"))?;
        let norm = BatchNormConfig::new(WIDTH).init_1d(&scope.child("norm"))?;
        let layers = Sequential::new().with(linear);
        let layers = match replicas {
            Some(comm) => layers.with(SyncBatchNorm::of(&norm, comm)?),
            None => layers.with(norm),
        };
        Ok(WrappedUnit::new(Arc::new(if number == 0 { layers.with(Tanh {}) } else { layers })))
    };
    Ok(Numbered(stage, Sequential::new().with(unit(0)?).with(unit(1)?)))
}

/// Rows of a replica's micro-batch.
fn rows(step: usize, micro_batch: usize, replica: usize) -> Vec<f64> {
    let seed = (step * MICRO_BATCHES + micro_batch) * 2 + replica;
    (0..ROWS * WIDTH).map(|i| ((i * 37 + seed * 101) % 29) as f64 / 11.0 - 1.0).collect()
}

fn loss(y: &Var) -> Result<Var> {
    Ok(y.mul(&y.tanh()?)?.sum_all()?)
}

struct Work {
    model: Chunks<Numbered>,
    share: MeshParallel,
    replica: usize,
    stages: usize,
    step: Mutex<usize>,
}

impl Stages for Work {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let (layers, step) = (self.model.of(stage)?, *self.step.lock().unwrap());
        let device = self.model.parameters()[0].device();
        let x = Var::from_slice(&rows(step, micro_batch, self.replica), &[ROWS, WIDTH], device)?;
        let y = layers.1.forward(input.unwrap_or(&x))?;
        if stage + 1 == self.stages { loss(&y) } else { Ok(y) }
    }

    fn no_sync(&self) -> Option<NoSync> {
        Some(self.share.no_sync())
    }
}

/// What the ranks share.
fn share(model: &Chunks<Numbered>, groups: &Groups, schedule: &Schedule, zero: u8) -> Result<MeshParallel> {
    let replicas = groups.along(Axis::Dp).clone();
    let replicas: Box<dyn DataParallel> = match ZeroStage::try_from(zero) {
        Ok(stage) => Box::new(Zero::new(model, replicas, ZeroConfig::new(stage))?),
        Err(_) => Box::new(Ddp::new(model, replicas, DdpConfig::default())?),
    };
    MeshParallel::new(model, replicas, groups.clone(), schedule)
}

/// A rank's stages.
fn chunks(schedule: &Schedule, groups: &Groups, device: Device) -> Result<Chunks<Numbered>> {
    let (line, replicas) = (groups.along(Axis::Pp), groups.along(Axis::Dp));
    let chunk = |number| Ok((number, stage(number, Some(replicas), device)?));
    Ok(Chunks::new(schedule.stages_of(line.rank()).map(chunk).collect::<Result<_>>()?))
}

type State = Vec<(String, Vec<u8>)>;

fn train(name: &str, zero: u8, mode: RecomputeMode, rank: &Rank) -> Result<State> {
    let groups = Groups::new(Mesh::new(1, 2, 2)?, rank.comm())?;
    let (line, replicas) = (groups.along(Axis::Pp), groups.along(Axis::Dp));
    let schedule = by_name(name, 2, 2, MICRO_BATCHES)?;
    let model = chunks(&schedule, &groups, rank.device())?;
    let share = share(&model, &groups, &schedule, zero)?;
    let pipeline = Pipeline::new(&schedule, line.clone(), rank.device())?.recompute(mode);
    let mut optimizer = Sgd::default().init(vec![Group::new(share.parameters(), 0.01)])?;
    let _train = Context::with(|c| c.set_train(true));
    let stages = schedule.stages();
    let work = Arc::new(Work { model, share, replica: replicas.rank(), stages, step: Mutex::new(0) });
    for step in 0..STEPS {
        *work.step.lock().unwrap() = step;
        work.share.begin()?;
        pipeline.train(&work)?;
        work.share.finish()?;
        optimizer.step()?;
        work.share.updated()?;
        work.share.zero_grad()?;
    }
    whole(&work.share, &work.model)
}

fn whole(share: &MeshParallel, model: &Chunks<Numbered>) -> Result<State> {
    let entries = share.full_state_dict(model)?;
    entries.iter().map(|(name, t)| Ok((name.clone(), t.to_bytes()?))).collect::<Result<_, Error>>()
}

/// The whole state of the first replica.
fn run(name: &str, zero: u8, mode: RecomputeMode) -> State {
    let ranks = launch::threads(4, |rank| train(name, zero, mode, &rank));
    ranks.unwrap_or_else(|e| panic!("{name}, zero {zero}, {mode:?}: {e}")).swap_remove(0)
}

/// One device with the rows of both replicas: its state after some steps.
fn alone(steps: usize, stages: usize) -> Vec<(String, Tensor)> {
    let parts: Vec<Numbered> = (0..stages).map(|s| stage(s, None, Device::CPU).unwrap()).collect();
    let parameters = parts.iter().flat_map(Parameters::parameters).collect();
    let mut optimizer: Optimizer<Sgd> = Sgd::default().init(vec![Group::new(parameters, 0.01)]).unwrap();
    let _train = Context::with(|c| c.set_train(true));
    for step in 0..steps {
        for micro_batch in 0..MICRO_BATCHES {
            let both = [rows(step, micro_batch, 0), rows(step, micro_batch, 1)].concat();
            let x = Var::from_slice(&both, &[2 * ROWS, WIDTH], Device::CPU).unwrap();
            let y = parts.iter().fold(x, |x, part| part.1.forward(&x).unwrap());
            loss(&y).unwrap().backward().unwrap();
        }
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    parts.iter().flat_map(ShardedTensor::all_of).map(|part| (part.name, part.values)).collect()
}

#[test]
fn statistics_of_all_replicas_are_the_same_under_every_schedule_and_stage_of_zero() {
    for (schedules, stages) in [(&["1f1b", "zb-h1"][..], 2), (&["interleaved", "zb-v"], 4)] {
        let first = run(schedules[0], 0, Never);
        let whole = alone(STEPS, stages);
        let wide: Vec<_> = whole.iter().filter(|(_, t)| t.dtype() == DType::F64).collect();
        assert!(wide.iter().any(|(name, _)| name.ends_with("running_var")), "{wide:?}");
        for (name, values) in wide {
            let (_, bytes) = first.iter().find(|(other, _)| other == name).unwrap();
            assert_eq!(bytes.len(), 8 * values.numel(), "{name}");
            let got = bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap()));
            for (got, wanted) in got.zip(values.to_vec::<f64>().unwrap()) {
                assert!(
                    (got - wanted).abs() < 1e-10 * wanted.abs().max(1.0),
                    "{name}: {got}, wanted {wanted}"
                );
            }
        }
        for (name, zero) in schedules.iter().flat_map(|name| [0, 1, 2, 3].map(|zero| (*name, zero))) {
            for mode in [Never, Always] {
                assert!(run(name, zero, mode) == first, "{name}, zero {zero}, {mode:?}");
            }
        }
    }
}

#[test]
fn the_whole_state_of_a_mesh_has_buffers_and_any_mesh_takes_it() {
    let trained = run("1f1b", 0, Never);
    let running = |state: &State| state.iter().filter(|(name, _)| name.contains("running_")).count();
    // Two in each of four norms, and two parameters in each norm and map; and a count of batches.
    assert_eq!((running(&trained), trained.len()), (8, 8 + 16 + 4));
    let given: Vec<(String, Tensor)> = trained
        .iter()
        .map(|(name, bytes)| {
            let like = alone(0, 2).into_iter().find(|(other, _)| other == name).unwrap().1;
            (name.clone(), Tensor::from_bytes(bytes, like.shape(), like.dtype(), Device::CPU).unwrap())
        })
        .collect();
    for (name, zero) in [("1f1b", 0), ("zb-h1", 2), ("gpipe", 3)] {
        let ranks = launch::threads(4, |rank| -> Result<State> {
            let groups = Groups::new(Mesh::new(1, 2, 2)?, rank.comm())?;
            let schedule = by_name(name, 2, 2, MICRO_BATCHES)?;
            let model = chunks(&schedule, &groups, rank.device())?;
            let share = share(&model, &groups, &schedule, zero)?;
            share.load_full_state_dict(&model, given.clone())?;
            whole(&share, &model)
        });
        assert!(ranks.unwrap()[0] == trained, "{name}, zero {zero}");
    }
}
