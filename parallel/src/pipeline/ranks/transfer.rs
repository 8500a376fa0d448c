//! Sends and receives.

use std::sync::Arc;

use phalanx_nn::autograd::waiting;
use phalanx_tensor::Tensor;

use super::header::{header, receive_spec};
use super::run::{Run, missing};
use super::{Executed, Pipeline, Spec, Stages};
use crate::comm::Call;
use crate::pipeline::schedule::Action;
use crate::{Error, Result};

impl<S: Stages> Run<'_, S> {
    pub(super) fn send_forward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let output = self.cell(stage, micro_batch).output.take().ok_or_else(|| missing("output"))?;
        let to = self.neighbour(stage.checked_add(1))?;
        let spec = Spec::of(&output);
        match self.input_spec(stage + 1, micro_batch) {
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

    pub(super) fn send_backward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let grad = self.cell(stage, micro_batch).input_grad.take();
        let to = self.neighbour(stage.checked_sub(1))?;
        self.send(action, grad.ok_or_else(|| missing("gradient of the input"))?, to);
        Ok(())
    }

    fn send(&mut self, action: Action, tensor: Tensor, to: usize) {
        if let Some(receipts) = &self.pipeline.receipts {
            let by = receipts.get(&action).copied().flatten();
            self.held.entry(by).or_default().push(tensor.clone());
        }
        let mut call = Call::send(tensor, to);
        if let Some(observer) = self.pipeline.observer.clone() {
            call = call.observed(Arc::new(move |call| {
                observer(Executed { action, started: call.started, ended: call.ended });
            }));
        }
        self.sent.push((action, self.pipeline.comm.start(call)));
    }

    pub(super) fn receive_forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Pipeline { comm, device, .. } = self.pipeline;
        let from = self.neighbour(stage.checked_sub(1))?;
        let spec = match self.input_spec(stage, micro_batch) {
            Some(spec) => spec,
            None => receive_spec(comm, from, *device)?,
        };
        let mut input = Tensor::empty(&spec.shape, spec.dtype, *device)?;
        waiting("receive input", || comm.recv(&mut input, from))?;
        self.cell(stage, micro_batch).input = Some(input);
        Ok(())
    }

    /// While the gradient is on its way, what was not kept for its use is computed again.
    pub(super) fn receive_backward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Pipeline { comm, device, .. } = self.pipeline;
        let from = self.neighbour(stage.checked_add(1))?;
        let used_next =
            self.following.is_some_and(|next| (next.stage, next.micro_batch) == (stage, micro_batch));
        let cell = self.cell(stage, micro_batch);
        let graph =
            cell.graph.as_ref().ok_or_else(|| missing("output that this would be the gradient of"))?;
        let grad = Tensor::empty(&graph.output.shape, graph.output.dtype, *device)?;
        let call = Call::recv(grad.clone(), from);
        match graph.recompute.as_ref().filter(|_| used_next) {
            None => waiting("receive gradient", || comm.run(call))?,
            Some(recompute) => {
                let coming = comm.start(call);
                recompute.now()?;
                waiting("receive gradient", || coming.wait())?;
            }
        }
        cell.output_grad = Some(grad);
        Ok(())
    }
}

impl<S> Run<'_, S> {
    /// The rank of a stage next to one of ours.
    fn neighbour(&self, stage: Option<usize>) -> Result<usize> {
        let rank = stage.and_then(|stage| self.rank_of(stage));
        rank.ok_or_else(|| Error::Config("there is no stage on that side".into()))
    }
}
