//! [`Pipeline`]: one rank's part of a schedule.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_nn::autograd::no_grad;
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Context, Device, Tensor};

use super::Stages;
use super::run::Run;
use crate::comm::Comm;
use crate::pipeline::schedule::{Action, Kind, Schedule, receipts, verify, with_transfers};
use crate::{Error, Result};

/// An action that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Which.
    pub action: Action,
    /// When this rank came to it.
    pub started: Instant,
    /// When it was over; of a send, when its tensor was free again.
    pub ended: Instant,
}

/// Hears of actions that are over, on whatever thread ends them; it must be quick and not panic.
pub type Observer = Arc<dyn Fn(Executed) + Send + Sync>;

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
    pub(super) schedule: Schedule,
    pub(super) comm: Comm,
    pub(super) device: Device,
    pub(super) recompute: RecomputeMode,
    pub(super) observer: Option<Observer>,
    /// Of this rank's sends, the action by which they have certainly come; none if they need not be held until then.
    pub(super) receipts: Option<HashMap<Action, Option<Action>>>,
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

    pub(super) fn of(schedule: &Schedule, comm: Comm, device: Device) -> Result<Pipeline> {
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
        Ok(Pipeline {
            schedule,
            comm,
            device,
            recompute: RecomputeMode::Never,
            observer: None,
            receipts: None,
        })
    }

    /// Lets stages keep only their inputs and compute the rest again in backward: never (unless set), always, or of all
    /// micro-batches but the last of the schedule, counted as they are, whatever the order of backward passes. A stage is
    /// recomputed as a whole, while the gradient of its output is on its way.
    #[must_use]
    pub fn recompute(self, mode: RecomputeMode) -> Pipeline {
        Pipeline { recompute: mode, ..self }
    }

    /// Lets somebody hear of this rank's actions.
    #[must_use]
    pub fn observer(self, observer: Observer) -> Pipeline {
        Pipeline { observer: Some(observer), ..self }
    }

    /// Holds what is sent as long as its receiver may need to come to it. A rank without peers (on meta devices) then holds
    /// the most that one with peers may, however slow they are; otherwise what it sends is gone at once.
    ///
    /// # Errors
    /// As [`receipts`].
    pub fn with_slow_receivers(self) -> Result<Pipeline> {
        let own = receipts(&self.schedule)?.swap_remove(self.comm.rank());
        Ok(Pipeline { receipts: Some(own), ..self })
    }

    /// The stages of this rank, ascending.
    pub fn stages(&self) -> Vec<usize> {
        self.schedule.stages_of(self.comm.rank()).collect()
    }

    /// Runs the schedule. Afterwards the parameters' gradients are those of all micro-batches, added to what was there. Returns the
    /// micro-batches' losses, without a graph, on the rank of the last stage; elsewhere none.
    ///
    /// # Errors
    /// What goes wrong in an action here, panics included, or anywhere else; all ranks hear of it.
    pub fn train(&self, work: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        let _pass = Context::one_pass();
        Run::new(self, work).run(|_| true)
    }

    /// Runs the schedule's forward passes alone, without gradients. Returns the losses as [`Pipeline::train`] does.
    ///
    /// # Errors
    /// As [`Pipeline::train`].
    pub fn evaluate(&self, work: &Arc<impl Stages>) -> Result<Vec<Tensor>> {
        let _no_grad = no_grad();
        Run::new(self, work).run(|kind| matches!(kind, Kind::Forward | Kind::SendForward | Kind::RecvForward))
    }
}
