//! One rank's part of a schedule: [`Pipeline`] runs one with a flush, [`AsynchronousPipeline`] one without.

use std::sync::Arc;

use phalanx_nn::autograd::no_grad;
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Context, Device, Tensor};

use super::executor::{Executor, ScheduleRun};
use super::parts::Parts;
use super::tied_versions::Ends;
use super::versions::Updates;
use super::{Observer, Stages, Weights};
use crate::comm::Comm;
use crate::pipeline::schedule::{
    ActionKind, Asynchronous, Schedule, acknowledgements, verify, with_transfers,
};
use crate::{Error, Result};

/// One rank's part of a schedule, over the group of a pipeline's ranks.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::{Linear, LinearConfig, Module, Parameters, Scope, autograd::Var};
/// use phalanx_parallel::pipeline::ranks::{Pipeline, Stages};
/// use phalanx_parallel::pipeline::schedule::one_f_one_b;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::DType;
///
/// struct TwoLayers(Linear);
///
/// impl Stages for TwoLayers {
///     fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
///         let device = self.0.parameters()[0].device();
///         let x = Var::from_slice(&[1.0 + micro_batch as f32], &[1, 1], device)?;
///         let y = self.0.forward(input.unwrap_or(&x))?;
///         Ok(if stage == 1 { y.sum_all()? } else { y })
///     }
/// }
///
/// let schedule = one_f_one_b(2, 3)?;
/// let losses = launch::threads(2, |rank| -> Result<_> {
///     let linear = LinearConfig::new(1, 1).init(&Scope::new(7, DType::F32, rank.device()))?;
///     let pipeline = Pipeline::new(&schedule, rank.comm().clone(), rank.device())?;
///     let losses = pipeline.train(&Arc::new(TwoLayers(linear)))?;
///     Ok(losses.len())
/// });
/// assert_eq!(losses.unwrap(), [0, 3]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct Pipeline {
    executor: Executor,
}

impl Pipeline {
    /// Rank `comm.rank()`'s part of a schedule, whose stages compute on `device`. A schedule without transfers gets them.
    ///
    /// # Errors
    /// If the schedule has updates or another number of ranks than the group, or as [`verify`], which checks it.
    pub fn new(schedule: &Schedule, comm: Comm, device: Device) -> Result<Pipeline> {
        if schedule.has_updates() {
            let why = "pipeline: got a schedule with updates, wanted one without; `AsynchronousPipeline` runs those";
            return Err(Error::Config(why.into()));
        }
        Pipeline::of(schedule, comm, device)
    }

    fn of(schedule: &Schedule, comm: Comm, device: Device) -> Result<Pipeline> {
        if schedule.ranks.len() != comm.size() {
            let (got, wanted) = (schedule.ranks.len(), comm.size());
            return Err(Error::Config(format!(
                "pipeline: got a schedule of {got} ranks for a group of {wanted}"
            )));
        }
        let schedule = match schedule.has_transfers() {
            // The executor's sends are asynchronous, so any number may be under way.
            true => verify(schedule, usize::MAX).map(|_| schedule.clone())?,
            false => with_transfers(schedule)?,
        };
        let (recompute, observer) = (RecomputeMode::Never, None);
        Ok(Pipeline {
            executor: Executor {
                schedule,
                comm,
                device,
                recompute,
                observer,
                acknowledgements: None,
                parts: None,
            },
        })
    }

    /// Sets of which micro-batches a stage keeps only its input, and computes the rest again in backward. The default is
    /// [`RecomputeMode::Never`]; [`RecomputeMode::ExceptLast`] keeps the values of the micro-batch with the highest number. A
    /// stage is recomputed as a whole, while the gradient of its output is being received.
    #[must_use]
    pub fn recompute(self, mode: RecomputeMode) -> Pipeline {
        Pipeline { executor: Executor { recompute: mode, ..self.executor } }
    }

    /// Sends activations and gradients in parts. All ranks of the group have this stage and hold the same activations, bit for bit, as
    /// the ranks of [`TensorParallel`](crate::tensor_parallel::TensorParallel) without sequence parallelism do. Of `t` ranks each sends
    /// its `1 / t` of a tensor's elements to its own neighbour, and the receivers gather the parts over their group. So what crosses
    /// from stage to stage is sent once and not `t` times. All ranks of all stages set it.
    ///
    /// ```text
    ///   stage 0                     stage 1
    ///   rank 0   [a b]  -- a -->    rank 0   a .   -+
    ///                                               +-- all-gather -->  [a b] on both
    ///   rank 1   [a b]  -- b -->    rank 1   . b   -+
    /// ```
    /// Source: Narayanan et al.: Efficient large-scale language model training on GPU clusters (2021), section 4.1.
    #[must_use]
    pub fn scatter_gather(self, group: &Comm) -> Pipeline {
        Pipeline { executor: Executor { parts: Parts::new(group), ..self.executor } }
    }

