//! [`ScheduleRun`]: one rank carries out its list of actions, one after the other. [`Pipeline`](super::Pipeline) calls
//! [`ScheduleRun::run`]. The computations are here and call the caller's [`Stages`]; sends and receives are in `transfer.rs`, weight
//! versions in `versions.rs`.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

use phalanx_nn::autograd::{
    Leaf, Options, Recompute, Var, WeightWork, backward, backward_inputs, checkpoint_apart, is_grad_enabled,
    waiting,
};
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Category, DType, Device, Tensor};

use super::parts::Parts;
use super::skips::{join_inputs, join_outputs, split_inputs, split_outputs};
use super::transfer::take;
use super::versions::Updates;
use super::{Spec, Stages};
use crate::catch_panic::catch_panic;
use crate::comm::{Comm, Pending};
use crate::data_parallel::NoSync;
use crate::flight::{FlightRecorder, Operation, What};
use crate::pipeline::schedule::{Action, ActionKind, Schedule};
use crate::pipeline::{Cell, MicroBatch};
use crate::{Error, Result};

/// An action that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// The action.
    pub action: Action,
    /// When this rank began it.
    pub started: Instant,
    /// When it ended; of a send, when its tensor was free again.
    pub ended: Instant,
}

/// An observer of actions.
pub type Observer = crate::pipeline::Observer<Executed>;

/// One rank's part of a schedule, and the settings of its run.
pub(super) struct Executor {
    pub(super) schedule: Schedule,
    pub(super) comm: Comm,
    pub(super) device: Device,
    pub(super) recompute: RecomputeMode,
    pub(super) observer: Option<Observer>,
    /// For each send of this rank, the action by which the tensor has certainly been received. `None` if sent tensors need not
    /// be held until then.
    pub(super) acknowledgements: Option<HashMap<Action, Option<Action>>>,
    /// The ranks among which sent tensors are divided.
    pub(super) parts: Option<Parts>,
}

/// A schedule under way.
pub(super) struct ScheduleRun<'a, S> {
    pub(super) executor: &'a Executor,
    pub(super) stages: &'a Arc<S>,
    /// The tensors and graphs of each cell that later actions use.
    cells: HashMap<Cell, InFlight>,
    /// Sent tensors that are held for slow receivers, by the action that releases them.
    pub(super) held: HashMap<Option<Action>, Vec<Tensor>>,
    /// Sends that may still be under way.
    pub(super) sent: Vec<(Action, Pending)>,
    pub(super) losses: Vec<Option<Tensor>>,
    /// The leaves of this rank's stage, if it has replicas.
    pub(super) sums: Vec<Leaf>,
    /// The action after this one.
    pub(super) following: Option<Action>,
    /// The weight versions and updates, in a schedule without flushes.
    pub(super) updates: Option<Updates<'a>>,
}

