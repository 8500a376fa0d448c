//! Steps of a pipeline without flushes between them.
//!
//! The steps up to the next pause are one run of the pipeline, which is filled once and drained (flushed) at the end. An update is a step. PipeDream
//! updates after each micro-batch, which is the whole batch; PipeDream-2BW after all micro-batches of a batch. Gradients belong to
//! weights that are some updates old, so losses differ from those of one device, and depend on the number of ranks.
//!
//! Under a plan with replicas PipeDream's batch has as many micro-batches as bring each stage to the end of an update. A stage with fewer replicas
//! updates several times in a step, each time by the mean over the micro-batches of the update.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use phalanx_nn::autograd::{ContextMode, Var};
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Batch, Clip, Parameter, Schedule, grad_squares, norm_of};
use phalanx_parallel as parallel;
use phalanx_parallel::comm::Comm;
use phalanx_parallel::hybrid::StagedModel;
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::pipeline::ranks::{
    AsynchronousPipeline, Executed, Observer, SkipRoute, Spec, Stages, Weights,
};
use phalanx_parallel::pipeline::schedule::{
    self, double_buffered_over, vertical_sync_over, weight_stashing_over,
};
use phalanx_parallel::tensor_parallel::sum_squares;
use phalanx_tensor::{Context, DType, RngKey, Tensor, unpoisoned};

use super::optimizers::Optimizers;
use super::second_look::listed;
use super::step::{BackgroundSaver, Outcome, StepReport, in_model_dtype, loss_value};
use crate::data::DataLoader;
use crate::run::Run;
use crate::staged_models::passed_on;
use crate::trace::RankTrace;
use crate::{Asynchronous, Result};

/// Runs steps as one run of the pipeline. Returns a report of each step, without its peak memory. All ranks call it.
pub(crate) fn run_asynchronously(
    kind: Asynchronous,
    run: &mut Run,
    steps: Range<u64>,
) -> Result<Vec<StepReport>> {
    let (mesh_rank, config, first) = (run.mesh_rank().clone(), run.config().clone(), steps.start);
    let interval = config.layout.micro_batches;
    let count = (steps.end - steps.start) as usize;
    let line = mesh_rank.groups.along(Axis::Pp);
    let plan = plan(kind, &config.layout.replicas(), interval, count * interval)?;
    // The model of one stage recomputes its blocks by itself.
    let stages = plan.schedule.stages();
    let mode = if stages == 1 { RecomputeMode::Never } else { config.layout.recompute };
    let mut pipeline = AsynchronousPipeline::new(&plan, line.clone(), mesh_rank.device)?.recompute(mode);
    if config.layout.scatter_gather {
        pipeline = pipeline.scatter_gather(mesh_rank.groups.along(Axis::Tp));
    }
    let pipeline = match observer(&run.trace, first, interval) {
        Some(observer) => pipeline.observer(observer),
        None => pipeline,
    };
    let loader = run.loader(mesh_rank.device, first)?;
    let feed = BatchFeed {
        loader,
        dtype: config.dtype,
        next: first,
        read: BTreeMap::new(),
        kept: line.size() as u64 + 1,
    };
    let scales = steps.clone().map(|step| 1.0 / run.counted_in(step) as f64).collect();
    let (model, seed) = (run.model.clone(), config.seed);
    let (feed, failed) = (Mutex::new(feed), Mutex::new(None));
    let stage = plan.schedule.stages_of(line.rank()).next().unwrap_or_default();
    let updates = interval / plan.interval_of(stage);
    let parts = parts_of_updates(run, steps.clone(), plan.interval_of(stage), updates)?;
    let (losses, last) = (Mutex::default(), stages - 1);
    let work = Arc::new(StageWork { model, feed, first, interval, last, losses, scales, seed, failed });
    let mut optimizer = StageOptimizer {
        work: &work,
        micro_batches: plan.interval_of(stage),
        parameters: run.model.parameters(),
        optimizers: &mut run.optimizers,
        saver: &run.setup.saver,
        cut: mesh_rank.groups.along(Axis::Tp),
        rates: config.lr,
        first,
        updates,
        parts,
        lr_factor: run.plateau.lr_factor,
        clip: config.clip,
        norms: Vec::new(),
        ends: vec![Instant::now()],
    };
    let failed = |error: crate::Error| match *unpoisoned(work.failed.lock()) {
        // The error's text has the step already.
        Some(_) => error,
        None => error.in_step(first),
    };
    let losses = pipeline.train(&work, &mut optimizer).map_err(|e| failed(e.into()))?;
    let StageOptimizer { norms, ends, .. } = optimizer;
    let mut reports = Vec::new();
    for (i, step) in steps.enumerate() {
        // Only the last stage has losses.
        let own = losses.iter().skip(i * interval).take(interval);
        let own = own.map(loss_value).try_fold(0.0, |sum, loss| Ok::<_, crate::Error>(sum + loss?))?;
        let sum = |own: f64| mesh_rank.sum(if mesh_rank.counts_loss() { own } else { 0.0 });
        // Replicas of a stage have the same norms. Several updates of a step count by their mean.
        let counts = plan.schedule.ranks_of(stage).start == line.rank();
        let squares: f64 = norms[i * updates..][..updates].iter().map(|norm| norm * norm).sum();
        let square = if counts { squares / updates as f64 } else { 0.0 };
        let outcome = Outcome { loss: sum(own)?, grad_norm: sum(square)?.sqrt() };
        let seconds = (ends[(i + 1) * updates] - ends[i * updates]).as_secs_f64();
        reports.push(StepReport { step, outcome, seconds, peak: 0 });
    }
    Ok(reports)
}

