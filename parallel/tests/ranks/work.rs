//! `StageFn`, the computation as a function of the batch; and what is refused when a call is missing, such as `exchange`.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::{Group, Linear, LinearConfig, Module, Parameters, Rule, Scope, Sgd};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::ranks::{
    AsynchronousPipeline, Chunks, Pipeline, Spec, StageArgs, StageFn, TiedTable, Weights,
};
use phalanx_parallel::pipeline::schedule::{double_buffered, gpipe, one_f_one_b};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit;

fn layer(stage: usize, device: Device) -> Result<Linear> {
    Ok(LinearConfig::new(3, 3).init(&Scope::new(7, DType::F32, device).child(stage))?)
}

/// The rows of step `step`: `rows` of three.
fn batch(step: u64, rows: usize, device: Device) -> Result<Tensor> {
    let values: Vec<f32> =
        (0..rows * 3).map(|i| ((i as u64 * 7 + step * 5) % 13) as f32 / 6.0 - 1.0).collect();
    Ok(Tensor::from_slice(&values, &[rows, 3], device)?)
}

fn loss(y: &Var) -> Result<Var> {
    Ok(y.tanh()?.square()?.sum_all()?)
}

/// Two stages, a layer each, on batches of five rows in three micro-batches, in pipelines with and without replicas.
fn train(rank: &Rank, replicas: usize, says_specs: bool) -> Result<Vec<Vec<f32>>> {
    let groups = Groups::new(Mesh::new(1, replicas, 2)?, rank.comm())?;
    let (line, others) = (groups.along(Axis::Pp), groups.along(Axis::Dp));
    let model = Arc::new(Chunks::new(vec![(line.rank(), layer(line.rank(), rank.device())?)]));
    let ddp: Arc<dyn DataParallel> = Arc::new(Ddp::new(&*model, others.clone(), DdpConfig::default())?);
    let mut optimizer = Sgd::default().init(vec![Group::new(model.parameters(), 0.1)])?;
    let pipeline = Pipeline::new(&one_f_one_b(2, 3)?, line.clone(), rank.device())?;
    let layers = model.clone();
    let mut work = StageFn::new(move |args: StageArgs<'_, Tensor>, input: Option<&Var>| {
        let rows = args.rows(args.batch.shape()[0]);
        let x = Var::new(args.batch.narrow(0, rows.start, rows.len())?);
        let y = layers.of(args.stage)?.forward(input.unwrap_or(&x))?;
        if args.stage == 1 { loss(&y) } else { Ok(y) }
    })
    .with_data_parallel(ddp.clone());
    if says_specs {
        work = work.with_input_spec(|args| {
            let rows = args.rows(args.batch.shape()[0]).len();
            Some(Spec { shape: [rows, 3].into_iter().collect(), dtype: DType::F32 })
        });
    }
    for step in 0..3 {
        let own = batch(2 * step + others.rank() as u64, 5, rank.device())?;
        ddp.begin()?;
        pipeline.train(&work.on(own, step))?;
        ddp.finish()?;
        optimizer.step()?;
        ddp.zero_grad()?;
    }
    model.parameters().iter().map(|p| Ok(p.tensor().to_vec()?)).collect()
}