impl<'a, S: Stages> ScheduleRun<'a, S> {
    pub(super) fn new(executor: &'a Executor, stages: &'a Arc<S>) -> ScheduleRun<'a, S> {
        let losses = vec![None; executor.schedule.micro_batches];
        let (cells, held) = (HashMap::new(), HashMap::new());
        ScheduleRun {
            executor,
            stages,
            cells,
            held,
            sent: Vec::new(),
            losses,
            sums: Vec::new(),
            following: None,
            updates: None,
        }
    }

    /// The run, with weight versions and updates.
    pub(super) fn updated_by(self, updates: Updates<'a>) -> ScheduleRun<'a, S> {
        ScheduleRun { updates: Some(updates), ..self }
    }

    /// Carries out the actions of these kinds, and returns the losses.
    pub(super) fn run(mut self, wanted: impl Fn(ActionKind) -> bool) -> Result<Vec<Tensor>> {
        let trains = wanted(ActionKind::Backward);
        if trains {
            self.at_the_ends(Self::begin_sums)?;
        }
        self.run_actions(wanted)?;
        if trains {
            self.at_the_ends(Self::share_last_sum)?;
        }
        self.at_the_ends(Self::collect_losses)?;
        self.reap_sends(true)?;
        self.updates.take().map_or(Ok(()), Updates::end)?;
        Ok(self.losses.into_iter().flatten().collect())
    }

    /// Runs what comes before or after all actions. If it fails, the run of all ranks ends.
    fn at_the_ends(&mut self, f: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        f(self).inspect_err(|error| self.executor.comm.fail(&error.to_string()))
    }

    fn run_actions(&mut self, wanted: impl Fn(ActionKind) -> bool) -> Result<()> {
        let Executor { schedule, comm, observer, .. } = self.executor;
        let mut actions = schedule.ranks[comm.rank()].iter().filter(|action| wanted(action.kind)).peekable();
        while let Some(&action) = actions.next() {
            self.following = actions.peek().map(|&&action| action);
            let started = Instant::now();
            let noted = note(comm, action);
            let done = self.guarded(action, |run| run.perform(action));
            noted.into_iter().for_each(|(recorder, number)| {
                recorder.ended(number, None, done.as_ref().err().map(ToString::to_string));
            });
            done?;
            self.forget(action);
            self.held.remove(&Some(action));
            let ended = Instant::now();
            self.reap_sends(false)?;
            // A send is reported when it ends (`send`).
            let reports = !matches!(action.kind, ActionKind::SendForward | ActionKind::SendBackward);
            if let Some(observer) = observer.as_ref().filter(|_| reports) {
                observer(Executed { action, started, ended });
            }
        }
        self.reap_sends(true)
    }

    /// Runs `f`. If it fails or panics, the error names the action, and the run of all ranks ends.
    fn guarded<T>(&mut self, action: Action, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let comm = &self.executor.comm;
        catch_panic(|| f(self)).map_err(|cause| {
            let error = Error::Action { action: action.to_string(), cause };
            comm.fail(&error.to_string());
            error
        })
    }

    /// Drops the entry of a cell of which nothing is kept.
    fn forget(&mut self, Action { stage, micro_batch, .. }: Action) {
        if self.cells.get(&Cell { stage, micro_batch }).is_some_and(InFlight::is_empty) {
            self.cells.remove(&Cell { stage, micro_batch });
        }
    }

    /// Drops sends that have ended. With `all`, waits for all sends.
    fn reap_sends(&mut self, all: bool) -> Result<()> {
        let is_over = |(_, send): &(Action, Pending)| all || send.is_done();
        let (over, under_way): (Vec<_>, Vec<_>) = self.sent.drain(..).partition(is_over);
        self.sent = under_way;
        over.into_iter()
            .try_for_each(|(action, send)| self.guarded(action, |_| Ok(waiting("send", || send.wait())?)))
    }

    /// Carries out an action, under the weight version that the schedule says.
    fn perform(&mut self, action: Action) -> Result<()> {
        self.updates.iter_mut().try_for_each(|updates| updates.enter(action))?;
        self.act(action)?;
        self.updates.iter_mut().try_for_each(|updates| updates.leave(action))
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action.kind {
            ActionKind::Forward => self.forward(action),
            ActionKind::Input => self.backward(action),
            ActionKind::Backward => self.backward(action).and_then(|()| self.add_in_order(action)),
            ActionKind::Weight => self.weight(action).and_then(|()| self.add_in_order(action)),
            ActionKind::Update => {
                self.share_sums(action)?;
                self.updates.iter_mut().try_for_each(|updates| updates.update(action))
            }
            ActionKind::SendForward => self.send_forward(action),
            ActionKind::RecvForward => self.receive_forward(action),
            ActionKind::SendBackward => self.send_backward(action),
            ActionKind::RecvBackward => self.receive_backward(action),
        }
    }
}

/// Tells the flight recorder that an action begins.
fn note(comm: &Comm, Action { stage, kind, micro_batch }: Action) -> Option<(&FlightRecorder, u64)> {
    let recorder = comm.flight_recorder()?;
    let (what, site) = (What::Action { stage, micro_batch }, Location::caller());
    Some((recorder, recorder.started(Operation { kind: kind.name(), what, site })))
}

/// Lookups.
impl<S> ScheduleRun<'_, S> {
    pub(super) fn cell(&mut self, stage: usize, micro_batch: usize) -> &mut InFlight {
        self.cells.entry(Cell { stage, micro_batch }).or_default()
    }

    /// How many micro-batches form a mini-batch: all, or those of an update.
    pub(super) fn interval(&self) -> usize {
        self.updates.as_ref().map_or(self.losses.len(), |updates| updates.interval())
    }

    pub(super) fn rank(&self) -> usize {
        self.executor.comm.rank()
    }

    pub(super) fn rank_of(&self, stage: usize, micro_batch: usize) -> Option<usize> {
        self.executor.schedule.rank_of(stage, micro_batch)
    }

    pub(super) fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.executor.schedule.stages()
    }
}

/// The error of an action whose input does not exist. A verified schedule never causes it.
pub(super) fn missing(what: &str) -> Error {
    Error::Config(format!("there is no {what} of this micro-batch at this stage"))
}

