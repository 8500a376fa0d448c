//! Schedules without flushes give what the papers' formulas say, bit for bit; with replicas, every stage's gradients are
//! added over its replicas before each of its updates.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode::{self, Always, ExceptLast, Never};
use phalanx_nn::{Optimizer, Parameter, Parameters, Rule};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, NoSync};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::ranks::{AsynchronousPipeline, Executed, Pipeline, Stages, Weights};
use phalanx_parallel::pipeline::schedule::{
    Action, ActionKind, Asynchronous, Schedule, weight_stashing, with_transfers,
};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{Result, comm, launch};
use phalanx_tensor::{DType, Device};

use crate::faults::{Broken, Fault, Faulty, How, assert_named, run};
use crate::twin::{By, Case, Descent, Outcome, Scheme, Twin, Work, pass, simulated};

pub fn train(case: &Case, mode: RecomputeMode, rank: &Rank) -> Result<Outcome> {
    let work = Arc::new(Work::new(case, rank.rank(), rank.device())?);
    let mut descent = Descent::new(case, &work);
    let pipeline = AsynchronousPipeline::new(&case.plan(), rank.comm().clone(), rank.device())?;
    let losses = pipeline.recompute(mode).train(&work, &mut descent)?;
    let mut outcome = Outcome::default();
    outcome.add(&losses, &work.model.parameters());
    Ok(outcome)
}

/// All ranks' together.
pub fn joined(ranks: Vec<Outcome>) -> Outcome {
    let mut all = Outcome::default();
    for rank in ranks {
        all.losses.extend(rank.losses);
        for (name, state) in rank.state {
            // The copies of a tied table, or of a stage with replicas.
            let other = all.state.insert(name.clone(), state.clone());
            assert!(other.is_none_or(|other| other == state), "{name}: two values");
        }
    }
    all
}

fn together(case: &Case, mode: RecomputeMode) -> Outcome {
    let ranks = launch::threads(case.ranks(), |rank| train(case, mode, &rank));
    joined(ranks.unwrap_or_else(|e| panic!("{case:?}: {e}")))
}

pub fn assert_same(got: Outcome, wanted: &Outcome, what: &str) {
    assert_eq!(got.losses, wanted.losses, "losses: {what}");
    assert_eq!(got.state.len(), wanted.state.len());
    for (name, state) in &got.state {
        assert!(*state == wanted.state[name], "{name}: {what}");
    }
}

fn check(case: &Case, modes: &[RecomputeMode]) {
    let wanted = simulated(case);
    for &mode in modes {
        assert_same(together(case, mode), &wanted, &format!("{case:?}, {mode:?}"));
    }
}

fn schemes(stages: usize) -> Vec<Scheme> {
    let intervals = [stages, stages + 1, 2 * stages + 1];
    [Scheme::Stashing, Scheme::VerticalSync]
        .into_iter()
        .chain(intervals.map(Scheme::DoubleBuffered))
        .collect()
}

#[test]
fn every_stage_uses_the_versions_of_the_formulas_and_makes_the_same_updates() {
    for stages in 1..=4 {
        for scheme in schemes(stages) {
            for (by, dtype) in [(By::Momentum, DType::F32), (By::AdamW, DType::F64)] {
                check(&Case { by, dtype, ..Case::new(scheme, stages, 11) }, &[Never]);
            }
        }
    }
}

#[test]
fn so_it_is_with_any_number_of_micro_batches_in_the_other_dtypes() {
    for (stages, micro_batches) in [(1, 1), (2, 1), (2, 4), (3, 2), (3, 9), (4, 3), (4, 20)] {
        for scheme in [Scheme::Stashing, Scheme::DoubleBuffered(stages)] {
            for (by, dtype) in [(By::Momentum, DType::F64), (By::AdamW, DType::F32), (By::AdamW, DType::BF16)]
            {
                check(&Case { by, dtype, ..Case::new(scheme, stages, micro_batches) }, &[Never]);
            }
        }
    }
}