    /// Sets an observer of this rank's actions.
    #[must_use]
    pub fn observer(self, observer: Observer) -> Pipeline {
        Pipeline { executor: Executor { observer: Some(observer), ..self.executor } }
    }

    /// Holds each sent tensor until its receiver has certainly received it, however slow the receiver is. A rank without peers
    /// (on meta devices) then has the largest memory that it could have with peers; without this its sends free their tensors
    /// at once.
    ///
    /// # Errors
    /// As [`acknowledgements`].
    pub fn with_slow_receivers(self) -> Result<Pipeline> {
        let own = acknowledgements(&self.executor.schedule)?.swap_remove(self.executor.comm.rank());
        Ok(Pipeline { executor: Executor { acknowledgements: Some(own), ..self.executor } })
    }

    /// The stages of this rank, ascending.
    pub fn stages(&self) -> Vec<usize> {
        self.executor.schedule.stages_of(self.executor.comm.rank()).collect()
    }

    /// Runs the schedule, which adds the gradients of all micro-batches to the parameters' gradients. Returns the micro-batches'
    /// losses, without a graph, on the rank of the last stage, and an empty list on other ranks.
    ///
    /// # Errors
    /// An error or panic in an action of any rank; every rank gets it.
    pub fn train(&self, stages: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        let _pass = Context::one_pass();
        ScheduleRun::new(&self.executor, stages).run(|_| true)
    }

    /// Runs the schedule's forward passes alone, without gradients. Returns the losses as [`Pipeline::train`] does.
    ///
    /// # Errors
    /// As [`Pipeline::train`].
    pub fn evaluate(&self, stages: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        let _no_grad = no_grad();
        ScheduleRun::new(&self.executor, stages).run(|kind| {
            matches!(kind, ActionKind::Forward | ActionKind::SendForward | ActionKind::RecvForward)
        })
    }
}

/// One rank's part of a schedule without flushes, PipeDream's
/// ([`weight_stashing`](crate::pipeline::schedule::weight_stashing)) or PipeDream-2BW's
/// ([`double_buffered`](crate::pipeline::schedule::double_buffered)), over the group of a pipeline's ranks. Without flushes there
/// is no bubble but the first. In exchange, gradients are those of weights some updates old, which is **not what one device
/// computes**. [`Pipeline`] trains as one device does.
///
/// ```text
///   F m   the parameters hold the version that the plan has for m ----.  a version that is needed again is kept,
///   B m   they hold the same again, recomputation included <----------'  and freed after the last such B
///   U m   the newest version is copied if it is needed again; Weights::update writes the copy
/// ```
/// A **tied table**, at the first stage and the last, belongs to the first: a micro-batch uses at both ends the version that the
/// first stage has for it. In each update the first stage receives the head's gradients from the last stage, adds them to the
/// embedding's, takes the step and sends the new table back. The last stage uses it from the micro-batch on that needs it. The
/// last stage's copy has no gradient when that stage is updated, so optimizers do not change it.
///
/// **Stages with replicas** ([`weight_stashing_over`](crate::pipeline::schedule::weight_stashing_over) and its like): the replicas of a
/// stage add their gradients in the order of the micro-batches before each update, which all of them make alike.
///
/// **Data parallelism**, [`Ddp`](crate::data_parallel::Ddp) over the ranks with the same stage, needs [`Stages::no_sync`] and, in
/// [`Weights::update`], the calls `finish`, the step, `updated`, `zero_grad`, and `begin` for the next update. The first `begin`
/// comes before the run. Two things are refused: tied tables with replicas, since their buckets would wait for gradients that
/// the other stage takes, and parameters that share a buffer ([`Zero`](crate::sharded::Zero)'s), which have no versions.
///
/// Weights are stashed, other state is not: buffers such as running statistics change from micro-batch to micro-batch. A call
/// fills the pipeline and empties it. Version 0 is what the parameters hold before it, and afterwards they hold the newest
/// version. So there is a flush between two calls, at which a checkpoint can be saved, and the first micro-batches after it
/// use newer weights than they would have without. The gradients of micro-batches that are left over after the last whole
/// interval stay in the parameters, and the next call adds to them.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::{Group, Linear, LinearConfig, Module, Optimizer, Parameter, Parameters, Rule, Scope, Sgd, autograd::Var};
/// use phalanx_parallel::pipeline::ranks::{AsynchronousPipeline, Stages, Weights};
/// use phalanx_parallel::pipeline::schedule::weight_stashing;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::DType;
///
/// struct TwoLayers(Linear);
///
/// impl Stages for TwoLayers {
///     fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
///         let x = Var::from_slice(&[micro_batch as f32], &[1, 1], self.0.parameters()[0].device())?;
///         let y = self.0.forward(input.unwrap_or(&x))?;
///         Ok(if stage == 1 { y.square()?.sum_all()? } else { y })
///     }
/// }
///
/// struct Descent(Optimizer<Sgd>);
///
/// impl Weights for Descent {
///     fn parameters(&self, _stage: usize) -> Result<Vec<Parameter>> {
///         Ok(self.0.parameters())
///     }
///     fn update(&mut self, _stage: usize, _update: usize) -> Result<()> {
///         Ok(self.0.step()?)
///     }
/// }
///
/// let plan = weight_stashing(2, 6)?; // six micro-batches, an update after each
/// let losses = launch::threads(2, |rank| -> Result<_> {
///     let linear = LinearConfig::new(1, 1).init(&Scope::new(7, DType::F32, rank.device()))?;
///     let mut descent = Descent(Sgd::default().init(vec![Group::new(linear.parameters(), 1e-3)])?);
///     let pipeline = AsynchronousPipeline::new(&plan, rank.comm().clone(), rank.device())?;
///     Ok(pipeline.train(&Arc::new(TwoLayers(linear)), &mut descent)?.len())
/// });
/// assert_eq!(losses.unwrap(), [0, 6]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct AsynchronousPipeline {
    pipeline: Pipeline,
    plan: Asynchronous,
    /// The ranks of the first and the last stage, if these are two stages and this is one of the ranks.
    ends: Option<Ends>,
}

