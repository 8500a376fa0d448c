//! [`AsynchronousPipeline`]: one rank's part of a schedule without flushes.

use std::sync::Arc;

use phalanx_nn::Parameter;
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Context, Device, Tensor};

use super::run::Run;
use super::updates::Updates;
use super::{Observer, Pipeline, Stages};
use crate::Result;
use crate::comm::Comm;
use crate::pipeline::schedule::Asynchronous;

/// What a schedule without flushes updates: the weights of a rank's stages, and how.
pub trait Weights {
    /// The parameters of a stage: all that its passes use and [`Weights::update`] writes. Frozen ones may be left out.
    ///
    /// # Errors
    /// If the stage is not here.
    fn parameters(&self, stage: usize) -> Result<Vec<Parameter>>;

    /// The optimizer's step: writes the parameters of a stage in place, by gradients that are the sums over the micro-batches of
    /// update number `update`, counted from 0 in each [`AsynchronousPipeline::train`]. Gradients are forgotten after it.
    ///
    /// They are of the weights that the schedule says, some updates old, and of this stage alone: other stages have come to other
    /// updates. So a norm over all stages does not exist here; a bound can be set to the norm of each stage's.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the run of all ranks.
    fn update(&mut self, stage: usize, update: usize) -> Result<()>;
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
    pub(super) pipeline: Pipeline,
    pub(super) plan: Asynchronous,
    /// The ranks of the first stage and the last, on these, if they are two.
    pub(super) ends: Option<Comm>,
}

impl AsynchronousPipeline {
    /// Rank `comm.rank()`'s part of a schedule, which gets its transfers if it has none; `device` is where its stages compute.
    ///
    /// # Errors
    /// If the schedule is of another number of ranks than the group, or as [`Asynchronous::verify`], by which it is checked.
    pub fn new(plan: &Asynchronous, comm: Comm, device: Device) -> Result<AsynchronousPipeline> {
        plan.verify(usize::MAX)?;
        let pipeline = Pipeline::of(&plan.schedule, comm, device)?;
        let (comm, placement) = (&pipeline.comm, &plan.schedule.placement);
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
        Run::new(&self.pipeline, work).updated_by(Updates::new(self, weights)?).run(|_| true)
    }

    /// See [`Pipeline::evaluate`]; with the weights as they are.
    ///
    /// # Errors
    /// As [`Pipeline::evaluate`].
    pub fn evaluate(&self, work: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        self.pipeline.evaluate(work)
    }
}