#[test]
fn work_on_a_batch_trains_as_one_device_does() {
    for replicas in [1, 2] {
        let model: Vec<Linear> = (0..2).map(|stage| layer(stage, Device::CPU).unwrap()).collect();
        let mut optimizer = Sgd::default().init(vec![Group::new(model.parameters(), 0.1)]).unwrap();
        for step in 0..3 {
            let mut sums: Vec<Option<Tensor>> = vec![None; 4];
            for replica in 0..replicas as u64 {
                let all = batch(2 * step + replica, 5, Device::CPU).unwrap();
                for rows in phalanx_nn::cut(5, 3) {
                    let x = Var::new(all.narrow(0, rows.start, rows.len()).unwrap());
                    let y = model[1].forward(&model[0].forward(&x).unwrap()).unwrap();
                    loss(&y).unwrap().backward().unwrap();
                }
                for (sum, p) in sums.iter_mut().zip(model.parameters()) {
                    let grad = p.take_grad().unwrap().unwrap();
                    match sum {
                        Some(sum) => phalanx_kernels::accumulate_(sum, &grad).unwrap(),
                        None => *sum = Some(grad),
                    }
                }
            }
            sums.into_iter().zip(model.parameters()).for_each(|(sum, p)| p.set_grad(sum));
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        let wanted: Vec<Vec<f32>> = model.parameters().iter().map(|p| p.tensor().to_vec().unwrap()).collect();
        for says_specs in [false, true] {
            let all = launch::threads(2 * replicas, |rank| train(&rank, replicas, says_specs)).unwrap();
            let mut stages: Vec<Vec<Vec<f32>>> = Vec::new();
            all.into_iter().for_each(|values| {
                if !stages.contains(&values) {
                    stages.push(values)
                }
            });
            assert_eq!(stages.concat(), wanted, "{replicas} replicas, specs {says_specs}");
        }
    }
}

/// What the arguments said: stage, micro-batch, of how many, update, step, batch.
type Said = [usize; 6];

#[test]
fn a_turn_says_what_is_to_be_computed() {
    let run = |rank: Rank, asynchronous: bool| -> Result<Vec<Said>> {
        let model = Arc::new(layer(rank.rank(), rank.device())?);
        let said = Arc::new(Mutex::new(Vec::new()));
        let (layer, notes) = (model.clone(), said.clone());
        let work = StageFn::new(move |args: StageArgs<'_, usize>, input: Option<&Var>| {
            let StageArgs { stage, micro_batch, micro_batches, update, step, batch } = args;
            notes.lock().unwrap().push([stage, micro_batch, micro_batches, update, step as usize, *batch]);
            let x = Var::new(Tensor::zeros(&[1, 3], DType::F32, layer.weight.device())?);
            let y = layer.forward(input.unwrap_or(&x))?;
            if stage == 1 { loss(&y) } else { Ok(y) }
        });
        if asynchronous {
            let pipeline =
                AsynchronousPipeline::new(&double_buffered(2, 2, 6)?, rank.comm().clone(), rank.device())?;
            pipeline.train(&work.on(9, 4), &mut Nothing(model.parameters()))?;
        } else {
            Pipeline::new(&gpipe(2, 3)?, rank.comm().clone(), rank.device())?.train(&work.on(8, 5))?;
        }
        let mut said = said.lock().unwrap().clone();
        said.sort_unstable();
        Ok(said)
    };
    for (rank, said) in launch::threads(2, |rank| run(rank, false)).unwrap().into_iter().enumerate() {
        assert_eq!(said, [0, 1, 2].map(|i| [rank, i, 3, 0, 5, 8]));
    }
    for (rank, said) in launch::threads(2, |rank| run(rank, true)).unwrap().into_iter().enumerate() {
        assert!(said.iter().all(|s| s[0] == rank && s[2] == 2 && s[4..] == [4, 9]), "{said:?}");
        let turns: Vec<_> = said.iter().map(|s| (s[1], s[3])).collect();
        assert_eq!(turns, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
    }
}

/// Updates that change nothing.
struct Nothing(Vec<phalanx_nn::Parameter>);

impl Weights for Nothing {
    fn parameters(&self, _: usize) -> Result<Vec<phalanx_nn::Parameter>> {
        Ok(self.0.clone())
    }
    fn update(&mut self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_tied_copy_is_not_updated_before_the_other_stages_gradients_are_added() {
    let schedule = one_f_one_b(2, 2).unwrap();
    let run = |rank: Rank, exchanges: bool| -> Result<()> {
        let work = Arc::new(kit::Work::new(&kit::config(2), &schedule, rank.rank(), rank.device())?);
        let tied = TiedTable::new(&work.model, &schedule, rank.comm())?;
        let mut optimizer = kit::optimizer(&work.model.parameters());
        Pipeline::new(&schedule, rank.comm().clone(), rank.device())?.train(&work)?;
        if exchanges {
            tied.iter().try_for_each(TiedTable::exchange)?;
        }
        Ok(optimizer.step()?)
    };
    launch::threads(2, |rank| run(rank, true)).unwrap();
    let error = launch::threads(2, |rank| run(rank, false)).unwrap_err().to_string();
    assert!(error.contains("wte.weight") && error.contains("`TiedTable::exchange`"), "{error}");
}

#[test]
fn a_pipelines_pass_that_was_not_announced_to_its_replicas_is_refused() {
    let run = |rank: Rank| -> Result<()> {
        let schedule = one_f_one_b(1, 2)?;
        let model = Arc::new(layer(0, rank.device())?);
        let ddp: Arc<dyn DataParallel> =
            Arc::new(Ddp::new(&*model, rank.comm().clone(), DdpConfig::default())?);
        let layer = model.clone();
        let work = StageFn::new(move |args: StageArgs<'_, Tensor>, _: Option<&Var>| {
            let rows = args.rows(4);
            loss(&layer.forward(&Var::new(args.batch.narrow(0, rows.start, rows.len())?))?)
        });
        let alone = rank.comm().group(&[rank.rank()])?;
        let pipeline = Pipeline::new(&schedule, alone, rank.device())?;
        pipeline.train(&work.with_data_parallel(ddp).on(batch(0, 4, rank.device())?, 0)).map(drop)
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("`ddp.begin()` before it"), "{error}");
}
