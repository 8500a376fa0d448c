//! [`Run`]: a schedule under way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_nn::autograd::{Leaf, Var, backward_inputs, checkpoint, is_grad_enabled};
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Category, Tensor};

use super::cell::{Cell, Graph, Weights};
use super::transfer::{header, receive, receive_spec};
use super::{Executed, Pipeline, Spec, Stages};
use crate::comm::{Call, Pending};
use crate::data_parallel::NoSync;
use crate::launch::caught;
use crate::pipeline::schedule::{Action, Kind};
use crate::{Error, Result};

pub(super) struct Run<'a, S> {
    pipeline: &'a Pipeline,
    work: &'a Arc<S>,
    /// By stage and micro-batch.
    cells: HashMap<(usize, usize), Cell>,
    /// Sends that may still be under way.
    sent: Vec<(Action, Pending)>,
    losses: Vec<Option<Tensor>>,
}

impl<'a, S: Stages> Run<'a, S> {
    pub(super) fn new(pipeline: &'a Pipeline, work: &'a Arc<S>) -> Run<'a, S> {
        let losses = vec![None; pipeline.schedule.micro_batches];
        Run { pipeline, work, cells: HashMap::new(), sent: Vec::new(), losses }
    }

    /// Carries out the actions of these kinds, and returns the losses.
    pub(super) fn run(mut self, wanted: impl Fn(Kind) -> bool) -> Result<Vec<Tensor>> {
        let Pipeline { schedule, comm, observer, .. } = self.pipeline;
        for &action in schedule.ranks[comm.rank()].iter().filter(|action| wanted(action.kind)) {
            let started = Instant::now();
            self.guarded(action, |run| run.perform(action))?;
            let ended = Instant::now();
            self.settle(false)?;
            // Sends are reported by whoever ends them.
            let reports = !matches!(action.kind, Kind::SendForward | Kind::SendBackward);
            if let Some(observer) = observer.as_ref().filter(|_| reports) {
                observer(Executed { action, started, ended });
            }
        }
        self.settle(true)?;
        Ok(self.losses.into_iter().flatten().collect())
    }

    /// An error or panic of `f` names the action and ends the run of all ranks.
    fn guarded<T>(&mut self, action: Action, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let comm = &self.pipeline.comm;
        caught(|| f(self)).map_err(|cause| {
            let error = Error::Action { action: action.to_string(), cause };
            comm.fail(&error.to_string());
            error
        })
    }

    /// Forgets sends that are over, and with `all` waits for the others.
    fn settle(&mut self, all: bool) -> Result<()> {
        let (over, under_way) = self.sent.drain(..).partition(|(_, send)| all || send.is_done());
        self.sent = under_way;
        let over: Vec<(Action, Pending)> = over;
        over.into_iter().try_for_each(|(action, send)| self.guarded(action, |_| Ok(send.wait()?)))
    }

    fn perform(&mut self, action: Action) -> Result<()> {
        match action.kind {
            Kind::Forward => self.forward(action),
            Kind::Backward | Kind::Input => self.backward(action),
            Kind::Weight => self.weight(action),
            Kind::SendForward => self.send_forward(action),
            Kind::RecvForward => self.receive_forward(action),
            Kind::SendBackward => self.send_backward(action),
            Kind::RecvBackward => self.receive_backward(action),
        }
    }
}

/// Computing.
impl<S: Stages> Run<'_, S> {
    fn forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let input = match stage {
            0 => None,
            _ => {
                let input = self.cell(stage, micro_batch).input.take();
                Some(Leaf::new(input.ok_or_else(|| missing("input"))?, false)?)
            }
        };
        let output = self.compute(stage, micro_batch, input.as_ref().map(Leaf::var).as_ref())?;
        let (last, keeps) = (self.is_last(stage), is_grad_enabled());
        let root = if last { output.clone() } else { output.without_values()? };
        let (spec, output) = (Spec::of(output.tensor()), output.into_tensor());
        self.cell(stage, micro_batch).graph = keeps.then_some(Graph { input, root, output: spec });
        match self.rank_of(stage + 1) {
            None => self.losses[micro_batch] = Some(output),
            Some(rank) if rank == self.rank() => self.cell(stage + 1, micro_batch).input = Some(output),
            Some(_) => self.cell(stage, micro_batch).output = Some(output),
        }
        Ok(())
    }

    /// The stage's output, perhaps without keeping what it took.
    fn compute(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let recompute = match self.pipeline.recompute {
            RecomputeMode::Never => false,
            RecomputeMode::ExceptLast => micro_batch + 1 < self.losses.len(),
            RecomputeMode::Always => true,
        };
        if !recompute {
            return self.work.forward(stage, micro_batch, input);
        }
        let work = Arc::clone(self.work);
        let forward = move |inputs: &[Var]| Ok(work.forward(stage, micro_batch, inputs.first())?);
        Ok(checkpoint(forward, input.as_slice())?)
    }

    /// `B`, or `I`, which leaves the weights' part.
    fn backward(&mut self, Action { stage, micro_batch, kind }: Action) -> Result<()> {
        let _accumulate = self.no_sync(micro_batch);
        let last = self.is_last(stage);
        let cell = self.cell(stage, micro_batch);
        let Graph { input, root, .. } = cell.graph.take().ok_or_else(|| missing("graph"))?;
        let grad = match last {
            true => None,
            false => {
                Some(Var::new(cell.output_grad.take().ok_or_else(|| missing("gradient of the output"))?))
            }
        };
        let trains = root.requires_grad();
        match (kind, grad) {
            (Kind::Input, grad) => {
                let weights = trains.then(|| backward_inputs(&[(root, grad)])).transpose()?;
                cell.weights = Some(Weights(weights));
            }
            (_, Some(grad)) if trains => root.backward_with(grad)?,
            (_, None) if trains => root.backward()?,
            _ => {}
        }
        let Some(input) = input else { return Ok(()) };
        let grad = input_grad(&input)?;
        match self.rank_of(stage - 1) {
            Some(rank) if rank == self.rank() => self.cell(stage - 1, micro_batch).output_grad = Some(grad),
            _ => self.cell(stage, micro_batch).input_grad = Some(grad),
        }
        Ok(())
    }

    fn weight(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let _accumulate = self.no_sync(micro_batch);
        let weights = self.cell(stage, micro_batch).weights.take();
        let Weights(weights) = weights.ok_or_else(|| missing("weights' part of a backward pass"))?;
        Ok(weights.map_or(Ok(()), |weights| weights.run())?)
    }

    /// Keeps a stage's gradients here until the last micro-batch completes them.
    fn no_sync(&self, micro_batch: usize) -> Option<NoSync> {
        if micro_batch + 1 < self.losses.len() { self.work.no_sync() } else { None }
    }
}

