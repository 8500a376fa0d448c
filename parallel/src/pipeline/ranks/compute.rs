//! Forward and backward passes.

use std::sync::Arc;

use phalanx_nn::autograd::{Leaf, Recompute, Var, backward_inputs, checkpoint_apart, is_grad_enabled};
use phalanx_nn::models::RecomputeMode;
use phalanx_tensor::{Category, Tensor};

use super::cell::{Graph, Weights};
use super::run::{Run, missing};
use super::{Spec, Stages};
use crate::Result;
use crate::data_parallel::NoSync;
use crate::pipeline::MicroBatch;
use crate::pipeline::schedule::{Action, Kind};

impl<S: Stages> Run<'_, S> {
    pub(super) fn forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let input = match stage {
            0 => None,
            _ => {
                let input = self.cell(stage, micro_batch).input.take();
                Some(Leaf::new(input.ok_or_else(|| missing("input"))?, false)?)
            }
        };
        let (output, recompute) = self.compute(stage, micro_batch, input.as_ref().map(Leaf::var).as_ref())?;
        let root = if self.is_last(stage) { output.clone() } else { output.place()? };
        let (spec, output) = (Spec::of(output.tensor()), output.into_tensor());
        let graph = Graph { input, root, output: spec, recompute };
        self.cell(stage, micro_batch).graph = is_grad_enabled().then_some(graph);
        match self.rank_of(stage + 1) {
            None => self.losses[micro_batch] = Some(output),
            Some(rank) if rank == self.rank() => self.cell(stage + 1, micro_batch).input = Some(output),
            Some(_) => self.cell(stage, micro_batch).output = Some(output),
        }
        Ok(())
    }

    /// The stage's output, and if what backward needs was not kept, how to get it.
    fn compute(
        &self,
        stage: usize,
        micro_batch: usize,
        input: Option<&Var>,
    ) -> Result<(Var, Option<Recompute>)> {
        let recompute = match self.pipeline.recompute {
            RecomputeMode::Never => false,
            RecomputeMode::ExceptLast => micro_batch + 1 < self.losses.len(),
            RecomputeMode::Always => true,
        };
        let place = self.place(micro_batch);
        if !recompute {
            let _place = place.enter();
            return Ok((self.work.forward(stage, micro_batch, input)?, None));
        }
        let work = Arc::clone(self.work);
        let forward = move |inputs: &[Var]| {
            let _place = place.enter();
            Ok(work.forward(stage, micro_batch, inputs.first())?)
        };
        Ok(checkpoint_apart(forward, input.as_slice())?)
    }

    /// Which part of its batch a micro-batch is.
    fn place(&self, micro_batch: usize) -> MicroBatch {
        let count = self.interval();
        MicroBatch { index: micro_batch % count, count }
    }

    /// What the work says of a stage's input.
    pub(super) fn input_spec(&self, stage: usize, micro_batch: usize) -> Option<Spec> {
        let _place = self.place(micro_batch).enter();
        self.work.input_spec(stage, micro_batch)
    }

    /// `B`, or `I`, which leaves the weights' part.
    pub(super) fn backward(&mut self, Action { stage, micro_batch, kind }: Action) -> Result<()> {
        let _accumulate = self.no_sync(micro_batch);
        let last = self.is_last(stage);
        let cell = self.cell(stage, micro_batch);
        let Graph { input, root, .. } = cell.graph.take().ok_or_else(|| missing("graph"))?;
        let grad = cell.output_grad.take().map(Var::new);
        if grad.is_none() && !last {
            return Err(missing("gradient of the output"));
        }
        // Nothing is trained up to here if the root requires no gradient.
        let trains = root.requires_grad();
        match (kind, grad) {
            (Kind::Input, grad) => {
                let weights = trains.then(|| backward_inputs(&[(root, grad)])).transpose()?;
                cell.weights = Some(Weights(weights));
            }
            _ if !trains => {}
            (_, Some(grad)) => root.backward_with(grad)?,
            (_, None) => root.backward()?,
        }
        let Some(input) = input else { return Ok(()) };
        let grad = input_grad(&input)?;
        match self.rank_of(stage - 1) {
            Some(rank) if rank == self.rank() => self.cell(stage - 1, micro_batch).output_grad = Some(grad),
            _ => self.cell(stage, micro_batch).input_grad = Some(grad),
        }
        Ok(())
    }

    pub(super) fn weight(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let _accumulate = self.no_sync(micro_batch);
        let weights = self.cell(stage, micro_batch).weights.take();
        let Weights(weights) = weights.ok_or_else(|| missing("weights' part of a backward pass"))?;
        Ok(weights.map_or(Ok(()), |weights| weights.run())?)
    }

    /// Keeps a stage's gradients here until the last micro-batch, of all or of an update, completes them.
    fn no_sync(&self, micro_batch: usize) -> Option<NoSync> {
        if (micro_batch + 1).is_multiple_of(self.interval()) { None } else { self.work.no_sync() }
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