impl AsynchronousPipeline {
    /// Rank `comm.rank()`'s part of a schedule, whose stages compute on `device`. A schedule without transfers gets them.
    ///
    /// # Errors
    /// If the schedule has another number of ranks than the group, or as [`Asynchronous::verify`], which checks it.
    pub fn new(plan: &Asynchronous, comm: Comm, device: Device) -> Result<AsynchronousPipeline> {
        plan.verify(usize::MAX)?;
        let pipeline = Pipeline::of(&plan.schedule, comm, device)?;
        let ends = Ends::new(&plan.schedule, &pipeline.executor.comm)?;
        Ok(AsynchronousPipeline { pipeline, plan: plan.clone(), ends })
    }

    /// As [`Pipeline::recompute`]. A recomputation uses the weight version of the forward pass.
    #[must_use]
    pub fn recompute(self, mode: RecomputeMode) -> AsynchronousPipeline {
        AsynchronousPipeline { pipeline: self.pipeline.recompute(mode), ..self }
    }

    /// As [`Pipeline::scatter_gather`].
    #[must_use]
    pub fn scatter_gather(self, group: &Comm) -> AsynchronousPipeline {
        AsynchronousPipeline { pipeline: self.pipeline.scatter_gather(group), ..self }
    }

    /// Sets an observer of this rank's actions, updates included.
    #[must_use]
    pub fn observer(self, observer: Observer) -> AsynchronousPipeline {
        AsynchronousPipeline { pipeline: self.pipeline.observer(observer), ..self }
    }

    /// The stages of this rank, ascending.
    pub fn stages(&self) -> Vec<usize> {
        self.pipeline.stages()
    }

    /// Runs the schedule, updates included. Returns the micro-batches' losses, without a graph, on the rank of the last stage,
    /// and an empty list on other ranks.
    ///
    /// # Errors
    /// An error or panic in an action of any rank; every rank gets it. Also if two stages share a parameter, of which each would
    /// need another version, or if a parameter has no storage of its own (`Zero`'s).
    pub fn train<S: Stages>(&self, stages: &Arc<S>, weights: &mut dyn Weights) -> Result<Vec<Tensor>> {
        let _pass = Context::one_pass();
        let rank = self.pipeline.executor.comm.rank();
        let updates = Updates::new(&self.plan, rank, self.stages(), self.ends.as_ref(), weights)?;
        ScheduleRun::new(&self.pipeline.executor, stages).updated_by(updates).run(|_| true)
    }

    /// As [`Pipeline::evaluate`], with the weights that the parameters hold.
    ///
    /// # Errors
    /// As [`Pipeline::evaluate`].
    pub fn evaluate(&self, stages: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        self.pipeline.evaluate(stages)
    }
}
