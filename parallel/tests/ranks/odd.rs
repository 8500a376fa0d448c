//! Pipelines of other things than language models.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Linear, LinearConfig, Module, Parameters, Scope};
use phalanx_parallel::pipeline::ranks::{Chunks, Executed, Pipeline, Spec, Stages};
use phalanx_parallel::pipeline::schedule::{
    ActionKind, NAMES, Schedule, by_name, one_f_one_b, with_transfers,
};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Dims};

/// Maps of three features; every micro-batch has another number of dimensions and rows.
struct Maps {
    model: Chunks<Linear>,
    stages: usize,
    device: Device,
    /// A stage that does not use its input.
    deaf: Option<usize>,
}

impl Maps {
    fn new(schedule: &Schedule, rank: usize, device: Device) -> Maps {
        let map = |stage| {
            let scope = Scope::new(1, DType::F64, device).child(stage);
            (stage, LinearConfig::new(3, 3).init(&scope).unwrap())
        };
        let model = Chunks::new(schedule.stages_of(rank).map(map).collect());
        Maps { model, stages: schedule.stages(), device, deaf: None }
    }

    fn data(&self, micro_batch: usize) -> Result<Var> {
        let shape = [&[][..], &[2], &[4, 1], &[1, 2, 3]][micro_batch % 4];
        let shape: Dims = shape.iter().copied().chain([3]).collect();
        let numbers: Vec<f64> = (0..shape.iter().product()).map(|i: usize| (i as f64 + 0.5).sin()).collect();
        Ok(Var::from_slice(&numbers, &shape, self.device)?)
    }

    fn grads(&self) -> Vec<(String, Option<Vec<f64>>)> {
        let grad = |p: &phalanx_nn::Parameter| p.grad().unwrap().map(|g| g.to_vec().unwrap());
        self.model.parameters().iter().map(|p| (p.name().to_string(), grad(p))).collect()
    }
}

impl Stages for Maps {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let data = self.data(micro_batch)?;
        let x = input.filter(|_| self.deaf != Some(stage)).unwrap_or(&data);
        let y = self.model.of(stage)?.forward(x)?.tanh()?;
        Ok(if stage + 1 == self.stages { y.sum_all()? } else { y })
    }
}

type Outcome = (Vec<f64>, Vec<(String, Option<Vec<f64>>)>);

fn run(schedule: &Schedule, change: impl Fn(&mut Maps) + Sync, mode: RecomputeMode) -> Result<Vec<Outcome>> {
    let all = launch::threads(schedule.ranks.len(), |rank| -> Result<Outcome> {
        let mut work = Maps::new(schedule, rank.rank(), rank.device());
        change(&mut work);
        let pipeline = Pipeline::new(schedule, rank.comm().clone(), rank.device())?.recompute(mode);
        let work = Arc::new(work);
        let losses = pipeline.train(&work)?;
        let evaluated = pipeline.evaluate(&work)?;
        let numbers =
            |losses: Vec<phalanx_tensor::Tensor>| losses.iter().map(|l| l.item().unwrap()).collect();
        let losses: Vec<f64> = numbers(losses);
        assert_eq!(losses, numbers(evaluated), "without gradients");
        Ok((losses, work.grads()))
    });
    Ok(all?)
}

/// Losses, and gradients by name, of all ranks.
fn together(all: Vec<Outcome>) -> Outcome {
    let (losses, grads): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let mut grads = grads.concat();
    grads.sort_by(|a, b| a.0.cmp(&b.0));
    (losses.concat(), grads)
}

#[test]
fn every_micro_batch_may_have_its_own_shape() {
    for name in NAMES {
        let schedule = by_name(name, 2, 2, 6).unwrap();
        let stages = schedule.stages();
        // All stages on one rank, one after the other.
        let alone = Schedule { placement: vec![0; stages], ..by_name("interleaved", 1, stages, 6).unwrap() };
        let wanted = together(run(&alone, |_| {}, RecomputeMode::Never).unwrap());
        for mode in [RecomputeMode::Never, RecomputeMode::ExceptLast] {
            assert_eq!(together(run(&schedule, |_| {}, mode).unwrap()), wanted, "{name}, {mode:?}");
        }
    }
}

#[test]
fn stages_that_use_no_input_or_train_nothing_stop_no_rank() {
    for schedule in [one_f_one_b(3, 2).unwrap(), by_name("zb-h1", 3, 1, 2).unwrap()] {
        let deaf = |maps: &mut Maps| maps.deaf = Some(1);
        let (_, grads) = together(run(&schedule, deaf, RecomputeMode::Never).unwrap());
        let is_zero = |stage: &str| {
            let of_stage = grads.iter().filter(|(name, _)| name.starts_with(stage));
            of_stage.into_iter().all(|(_, grad)| grad.as_ref().unwrap().iter().all(|&g| g == 0.0))
        };
        assert!(is_zero("0.") && !is_zero("1.") && !is_zero("2."), "{grads:?}");
        for mode in [RecomputeMode::Never, RecomputeMode::Always] {
            let freeze = |maps: &mut Maps| {
                maps.model.of(0).iter().flat_map(|map| map.parameters()).for_each(|p| p.freeze());
            };
            let (_, grads) = together(run(&schedule, freeze, mode).unwrap());
            assert!(grads.iter().all(|(name, grad)| grad.is_none() == name.starts_with("0.")), "{grads:?}");
        }
    }
}

#[test]
fn an_output_that_is_not_what_was_announced_is_refused() {
    struct Wrong(Maps);
    impl Stages for Wrong {
        fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
            self.0.forward(stage, micro_batch, input)
        }
        fn input_spec(&self, _: usize, _: usize) -> Option<Spec> {
            Some(Spec { shape: Dims::from_slice(&[7]), dtype: DType::F32 })
        }
    }
    let schedule = one_f_one_b(2, 1).unwrap();
    let outcome = launch::threads(2, |rank| -> Result<()> {
        let work = Arc::new(Wrong(Maps::new(&schedule, rank.rank(), rank.device())));
        Pipeline::new(&schedule, rank.comm().clone(), rank.device())?.train(&work).map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("rank 0 failed: 0SEND_F0: ") && error.contains("shape: [7]"), "{error}");
}

#[test]
fn an_observer_hears_of_every_action_in_order() {
    let schedule = with_transfers(&by_name("zb-v", 2, 2, 3).unwrap()).unwrap();
    let heard = launch::threads(2, |rank| -> Result<Vec<Executed>> {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&heard);
        let pipeline = Pipeline::new(&schedule, rank.comm().clone(), rank.device())?
            .observer(Arc::new(move |done| told.lock().unwrap().push(done)));
        pipeline.train(&Arc::new(Maps::new(&schedule, rank.rank(), rank.device())))?;
        let mut heard = heard.lock().unwrap().clone();
        heard.sort_by_key(|done| done.started);
        Ok(heard)
    });
    for (heard, wanted) in heard.unwrap().into_iter().zip(&schedule.ranks) {
        assert_eq!(&heard.iter().map(|done| done.action).collect::<Vec<_>>(), wanted);
        assert!(heard.iter().all(|done| done.started <= done.ended));
        let is_send =
            |done: &&Executed| matches!(done.action.kind, ActionKind::SendForward | ActionKind::SendBackward);
        let (_, others): (Vec<&Executed>, Vec<&Executed>) = heard.iter().partition(is_send);
        assert!(others.windows(2).all(|pair| pair[0].ended <= pair[1].started), "one after the other");
    }
}
