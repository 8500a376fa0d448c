//! [`CapturedTrainingStep`]: a training step that one GPU launches whole as a CUDA graph, with the bits of a step that is not captured.

use std::sync::Arc;

use phalanx_nn::{Batch, CapturedStep, Optimizer};
use phalanx_parallel::hybrid::StagedModel;
use phalanx_tensor::{Device, Tensor};

use super::optimizers::AnyRule;
use super::step::{StepOptions, accumulate_gradients, training_context};
use crate::{Error, Result};

/// The passes and the update of [`step`](super::step) as one CUDA graph. The step's micro-batches are on the host.
pub(crate) struct CapturedTrainingStep {
    device: Device,
    /// The graph. It is captured with the first batch.
    step: Option<CapturedStep>,
    refusal_told: bool,
}

impl CapturedTrainingStep {
    pub fn new(device: Device) -> CapturedTrainingStep {
        CapturedTrainingStep { device, step: None, refusal_told: false }
    }

    /// Why steps cannot be captured, if that has shown.
    pub fn refusal(&self) -> Option<&str> {
        self.step.as_ref()?.why_not_captured()
    }

    /// The same, once.
    pub fn new_refusal(&mut self) -> Option<String> {
        let why = self.refusal()?.to_string();
        (!std::mem::replace(&mut self.refusal_told, true)).then_some(why)
    }

    /// A step; the loss and the gradients' norm before clipping, f64 `[2]`, on the device, until the next step.
    pub fn step(
        &mut self,
        model: &Arc<dyn StagedModel>,
        optimizer: &mut Optimizer<AnyRule>,
        micros: &[Batch],
        options: StepOptions<'_>,
        step: u64,
    ) -> Result<&Tensor> {
        let _context = training_context(options.seed, step);
        let given: Vec<Tensor> = micros.iter().flat_map(|b| b.tensors.clone()).collect();
        let captured = match self.step.take() {
            Some(captured) => captured,
            None => {
                let captured = CapturedStep::new(self.device, &given, options.clip)?;
                options.guard.cloned().into_iter().fold(captured, CapturedStep::with_guard)
            }
        };
        let captured = self.step.insert(captured);
        // A checkpoint that is being saved reads the tensors that the launch writes.
        options.saver.release()?;
        let parameters = optimizer.parameters();
        captured.run_with(optimizer, &given, |inputs| {
            let each = inputs.len() / micros.len();
            let batches = inputs.chunks_exact(each).zip(micros);
            let batches =
                batches.map(|(own, batch)| Batch { tensors: own.to_vec(), first_row: batch.first_row });
            let loss = accumulate_gradients(model, &parameters, &batches.collect::<Vec<_>>(), options)?;
            loss.ok_or_else(|| Error::Config("a step has no loss".into()))
        })?;
        Ok(captured.results())
    }
}
