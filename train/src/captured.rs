//! A step as a CUDA graph: captured once, launched whole from then on, with the numbers of a step that is not.

use std::sync::Arc;

use phalanx_nn::{Batch, CapturedStep, Optimizer};
use phalanx_parallel::hybrid::Part;
use phalanx_tensor::{Device, Tensor};

use crate::optimizers::AnyRule;
use crate::run::Run;
use crate::step::{Settings, context, gradients};
use crate::{Error, Result};

/// A step of [`crate::step`], whose micro-batches are the host's.
pub(crate) struct Captured {
    device: Device,
    /// Made when the first batch is there.
    step: Option<CapturedStep>,
}

impl Captured {
    pub fn new(device: Device) -> Captured {
        Captured { device, step: None }
    }

    /// A step; the loss and the gradients' norm before clipping, f64 `[2]`, on the device, until the next step.
    pub fn step(
        &mut self,
        model: &Arc<dyn Part>,
        optimizer: &mut Optimizer<AnyRule>,
        micros: &[Batch],
        settings: Settings<'_>,
        step: u64,
    ) -> Result<&Tensor> {
        let _context = context(settings.seed, step);
        let given: Vec<Tensor> = micros.iter().flat_map(|b| b.tensors.clone()).collect();
        let captured = match self.step.take() {
            Some(captured) => captured,
            None => CapturedStep::new(self.device, &given, settings.clip)?,
        };
        let captured = self.step.insert(captured);
        // A save reads what the launch will write.
        settings.saver.wait()?;
        let parameters = optimizer.parameters();
        captured.run_with(optimizer, &given, |inputs| {
            let each = inputs.len() / micros.len();
            let here = inputs.chunks_exact(each).zip(micros);
            let here = here.map(|(own, batch)| Batch { tensors: own.to_vec(), first_row: batch.first_row });
            let loss = gradients(model, &parameters, &here.collect::<Vec<_>>(), settings)?;
            loss.ok_or_else(|| Error::Config("a step has no loss".into()))
        })?;
        Ok(captured.results())
    }
}

impl Run {
    /// Whether steps are to be captured: on a GPU, unless told otherwise or something keeps them from it.
    pub(crate) fn captures(&mut self) -> bool {
        self.means.config.device.is_cuda() && self.means.config.capture && self.why_uncaptured().is_none()
    }

    /// Why the steps of a run on a GPU cannot be captured, if they were to be. Ranks meet on the host in each step, and a trace wants to
    /// know what a step consists of.
    pub(crate) fn why_uncaptured(&mut self) -> Option<&'static str> {
        let config = &self.means.config;
        if !config.device.is_cuda() || !config.capture {
            return None;
        }
        let several = self.optimizers.only().is_none();
        let config = &self.means.config;
        let reasons = [
            (config.ranks() > 1 || config.zero > 0, "there are several ranks, or ZeRO"),
            (config.asynchronous.is_some(), "the pipeline has no flushes"),
            (config.trace.is_some(), "a trace has what a step consists of"),
            (self.is_guarded(), "the numbers of a step are looked at before its update"),
            (several, "there are several optimizers"),
        ];
        reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
    }
}
