//! Pipelines without flushes side by side: every stage's gradients are added over its replicas before each of its updates.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::{Optimizer, Parameter, Parameters, Rule};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, NoSync};
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::pipeline::ranks::{AsynchronousPipeline, Stages, Weights};
use phalanx_parallel::sharded::{Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};

use crate::asynchronous::{assert_same, joined};
use crate::twin::{By, Case, Outcome, Scheme, Twin, Work, pass};

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

fn train(case: &Case, zero: u8, replicas: usize, rank: &Rank) -> Result<Outcome> {
    let groups = Groups::new(Mesh::new(1, replicas, case.stages)?, rank.comm())?;
    let (line, others) = (groups.along(Axis::Pp), groups.along(Axis::Dp));
    let work = Work::new(case, line.rank(), rank.device())?;
    let buckets = DdpConfig { first_bucket_bytes: 1 << 8, bucket_bytes: 1 << 10, ..DdpConfig::default() };
    let share: Arc<dyn DataParallel> = match Stage::try_from(zero) {
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
            let ranks = launch::threads(2 * stages, |rank| train(&case, 0, 2, &rank));
            let ranks = ranks.unwrap_or_else(|e| panic!("{case:?}: {e}"));
            assert_same(joined(ranks), &twin.end(), &format!("{case:?}"));
        }
    }
}

#[test]
fn spread_parameters_and_tied_tables_with_replicas_are_refused() {
    let refused = |case: &Case, zero| {
        let error = launch::threads(2 * case.stages, |rank| train(case, zero, 2, &rank)).unwrap_err();
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