fn plan(
    kind: Asynchronous,
    replicas: &[usize],
    interval: usize,
    micro_batches: usize,
) -> Result<schedule::Asynchronous> {
    let plan = match kind {
        Asynchronous::WeightStashing => weight_stashing_over(replicas, micro_batches),
        Asynchronous::VerticalSync => vertical_sync_over(replicas, micro_batches),
        Asynchronous::DoubleBuffered => double_buffered_over(replicas, interval, micro_batches),
    };
    Ok(plan.map_err(parallel::Error::from)?)
}

/// The factors that make a stage's gradients those of an update's mean: losses are divided by the tokens of the batch, of which an update has
/// a part.
fn parts_of_updates(run: &Run, steps: Range<u64>, micro_batches: usize, updates: usize) -> Result<Vec<f64>> {
    if updates == 1 || run.setup.data.samples.counted(0).is_none() {
        return Ok(vec![updates as f64; (steps.end - steps.start) as usize * updates]);
    }
    let rows = run.micro_batch_rows()?;
    let mut parts = Vec::new();
    for step in steps {
        for rows in rows.chunks(micro_batches) {
            let own: usize = rows.iter().map(|rows| run.counted(step, rows.clone())).sum();
            parts.push(run.counted_in(step) as f64 / own as f64);
        }
    }
    Ok(parts)
}

/// An observer that traces a rank's actions under the numbers of their steps.
fn observer(trace: &RankTrace, first: u64, interval: usize) -> Option<Observer> {
    let (inner, trace) = (trace.actions()?, trace.clone());
    Some(Arc::new(move |mut done: Executed| {
        trace.begin(first + (done.action.micro_batch / interval) as u64);
        done.action.micro_batch %= interval;
        inner(done);
    }))
}

/// The forward passes of the steps; the pipeline runs the backward passes.
struct StageWork {
    model: Arc<dyn StagedModel>,
    feed: Mutex<BatchFeed>,
    first: u64,
    interval: usize,
    /// The last stage, and the losses of its micro-batches since the update before.
    last: usize,
    losses: Mutex<BTreeMap<usize, Tensor>>,
    /// For each step 1 / (rows or tokens of its batch that count).
    scales: Vec<f64>,
    seed: u64,
    /// The step of this rank's first failed pass.
    failed: Mutex<Option<u64>>,
}

/// The batches of the steps that overlap now.
struct BatchFeed {
    loader: DataLoader,
    dtype: DType,
    next: u64,
    read: BTreeMap<u64, Vec<Batch>>,
    /// How many steps may overlap.
    kept: u64,
}

impl BatchFeed {
    fn batch(&mut self, step: u64, micro_batch: usize) -> parallel::Result<Batch> {
        while self.next <= step {
            let rows = self.loader.next_step().map_err(passed_on)?;
            let rows = rows.into_iter().map(|batch| in_model_dtype(batch, self.dtype));
            let rows = rows.collect::<Result<Vec<_>>>().map_err(passed_on)?;
            self.read.insert(self.next, rows);
            self.next += 1;
            self.read.retain(|step, _| step + self.kept >= self.next);
        }
        let gone = || parallel::Error::Config(format!("the batch of step {step} is not here"));
        self.read.get(&step).and_then(|step| step.get(micro_batch)).cloned().ok_or_else(gone)
    }
}

impl StageWork {
    fn batch(&self, micro_batch: usize) -> parallel::Result<(u64, Batch)> {
        let step = self.first + (micro_batch / self.interval) as u64;
        let mut feed = unpoisoned(self.feed.lock());
        let batch = feed.batch(step, micro_batch % self.interval);
        Ok((step, batch.map_err(|error| self.fails(step, error))?))
    }