/// What a rank keeps of a cell, each field until the action that uses it.
#[derive(Default)]
pub(super) struct InFlight {
    /// The stage's inputs, for `F`.
    pub(super) input: Vec<Tensor>,
    /// The stage's outputs, for `SEND_F`.
    pub(super) output: Vec<Tensor>,
    /// The autograd graph of the forward pass, for `B` or `I`.
    pub(super) graph: Option<Graph>,
    /// The gradients of the floating-point outputs, for `B` or `I`.
    pub(super) output_grad: Vec<Tensor>,
    /// The gradients of the floating-point inputs, for `SEND_B`.
    pub(super) input_grad: Vec<Tensor>,
    /// The weights' part of the backward pass, for `W`.
    pub(super) weights: Option<WeightPass>,
}

impl InFlight {
    /// Whether nothing is kept.
    pub(super) fn is_empty(&self) -> bool {
        let InFlight { input, output, graph, output_grad, input_grad, weights } = self;
        let tensors = [input, output, output_grad, input_grad];
        tensors.iter().all(|tensors| tensors.is_empty()) && graph.is_none() && weights.is_none()
    }
}

/// The graph that a forward pass records for the backward pass.
pub(super) struct Graph {
    /// The floating-point inputs as leaves: their gradients go to the stage before. `None` for other inputs.
    pub(super) inputs: Vec<Option<Leaf>>,
    /// The floating-point outputs. Of every stage but the last, only the nodes, without the values.
    pub(super) roots: Vec<Var>,
    /// The shapes and dtypes of all that the stage sends on: its outputs, and the skips that pass it.
    pub(super) sent: Vec<Spec>,
    /// The recomputation of the stage, if its values were not kept.
    pub(super) recompute: Option<Recompute>,
}

/// The work that `I` leaves for `W`; `None` if the stage trains no parameter.
pub(super) struct WeightPass(pub(super) Option<WeightWork>);