/// Sending and receiving.
impl<S: Stages> Run<'_, S> {
    fn send_forward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let output = self.cell(stage, micro_batch).output.take().ok_or_else(|| missing("output"))?;
        let to = self.neighbour(stage.checked_add(1))?;
        let spec = Spec::of(&output);
        match self.work.input_spec(stage + 1, micro_batch) {
            None => {
                let header = header(&spec, self.pipeline.device)?;
                self.sent.push((action, self.pipeline.comm.start(Call::send(header, to))));
            }
            Some(said) if said == spec => {}
            Some(said) => {
                let why = format!("got an output of {spec:?}, and the next stage's input is to be {said:?}");
                return Err(Error::Config(why));
            }
        }
        self.send(action, output, to);
        Ok(())
    }

    fn send_backward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let grad = self.cell(stage, micro_batch).input_grad.take();
        let to = self.neighbour(stage.checked_sub(1))?;
        self.send(action, grad.ok_or_else(|| missing("gradient of the input"))?, to);
        Ok(())
    }

    fn send(&mut self, action: Action, tensor: Tensor, to: usize) {
        let mut call = Call::send(tensor, to);
        if let Some(observer) = self.pipeline.observer.clone() {
            call = call.observed(Arc::new(move |call| {
                observer(Executed { action, started: call.started, ended: call.ended });
            }));
        }
        self.sent.push((action, self.pipeline.comm.start(call)));
    }

    fn receive_forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Pipeline { comm, device, .. } = self.pipeline;
        let from = self.neighbour(stage.checked_sub(1))?;
        let spec = match self.work.input_spec(stage, micro_batch) {
            Some(spec) => spec,
            None => receive_spec(comm, from, *device)?,
        };
        self.cell(stage, micro_batch).input = Some(receive(comm, from, &spec, *device)?);
        Ok(())
    }

    fn receive_backward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Pipeline { comm, device, .. } = self.pipeline;
        let from = self.neighbour(stage.checked_add(1))?;
        let cell = self.cell(stage, micro_batch);
        let spec =
            &cell.graph.as_ref().ok_or_else(|| missing("output that this would be the gradient of"))?.output;
        cell.output_grad = Some(receive(comm, from, spec, *device)?);
        Ok(())
    }
}

/// Looking things up.
impl<S> Run<'_, S> {
    fn cell(&mut self, stage: usize, micro_batch: usize) -> &mut Cell {
        self.cells.entry((stage, micro_batch)).or_default()
    }

    fn rank(&self) -> usize {
        self.pipeline.comm.rank()
    }

    fn rank_of(&self, stage: usize) -> Option<usize> {
        self.pipeline.schedule.placement.get(stage).copied()
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.pipeline.schedule.placement.len()
    }

    /// The rank of a stage next to one of ours.
    fn neighbour(&self, stage: Option<usize>) -> Result<usize> {
        let rank = stage.and_then(|stage| self.rank_of(stage));
        rank.ok_or_else(|| Error::Config("there is no stage on that side".into()))
    }
}

/// The gradient of a stage's input, which the stage may not have used.
fn input_grad(input: &Leaf) -> Result<Tensor> {
    let grad = match input.grad() {
        Some(grad) => grad.into_tensor(),
        None => {
            let like = input.tensor();
            Tensor::zeros(like.shape(), like.dtype(), like.device())?
        }
    };
    input.set_grad(None);
    // No gradient that an optimizer reads.
    grad.storage().set_category(Category::Activations);
    Ok(grad)
}

fn missing(what: &str) -> Error {
    Error::Config(format!("there is no {what} of this micro-batch at this stage"))
}