    /// The error with its step's number. Errors of other ranks have theirs.
    fn fails(&self, step: u64, error: parallel::Error) -> parallel::Error {
        if matches!(error, parallel::Error::Comm(_)) {
            return error;
        }
        unpoisoned(self.failed.lock()).get_or_insert(step);
        parallel::Error::Config(format!("step {step}: {error}"))
    }
}

impl Stages for StageWork {
    fn forward_values(&self, stage: usize, micro_batch: usize, inputs: &[Var]) -> parallel::Result<Vec<Var>> {
        let (step, batch) = self.batch(micro_batch)?;
        let _context = Context::with(|c| {
            c.set_train(true);
            c.batch_offset = batch.first_row as u64;
            c.rng = RngKey { seed: self.seed, step };
        });
        let values = self.model.run_values(stage, inputs, &batch, self.scales[(step - self.first) as usize]);
        let values = values.map_err(|error| self.fails(step, error))?;
        if let (true, Some(loss)) = (stage == self.last, values.first()) {
            unpoisoned(self.losses.lock()).insert(micro_batch, loss.tensor().clone());
        }
        Ok(values)
    }

    fn input_specs(&self, stage: usize, micro_batch: usize) -> Option<Vec<Spec>> {
        let (_, batch) = self.batch(micro_batch).ok()?;
        self.model.streams(stage, &batch)
    }

    fn skips(&self) -> &[SkipRoute] {
        self.model.skips()
    }
}

/// The optimizer steps of a rank's stage.
struct StageOptimizer<'a> {
    work: &'a StageWork,
    /// How many micro-batches an update has.
    micro_batches: usize,
    parameters: Vec<Parameter>,
    optimizers: &'a mut Optimizers,
    saver: &'a BackgroundSaver,
    /// The tensor-parallel ranks.
    cut: &'a Comm,
    rates: Schedule,
    first: u64,
    /// How many updates the stage makes in a step.
    updates: usize,
    /// What the gradients of each update are multiplied by.
    parts: Vec<f64>,
    /// The factor of the learning rate after plateaus.
    lr_factor: f64,
    clip: Option<f64>,
    /// The norm of each update's gradients of this stage.
    norms: Vec<f64>,
    /// When the run began, and when each update was over.
    ends: Vec<Instant>,
}

impl StageOptimizer<'_> {
    /// Where the numbers of an update that is not made come from, as the end of a sentence. The passes cannot be repeated: other stages
    /// have gone on, with other versions of their weights.
    fn cause(&self, update: usize) -> Result<String> {
        let squares = grad_squares(&self.parameters)?;
        let sums = squares.sums.to_vec::<f64>()?.into_iter().zip(&squares.of);
        let odd: Vec<String> =
            sums.filter(|(sum, _)| !sum.is_finite()).map(|(_, of)| of.name.to_string()).collect();
        let mut told = match odd.first() {
            Some(first) => {
                let layer = first.rsplit_once('.').map_or("the model", |(layer, _)| layer);
                format!("; gradients that are not finite: {}, the first in layer `{layer}`", listed(&odd))
            }
            None => "; this rank's own gradients are finite".into(),
        };
        for (number, loss) in unpoisoned(self.work.losses.lock()).iter() {
            let (loss, number) = (loss_value(loss)?, number % self.work.interval);
            if !loss.is_finite() {
                return Ok(told + &format!("; the loss of micro-batch {number} is {loss}"));
            }
        }
        let first = update % self.updates * self.micro_batches;
        told += &match self.micro_batches {
            1 => format!("; they are those of micro-batch {first}"),
            count => format!(
                "; they are the sum of micro-batches {first} to {}, of which it is not known which is wrong",
                first + count - 1
            ),
        };
        Ok(told)
    }
}

impl Weights for StageOptimizer<'_> {
    fn parameters(&self, _stage: usize) -> parallel::Result<Vec<Parameter>> {
        Ok(self.parameters.clone())
    }

    fn update(&mut self, _stage: usize, update: usize) -> parallel::Result<()> {
        let step = self.first + (update / self.updates) as u64;
        let part = self.parts[update];
        let norm = part * norm_of(&sum_squares(grad_squares(&self.parameters)?, self.cut)?)?;
        if !norm.is_finite() {
            let cause = self.cause(update).map_err(passed_on)?;
            let why = format!(
                "step {step}: the norm of the gradients of this stage is {norm}; it is not updated{cause}"
            );
            return Err(parallel::Error::Config(why));
        }
        let mut updated = || -> Result<()> {
            self.saver.release()?;
            self.optimizers.set_lr(&self.rates, step, self.lr_factor);
            self.optimizers.step_scaled(part * self.clip.map_or(1.0, |clip| Clip::new(norm, clip).scale))
        };
        updated().map_err(passed_on)?;
        unpoisoned(self.work.losses.lock()).clear();
        self.norms.push(norm);
        self.ends.push(Instant::now());
        Ok(())
    }
}