#[test]
fn recomputation_uses_the_version_of_the_forward_pass() {
    for scheme in [Scheme::Stashing, Scheme::DoubleBuffered(3)] {
        check(&Case::new(scheme, 3, 8), &[ExceptLast, Always]);
    }
}

#[test]
fn a_tied_table_is_of_the_first_stages_version_at_both_ends() {
    for (stages, rounds) in [(1, 3), (2, 1), (2, 4), (3, 3), (4, 5)] {
        for scheme in schemes(stages) {
            for (by, dtype) in [(By::Momentum, DType::F64), (By::AdamW, DType::F32)] {
                let case = Case::new(scheme, stages, 1);
                let case = Case { micro_batches: rounds * case.interval(), by, dtype, tied: true, ..case };
                check(&case, &[Never]);
            }
        }
    }
    let case = Case { tied: true, clip: 0.05, ..Case::new(Scheme::DoubleBuffered(3), 3, 9) };
    check(&case, &[Always]);
}

#[test]
fn replicas_of_a_stage_make_the_updates_of_one_device() {
    let lists: [&[usize]; 5] = [&[2], &[2, 1], &[1, 2], &[1, 3, 1], &[2, 1, 3]];
    for replicas in lists {
        let ranks: usize = replicas.iter().sum();
        for scheme in [Scheme::Stashing, Scheme::VerticalSync, Scheme::DoubleBuffered(ranks + 1)] {
            // Some micro-batches are left over.
            let case = Case::over(scheme, replicas, ranks + 7);
            check(&case, &[Never]);
            check(&Case { by: By::Momentum, dtype: DType::BF16, clip: 0.05, ..case }, &[Always]);
        }
    }
}

