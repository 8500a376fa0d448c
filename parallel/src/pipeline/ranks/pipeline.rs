//! One rank's part of a schedule: [`Pipeline`] runs one with a flush, [`AsynchronousPipeline`] one without.

use std::sync::Arc;

use phalanx_nn::autograd::no_grad;
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Context, Device, Tensor};

use super::executor::{Executor, Run};
use super::versions::Updates;
use super::{Observer, Stages, Weights};
use crate::comm::Comm;
use crate::pipeline::schedule::{Asynchronous, Kind, Schedule, receipts, verify, with_transfers};
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
/// struct Work(Linear);
///
/// impl Stages for Work {
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
///     let losses = pipeline.train(&Arc::new(Work(linear)))?;
///     Ok(losses.len())
/// });
/// assert_eq!(losses.unwrap(), [0, 3]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct Pipeline {
    executor: Executor,
}

impl Pipeline {
    /// Rank `comm.rank()`'s part of a schedule, which gets its transfers if it has none; `device` is where its stages compute.
    ///
    /// # Errors
    /// If the schedule is of another number of ranks than the group or has updates, or as [`verify`], by which it is checked.
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
            // Here no send waits for its receive.
            true => verify(schedule, usize::MAX).map(|_| schedule.clone())?,
            false => with_transfers(schedule)?,
        };
        let (recompute, observer) = (RecomputeMode::Never, None);
        Ok(Pipeline { executor: Executor { schedule, comm, device, recompute, observer, receipts: None } })
    }

    /// Lets stages keep only their inputs and compute the rest again in backward: never (unless set), always, or of all
    /// micro-batches but the last of the schedule, counted as they are, whatever the order of backward passes. A stage is
    /// recomputed as a whole, while the gradient of its output is on its way.
    #[must_use]
    pub fn recompute(self, mode: RecomputeMode) -> Pipeline {
        Pipeline { executor: Executor { recompute: mode, ..self.executor } }
    }

    /// Lets somebody hear of this rank's actions.
    #[must_use]
    pub fn observer(self, observer: Observer) -> Pipeline {
        Pipeline { executor: Executor { observer: Some(observer), ..self.executor } }
    }

    /// Holds what is sent as long as its receiver may need to come to it. A rank without peers (on meta devices) then holds
    /// the most that one with peers may, however slow they are; otherwise what it sends is gone at once.
    ///
    /// # Errors
    /// As [`receipts`].
    pub fn with_slow_receivers(self) -> Result<Pipeline> {
        let own = receipts(&self.executor.schedule)?.swap_remove(self.executor.comm.rank());
        Ok(Pipeline { executor: Executor { receipts: Some(own), ..self.executor } })
    }

    /// The stages of this rank, ascending.
    pub fn stages(&self) -> Vec<usize> {
        self.executor.schedule.stages_of(self.executor.comm.rank()).collect()
    }

    /// Runs the schedule. Afterwards the parameters' gradients are those of all micro-batches, added to what was there. Returns the
    /// micro-batches' losses, without a graph, on the rank of the last stage; elsewhere none.
    ///
    /// # Errors
    /// What goes wrong in an action here, panics included, or anywhere else; all ranks hear of it.
    pub fn train(&self, work: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        let _pass = Context::one_pass();
        Run::new(&self.executor, work).run(|_| true)
    }

    /// Runs the schedule's forward passes alone, without gradients. Returns the losses as [`Pipeline::train`] does.
    ///
    /// # Errors
    /// As [`Pipeline::train`].
    pub fn evaluate(&self, work: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        let _no_grad = no_grad();
        Run::new(&self.executor, work)
            .run(|kind| matches!(kind, Kind::Forward | Kind::SendForward | Kind::RecvForward))
    }
}