impl<S: Stages> ScheduleRun<'_, S> {
    pub(super) fn forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let given = match stage {
            0 => Vec::new(),
            _ => take(&mut self.cell(stage, micro_batch).input, "input")?,
        };
        let routes = self.stages.skips();
        let (given, passing) = split_inputs(routes, stage, given);
        let (inputs, values) = leaves(given)?;
        let (outputs, recompute) = self.compute(stage, micro_batch, values)?;
        let last = self.is_last(stage);
        let floats = outputs.iter().filter(|output| output.dtype().is_float());
        let roots = floats.map(|output| if last { Ok(output.clone()) } else { Ok(output.place()?) });
        let roots = roots.collect::<Result<Vec<Var>>>()?;
        if roots.is_empty() || (last && outputs.len() > 1) {
            let wanted = if last { "the loss alone" } else { "a floating-point one, and any others" };
            let dtypes: Vec<DType> = outputs.iter().map(Var::dtype).collect();
            return Err(Error::Config(format!("got outputs of dtypes {dtypes:?}, wanted {wanted}")));
        }
        let outputs = outputs.into_iter().map(Var::into_tensor).collect();
        let mut outputs = join_outputs(routes, stage, outputs, passing);
        let graph = Graph { inputs, roots, sent: outputs.iter().map(Spec::of).collect(), recompute };
        self.cell(stage, micro_batch).graph = is_grad_enabled().then_some(graph);
        match self.rank_of(stage + 1, micro_batch) {
            None => self.losses[micro_batch] = outputs.pop(),
            Some(rank) if rank == self.rank() => self.cell(stage + 1, micro_batch).input = outputs,
            Some(_) => self.cell(stage, micro_batch).output = outputs,
        }
        Ok(())
    }

    /// The stage's outputs, and its recomputation if its values are not kept.
    fn compute(
        &self,
        stage: usize,
        micro_batch: usize,
        inputs: Vec<Var>,
    ) -> Result<(Vec<Var>, Option<Recompute>)> {
        let recompute = micro_batch < self.executor.recompute.recomputed(self.losses.len());
        let part = self.part_of_batch(micro_batch);
        if !recompute {
            let _part = part.enter();
            return Ok((self.stages.forward_values(stage, micro_batch, &inputs)?, None));
        }
        let stages = Arc::clone(self.stages);
        let forward = move |inputs: &[Var]| {
            let _part = part.enter();
            // Backward begins at the outputs in this order: see `backward`.
            let mut outputs = stages.forward_values(stage, micro_batch, inputs)?;
            outputs.reverse();
            Ok(outputs)
        };
        let (mut outputs, recompute) = checkpoint_apart(forward, &inputs.iter().collect::<Vec<_>>())?;
        outputs.reverse();
        Ok((outputs, recompute))
    }

    /// The micro-batch as a part of its mini-batch, for layers that ask.
    fn part_of_batch(&self, micro_batch: usize) -> MicroBatch {
        let count = self.interval();
        MicroBatch { index: micro_batch % count, count }
    }

    /// The shapes and dtypes of a stage's inputs, if the caller's [`Stages`] knows them.
    pub(super) fn input_specs(&self, stage: usize, micro_batch: usize) -> Option<Vec<Spec>> {
        let _part = self.part_of_batch(micro_batch).enter();
        self.stages.input_specs(stage, micro_batch)
    }

    /// `B`, or `I`, which leaves the weights' part for `W`.
    pub(super) fn backward(&mut self, Action { stage, micro_batch, kind }: Action) -> Result<()> {
        let _accumulate = self.no_sync(stage, micro_batch);
        let (last, stages) = (self.is_last(stage), self.stages);
        let cell = self.cell(stage, micro_batch);
        let Graph { inputs, roots, sent, .. } = cell.graph.take().ok_or_else(|| missing("graph"))?;
        let mut grads = std::mem::take(&mut cell.output_grad).into_iter();
        // In the places of what the stage has sent; there are none of other dtypes, nor of the loss.
        let grads = sent.iter().map(|spec| spec.dtype.is_float().then(|| grads.next()).flatten());
        let (grads, passing) = split_outputs(stages.skips(), stage, grads.collect());
        let grads: Vec<Var> = grads.into_iter().flatten().map(Var::new).collect();
        if grads.len() != roots.len() && !last {
            return Err(missing("gradient of the output"));
        }
        let grads = grads.into_iter().map(Some).chain(std::iter::repeat(None));
        // The stages up to here train nothing if no root requires a gradient.
        let grads: Vec<Option<Var>> = grads.take(roots.len()).collect();
        let roots = roots.into_iter().zip(grads).filter(|(root, _)| root.requires_grad());
        // One device adds the gradient of a value's last use first. Later stages use the later values of the list.
        let mut roots: Vec<(Var, Option<Var>)> = roots.rev().collect();
        if kind == ActionKind::Input {
            let weights = (!roots.is_empty()).then(|| backward_inputs(&roots)).transpose()?;
            cell.weights = Some(WeightPass(weights));
        } else if roots.len() > 1 {
            backward(&roots, Options::default())?;
        } else if let Some((root, grad)) = roots.pop() {
            // By value, so that the gradient is freed as soon as it is used.
            grad.map_or_else(|| root.backward(), |grad| root.backward_with(grad))?;
        }
        drop(roots);
        if stage == 0 {
            return Ok(());
        }
        let grads = inputs.iter().map(|input| input.as_ref().map(input_grad).transpose());
        let grads = join_inputs(stages.skips(), stage, grads.collect::<Result<_>>()?, passing);
        let grads = grads.into_iter().flatten().collect();
        match self.rank_of(stage - 1, micro_batch) {
            Some(rank) if rank == self.rank() => self.cell(stage - 1, micro_batch).output_grad = grads,
            _ => self.cell(stage, micro_batch).input_grad = grads,
        }
        Ok(())
    }

    pub(super) fn weight(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let _accumulate = self.no_sync(stage, micro_batch);
        let weights = self.cell(stage, micro_batch).weights.take();
        let WeightPass(weights) = weights.ok_or_else(|| missing("weights' part of a backward pass"))?;
        Ok(weights.map_or(Ok(()), |weights| weights.run())?)
    }

    /// A guard that keeps gradients on this rank, except for the last micro-batch of a sum, which completes them.
    fn no_sync(&self, stage: usize, micro_batch: usize) -> Option<NoSync> {
        if (micro_batch + 1).is_multiple_of(self.sum_of(stage)) { None } else { self.stages.no_sync() }
    }
}

/// The values of a stage's inputs, and those of floating-point dtypes as leaves.
fn leaves(inputs: Vec<Tensor>) -> Result<(Vec<Option<Leaf>>, Vec<Var>)> {
    let of = |input: Tensor| {
        let leaf = input.dtype().is_float().then(|| Leaf::new(input.clone(), false)).transpose()?;
        let value = leaf.as_ref().map_or_else(|| Var::new(input), Leaf::var);
        Ok((leaf, value))
    };
    Ok(inputs.into_iter().map(of).collect::<Result<Vec<_>>>()?.into_iter().unzip())
}

/// The gradient of a stage's input: zeros if the stage did not use the input.
fn input_grad(input: &Leaf) -> Result<Tensor> {
    let grad = match input.grad() {
        Some(grad) => grad.into_tensor(),
        None => {
            let like = input.tensor();
            Tensor::zeros(like.shape(), like.dtype(), like.device())?
        }
    };
    input.set_grad(None);
    // The ledger counts it as an activation: no optimizer reads it.
    grad.storage().set_category(Category::Activations);
    Ok(grad)
}
