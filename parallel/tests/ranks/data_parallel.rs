//! Pipelines side by side, each with a share of the batch, over `Ddp` and every stage of ZeRO.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, RecomputeMode};
use phalanx_nn::{OneDevice, Parameters};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, NoSync};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::ranks::{Chunks, Pipeline, Stages, TiedTable};
use phalanx_parallel::pipeline::schedule::{NAMES, by_name, gpipe};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::Device;

use crate::gpt::{add_chains, bytes, rows};
use crate::kit::{STEPS, Work, config, optimizer, scope};

/// A replica's part of the work.
struct Replica {
    work: Mutex<Work>,
    share: Box<dyn DataParallel>,
}

impl Stages for Replica {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        self.work.lock().unwrap().forward(stage, micro_batch, input)
    }

    fn no_sync(&self) -> Option<NoSync> {
        Some(self.share.no_sync())
    }
}

type State = Vec<(String, Vec<u8>)>;

/// One device in the place of all: a chain of micro-batches a replica.
fn alone(layers: usize, replicas: usize, micro_batches: usize) -> State {
    let mut work = Work::new(&config(layers), &gpipe(1, micro_batches).unwrap(), 0, Device::CPU).unwrap();
    let parameters = work.model.parameters();
    let mut optimizer = optimizer(&parameters);
    for step in 0..STEPS {
        work.step = step;
        add_chains(&parameters, replicas, |replica| {
            work.rows = rows(replicas, replica, micro_batches);
            (0..micro_batches).for_each(|i| work.forward(0, i, None).unwrap().backward().unwrap());
        });
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    bytes(&phalanx_nn::state_dict(&work.model))
}

fn train(
    layers: usize,
    mesh: Mesh,
    name: &str,
    zero: u8,
    micro_batches: usize,
    rank: &Rank,
) -> Result<State> {
    let groups = Groups::new(mesh, rank.comm())?;
    let (line, replicas) = (groups.along(Axis::Pp), groups.along(Axis::Dp));
    let schedule = by_name(name, line.size(), 2, micro_batches)?;
    // Whole stages are recomputed here, and units gathered again.
    let pipeline =
        Pipeline::new(&schedule, line.clone(), rank.device())?.recompute(RecomputeMode::ExceptLast);
    let mut work = Work::new(&config(layers), &schedule, line.rank(), rank.device())?;
    work.rows = rows(replicas.size(), replicas.rank(), micro_batches);
    let tied = TiedTable::new(&work.model, &schedule, line)?;
    // In which the two sites of the tied table are not together.
    let buckets = DdpConfig { first_bucket_bytes: 1 << 8, bucket_bytes: 1 << 10, ..DdpConfig::default() };
    let share: Box<dyn DataParallel> = match ZeroStage::try_from(zero) {
        Ok(stage) => Box::new(Zero::new(&work.model, replicas.clone(), ZeroConfig::new(stage))?),
        Err(_) => Box::new(Ddp::new(&work.model, replicas.clone(), buckets)?),
    };
    let mut optimizer = optimizer(&share.parameters());
    let replica = Arc::new(Replica { work: Mutex::new(work), share });
    for step in 0..STEPS {
        replica.work.lock().unwrap().step = step;
        replica.share.begin()?;
        pipeline.train(&replica)?;
        tied.iter().try_for_each(TiedTable::exchange)?;
        replica.share.finish()?;
        optimizer.step()?;
        replica.share.updated()?;
        replica.share.zero_grad()?;
        optimizer.zero_grad()?;
    }
    let work = replica.work.lock().unwrap();
    Ok(bytes(&replica.share.full_state_dict(&work.model)?))
}

#[test]
fn replicas_of_a_pipeline_have_the_bits_of_one_device() {
    let (layers, micro_batches) = (3, 3);
    for (dp, pp) in [(2, 2), (3, 1)] {
        let wanted = alone(layers, dp, micro_batches);
        let mesh = Mesh::new(1, dp, pp).unwrap();
        for (name, zero) in NAMES.into_iter().flat_map(|name| [0, 1, 2, 3].map(|zero| (name, zero))) {
            let what = format!("{name}, dp {dp}, pp {pp}, zero {zero}");
            let run = |rank: Rank| train(layers, mesh, name, zero, micro_batches, &rank);
            let ranks = launch::threads(mesh.ranks(), run).unwrap_or_else(|e| panic!("{what}: {e}"));
            let mut missing: Vec<&String> = wanted.iter().map(|(name, _)| name).collect();
            for (name, got) in ranks.iter().flatten() {
                let (_, wanted) = wanted.iter().find(|(other, _)| other == name).unwrap();
                assert!(got == wanted, "{name}: {what}");
                missing.retain(|other| *other != name);
            }
            assert!(missing.is_empty(), "{missing:?}: {what}");
        }
    }
}

#[test]
fn both_ends_on_one_rank_share_the_tied_table() {
    let schedule = by_name("zb-v", 2, 2, 1).unwrap();
    let build = |rank| -> Chunks<Decoder> {
        Chunks::build(&config(4), &Arc::new(OneDevice), &scope(Device::CPU), &schedule, rank).unwrap()
    };
    let model = build(0);
    let tables: Vec<_> = model.parameters().into_iter().filter(|p| p.name() == "wte.weight").collect();
    assert_eq!((tables.len(), tables[0].leaves().len()), (1, 2));
    assert!(model.of(3).unwrap().stage().last);
    let error = build(1).of(0).err().unwrap().to_string();
    assert!(error.contains("got stage 0 on a rank with stages [1, 2]"), "{error}");
}