#[test]
fn a_tied_table_is_of_one_version_at_stages_with_replicas() {
    let synced = [Scheme::VerticalSync, Scheme::DoubleBuffered(6)];
    let stashing = [Scheme::Stashing, Scheme::VerticalSync, Scheme::DoubleBuffered(6)];
    let cases: [(&[usize], &[Scheme]); 3] =
        [(&[2, 1], &stashing), (&[2, 1, 2], &stashing[..1]), (&[1, 2], &synced)];
    for (replicas, schemes) in cases {
        for &scheme in schemes {
            let case = Case { tied: true, by: By::Momentum, ..Case::over(scheme, replicas, 12) };
            check(&case, &[Never]);
            check(&Case { by: By::AdamW, clip: 0.05, ..case }, &[ExceptLast]);
        }
    }
    let case = Case { tied: true, ..Case::over(Scheme::Stashing, &[1, 2], 4) };
    let error = launch::threads(3, |rank| train(&case, Never, &rank)).unwrap_err().to_string();
    let wanted = "wte.weight: got a tied table at a first stage of 1 replicas and a last of 2, which update after unlike numbers";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn each_stages_norm_can_be_bounded() {
    for scheme in [Scheme::Stashing, Scheme::VerticalSync, Scheme::DoubleBuffered(4)] {
        let clipped = Case { clip: 0.05, ..Case::new(scheme, 3, 9) };
        check(&clipped, &[Never]);
        let free = simulated(&Case { clip: 0.0, by: By::Momentum, ..clipped.clone() });
        assert!(free != simulated(&Case { by: By::Momentum, ..clipped }), "the bound has to act");
    }
}

#[test]
fn one_stage_with_an_update_after_every_micro_batch_is_plain_descent() {
    for by in [By::Momentum, By::AdamW] {
        let case = Case { by, ..Case::new(Scheme::Stashing, 1, 6) };
        let work = Work::new(&case, 0, Device::CPU).unwrap();
        let (parameters, mut wanted) = (work.model.parameters(), Outcome::default());
        let mut optimizer = case.optimizer(parameters.clone());
        for micro_batch in 0..case.micro_batches {
            let loss = work.forward(0, micro_batch, None).unwrap();
            loss.backward().unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
            wanted.add(&[loss.into_tensor()], &[]);
        }
        wanted.add(&[], &parameters);
        assert!(together(&case, Never) == wanted, "{by:?}");
    }
}

/// Updates that go wrong at one of them.
struct Faltering {
    descent: Descent,
    fault: Fault,
}

impl Weights for Faltering {
    fn parameters(&self, stage: usize) -> Result<Vec<Parameter>> {
        self.descent.parameters(stage)
    }

    fn update(&mut self, stage: usize, update: usize) -> Result<()> {
        let Action { kind, micro_batch, .. } = self.fault.action;
        let due = kind == ActionKind::Update && update == micro_batch / self.descent.case.interval();
        if due { Err(self.fault.strike().into()) } else { self.descent.update(stage, update) }
    }
}

/// A rank's run, in which something may go wrong, and a barrier after it.
fn faulty(case: &Case, plan: &Asynchronous, fault: Option<Fault>, rank: &Rank) -> Result<()> {
    let work = Work { known: true, ..Work::new(case, rank.rank(), rank.device())? };
    let descent = Descent::new(case, &work);
    let is_mine =
        |action: Action| plan.schedule.rank_of(action.stage, action.micro_batch) == Some(rank.rank());
    let mine = fault.filter(|fault| is_mine(fault.action));
    match mine {
        None => {
            let pipeline = AsynchronousPipeline::new(plan, rank.comm().clone(), rank.device())?;
            pipeline.train(&Arc::new(work), &mut { descent })?;
        }
        Some(fault) => {
            let broken = Broken::over(rank.comm(), &plan.schedule.ranks[rank.rank()], fault);
            let pipeline = AsynchronousPipeline::new(plan, broken, rank.device())?;
            pipeline.train(&Arc::new(Faulty { work, fault }), &mut Faltering { descent, fault })?;
        }
    }
    Ok(rank.comm().barrier()?)
}

#[test]
fn a_fault_in_any_action_ends_all_ranks_with_its_cause_rank_and_action() {
    let scheme = Scheme::DoubleBuffered(3);
    for case in [Case::new(scheme, 3, 4), Case::over(scheme, &[2, 1], 4)] {
        let plan = Asynchronous { schedule: with_transfers(&case.plan().schedule).unwrap(), ..case.plan() };
        launch::threads(3, |rank| faulty(&case, &plan, None, &rank)).unwrap();
        // Replicas send gradients besides, so that the call of a transfer is not known by its number.
        let has_replicas = case.ranks() > case.stages;
        let culprit = |action: &Action| plan.schedule.rank_of(action.stage, action.micro_batch).unwrap();
        let actions = plan.schedule.ranks.iter().flatten();
        for &action in actions.filter(|action| !(has_replicas && action.kind.is_transfer())) {
            for how in [How::Error, How::Panic] {
                let fault = Fault { action, how };
                let heard = run(&plan.schedule, |rank| faulty(&case, &plan, Some(fault), rank));
                assert_named(heard, culprit(&action), fault);
            }
        }
    }
}

#[test]
fn an_observer_hears_of_every_update_between_the_passes() {
    let case = Case::new(Scheme::Stashing, 1, 3);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (told, rank) = (heard.clone(), comm::threads::world(1, launch::TIMEOUT).swap_remove(0));
    let pipeline = AsynchronousPipeline::new(&case.plan(), rank, Device::CPU).unwrap();
    let pipeline = pipeline.observer(Arc::new(move |done: Executed| {
        assert!(done.started <= done.ended);
        told.lock().unwrap().push(done.action.to_string());
    }));
    let work = Arc::new(Work::new(&case, 0, Device::CPU).unwrap());
    pipeline.train(&work, &mut Descent::new(&case, &work)).unwrap();
    assert_eq!(heard.lock().unwrap().join(" "), "0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U2");
}

#[test]
fn every_run_begins_with_the_newest_weights_and_the_gradients_that_are_left() {
    let cases = [Scheme::Stashing, Scheme::DoubleBuffered(3)].map(|scheme| Case::new(scheme, 3, 0));
    let tied = Case { tied: true, ..cases[1].clone() };
    for (whole, runs) in
        [(&cases[0], [0..4, 4..5, 5..12]), (&cases[1], [0..4, 4..5, 5..12]), (&tied, [0..3, 3..6, 6..15])]
    {
        let mut twin = Twin::new(whole);
        runs.iter().cloned().for_each(|run| twin.run(run));
        let wanted = twin.end();
        let ranks = launch::threads(3, |rank| {
            let mut outcome = Outcome::default();
            let case = Case { micro_batches: 1, ..whole.clone() };
            let work = Work::new(&case, rank.rank(), rank.device())?;
            let mut descent = Descent::new(&case, &work);
            for run in runs.iter().cloned() {
                let plan = Case { micro_batches: run.len(), ..whole.clone() }.plan();
                let pipeline = AsynchronousPipeline::new(&plan, rank.comm().clone(), rank.device())?;
                let work = Work { first: run.start, model: work.model.clone(), ..work };
                outcome.add(&pipeline.train(&Arc::new(work), &mut descent)?, &[]);
            }
            outcome.add(&[], &work.model.parameters());
            Ok::<_, phalanx_parallel::Error>(outcome)
        });
        assert_same(joined(ranks.unwrap()), &wanted, &format!("{whole:?}"));
    }
}

/// Says that two stages share a parameter, or brings one that has no storage of its own.
struct Odd(Vec<Parameter>);

impl Weights for Odd {
    fn parameters(&self, _: usize) -> Result<Vec<Parameter>> {
        Ok(self.0.clone())
    }
    fn update(&mut self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
}

struct Nothing;

impl Stages for Nothing {
    fn forward(&self, _: usize, _: usize, _: Option<&Var>) -> Result<Var> {
        unreachable!("refused before")
    }
}

#[test]
fn what_has_no_versions_is_refused() {
    let plan = weight_stashing(2, 3).unwrap();
    let lone = || comm::threads::world(1, launch::TIMEOUT).swap_remove(0);
    let error =
        |plan: &Asynchronous| AsynchronousPipeline::new(plan, lone(), Device::CPU).err().unwrap().to_string();
    assert!(error(&plan).contains("got a schedule of 2 ranks for a group of 1"), "{}", error(&plan));
    let error = Pipeline::new(&weight_stashing(1, 3).unwrap().schedule, lone(), Device::CPU).err().unwrap();
    assert!(error.to_string().contains("`AsynchronousPipeline` runs those"), "{error}");

    let both: Schedule = "0F0 1F0 1B0 1U0 0B0 0U0".parse().unwrap();
    let plan = Asynchronous { schedule: both, interval: 1, versions: vec![vec![0]; 2] };
    let pipeline = AsynchronousPipeline::new(&plan, lone(), Device::CPU).unwrap();
    let refused = |parameter: Parameter| {
        pipeline.train(&Arc::new(Nothing), &mut Odd(vec![parameter])).unwrap_err().to_string()
    };
    let values = Var::from_slice(&[0f32; 6], &[6], Device::CPU).unwrap().into_tensor();
    let error = refused(Parameter::new("table", values.clone()).unwrap());
    assert_eq!(error, "table: two stages of this rank share it, and each wants a version of its own");
    let error = refused(Parameter::new("part", values.narrow(0, 0, 2).unwrap()).unwrap());
    assert!(
        error.starts_with("part: got a parameter of 8 bytes in a storage of 24, as ZeRO's are"),
        "{error}"
    );
}

/// A replica's part of the work, and what updates it.
struct Replica {
    work: Work,
    share: Arc<dyn DataParallel>,
    replicas: usize,
    number: usize,
}

impl Stages for Replica {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let number = micro_batch * self.replicas + self.number;
        pass(self.work.model.of(stage)?, number, self.work.interval, input)
    }

    fn no_sync(&self) -> Option<NoSync> {
        Some(self.share.no_sync())
    }
}

struct Shared {
    model: Vec<Parameter>,
    share: Arc<dyn DataParallel>,
    optimizer: Optimizer<Box<dyn Rule>>,
    updates: usize,
}

impl Weights for Shared {
    fn parameters(&self, _: usize) -> Result<Vec<Parameter>> {
        Ok(self.model.clone())
    }

    fn update(&mut self, _: usize, update: usize) -> Result<()> {
        self.share.finish()?;
        self.optimizer.step()?;
        self.share.updated()?;
        self.share.zero_grad()?;
        if update + 1 < self.updates { self.share.begin() } else { Ok(()) }
    }
}

fn train_replicas(case: &Case, zero: u8, replicas: usize, rank: &Rank) -> Result<Outcome> {
    let groups = Groups::new(Mesh::new(1, replicas, case.stages)?, rank.comm())?;
    let (line, others) = (groups.along(Axis::Pp), groups.along(Axis::Dp));
    let work = Work::new(case, line.rank(), rank.device())?;
    let buckets = DdpConfig { first_bucket_bytes: 1 << 8, bucket_bytes: 1 << 10, ..DdpConfig::default() };
    let share: Arc<dyn DataParallel> = match ZeroStage::try_from(zero) {
        Ok(stage) => Arc::new(Zero::new(&*work.model, others.clone(), ZeroConfig::new(stage))?),
        Err(_) => Arc::new(Ddp::new(&*work.model, others.clone(), buckets)?),
    };
    let (optimizer, updates) = (case.optimizer(share.parameters()), case.micro_batches / case.interval());
    let model = work.model.parameters();
    let mut shared = Shared { model: model.clone(), share: share.clone(), optimizer, updates };
    let pipeline = AsynchronousPipeline::new(&case.plan(), line.clone(), rank.device())?;
    let replica = Arc::new(Replica { work, share: share.clone(), replicas, number: others.rank() });
    share.begin()?;
    pipeline.train(&replica, &mut shared)?;
    let mut outcome = Outcome::default();
    outcome.add(&[], &model);
    outcome.state.values_mut().for_each(|(_, left)| *left = None);
    Ok(outcome)
}

#[test]
fn replicas_have_the_bits_of_one_device_that_adds_theirs() {
    for (stages, scheme) in
        [(2, Scheme::Stashing), (2, Scheme::DoubleBuffered(3)), (1, Scheme::DoubleBuffered(2))]
    {
        for by in [By::Momentum, By::AdamW] {
            let case = Case { by, ..Case::new(scheme, stages, 6) };
            let mut twin = Twin::new(&case);
            twin.run_replicas(2);
            let ranks = launch::threads(2 * stages, |rank| train_replicas(&case, 0, 2, &rank));
            let ranks = ranks.unwrap_or_else(|e| panic!("{case:?}: {e}"));
            assert_same(joined(ranks), &twin.end(), &format!("{case:?}"));
        }
    }
}

#[test]
fn spread_parameters_and_tied_tables_with_replicas_are_refused() {
    let refused = |case: &Case, zero| {
        let error =
            launch::threads(2 * case.stages, |rank| train_replicas(case, zero, 2, &rank)).unwrap_err();
        error.to_string()
    };
    let case = Case::new(Scheme::Stashing, 2, 3);
    for zero in [1, 2, 3] {
        let error = refused(&case, zero);
        assert!(error.contains("wanted one with a storage of its own"), "zero {zero}: {error}");
    }
    let error = refused(&Case { tied: true, ..case }, 0);
    assert!(error.contains("wte.weight: got a tied table with data parallelism"), "{error}");
}