/// One rank's part of a schedule without flushes, PipeDream's
/// ([`weight_stashing`](crate::pipeline::schedule::weight_stashing)) or PipeDream-2BW's
/// ([`double_buffered`](crate::pipeline::schedule::double_buffered)), over the group of a pipeline's ranks. Nothing waits for a
/// flush, so there is no bubble but the first; the price is gradients of weights some updates old, which is **not what one
/// device computes**. [`Pipeline`] is what trains as one device does.
///
/// ```text
///   F m   the parameters hold the version that the plan has for m ----.  a version that is needed again is kept,
///   B m   they hold the same again, recomputation included <----------'  and freed after the last such B
///   U m   the newest version is copied if it is needed again; Weights::update writes the copy
/// ```
/// A **tied table**, at the first stage and the last, belongs to the first: a micro-batch uses at both ends the version that the
/// first stage has for it. In each of its updates the first stage adds the head's gradients, which the last has sent, to the
/// embedding's, takes the step, and sends the new table, which the last stage holds from the micro-batch on that uses it. So the
/// last stage's copy has no gradient when that stage is updated, and optimizers leave it alone.
///
/// **Data parallelism**, [`Ddp`](crate::data_parallel::Ddp) over the ranks with the same stage, is [`Stages::no_sync`] and, in
/// [`Weights::update`], `finish`, the step, `updated`, `zero_grad`, and `begin` for the update after it; the first `begin` comes
/// before the run. Refused are tied tables with replicas, whose buckets would wait for gradients that the other stage takes, and
/// parameters in buffers with others ([`Zero`](crate::sharded::Zero)'s), which have no versions.
///
/// Weights are stashed, other state is not: buffers such as running statistics go on from micro-batch to micro-batch. One
/// call is a run from full to empty: it begins with what the parameters hold as version 0 and leaves them holding the newest.
/// So between two calls there is a flush, at which a checkpoint can be saved, and the first micro-batches after it use newer
/// weights than they would have without. Gradients of micro-batches left over after the last whole interval stay in the
/// parameters, where the next call adds to them.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::{Group, Linear, LinearConfig, Module, Optimizer, Parameter, Parameters, Rule, Scope, Sgd, autograd::Var};
/// use phalanx_parallel::pipeline::ranks::{AsynchronousPipeline, Stages, Weights};
/// use phalanx_parallel::pipeline::schedule::weight_stashing;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::DType;
///
/// struct Work(Linear);
///
/// impl Stages for Work {
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
///     Ok(pipeline.train(&Arc::new(Work(linear)), &mut descent)?.len())
/// });
/// assert_eq!(losses.unwrap(), [0, 6]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct AsynchronousPipeline {
    pipeline: Pipeline,
    plan: Asynchronous,
    /// The ranks of the first stage and the last, on these, if they are two.
    ends: Option<Comm>,
}

impl AsynchronousPipeline {
    /// Rank `comm.rank()`'s part of a schedule, which gets its transfers if it has none; `device` is where its stages compute.
    ///
    /// # Errors
    /// If the schedule is of another number of ranks than the group, or as [`Asynchronous::verify`], by which it is checked.
    pub fn new(plan: &Asynchronous, comm: Comm, device: Device) -> Result<AsynchronousPipeline> {
        plan.verify(usize::MAX)?;
        let pipeline = Pipeline::of(&plan.schedule, comm, device)?;
        let (comm, placement) = (&pipeline.executor.comm, &plan.schedule.placement);
        let ends = [placement[0], placement[placement.len() - 1]];
        let has_ends = ends[0] != ends[1] && ends.contains(&comm.rank());
        let ends = has_ends.then(|| comm.group(&ends)).transpose()?;
        Ok(AsynchronousPipeline { pipeline, plan: plan.clone(), ends })
    }

    /// See [`Pipeline::recompute`]; with the version of the weights that the forward pass used.
    #[must_use]
    pub fn recompute(self, mode: RecomputeMode) -> AsynchronousPipeline {
        AsynchronousPipeline { pipeline: self.pipeline.recompute(mode), ..self }
    }

    /// Lets somebody hear of this rank's actions, updates included.
    #[must_use]
    pub fn observer(self, observer: Observer) -> AsynchronousPipeline {
        AsynchronousPipeline { pipeline: self.pipeline.observer(observer), ..self }
    }

    /// The stages of this rank, ascending.
    pub fn stages(&self) -> Vec<usize> {
        self.pipeline.stages()
    }

    /// Runs the schedule, updates included. Returns the micro-batches' losses, without a graph, on the rank of the last stage;
    /// elsewhere none.
    ///
    /// # Errors
    /// What goes wrong in an action here, panics included, or anywhere else; all ranks hear of it. Also if two stages share a
    /// parameter, of which each would want another version, or if a parameter has no storage of its own (`Zero`'s).
    pub fn train<S: Stages>(&self, work: &Arc<S>, weights: &mut dyn Weights) -> Result<Vec<Tensor>> {
        let _pass = Context::one_pass();
        let updates = Updates::new(&self.plan, self.stages(), self.ends.as_ref(), weights)?;
        Run::new(&self.pipeline.executor, work).updated_by(updates).run(|_| true)
    }

    /// See [`Pipeline::evaluate`]; with the weights as they are.
    ///
    /// # Errors
    /// As [`Pipeline::evaluate`].
    pub fn evaluate(&self, work: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        self.pipeline.evaluate(work)
    }
}
