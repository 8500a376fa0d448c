//! A step as a CUDA graph: captured once, launched whole from then on, with the numbers of a step that is not.

use std::sync::Arc;

use phalanx::nn::{AdamW, Batch, CapturedStep, Optimizer};
use phalanx::parallel::Result;
use phalanx::parallel::hybrid::Part;
use phalanx::{Device, Tensor};

use crate::step::{Saving, Settings, context, gradients};

/// The step of [`crate::step::train_step`], whose micro-batches are the host's.
pub struct Captured {
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
        optimizer: &mut Optimizer<AdamW>,
        micros: &[Batch],
        settings: Settings<'_>,
        step: u64,
    ) -> Result<&Tensor> {
        let _context = context(settings.seed, step);
        let given: Vec<Tensor> = micros.iter().flat_map(|b| [b.inputs.clone(), b.targets.clone()]).collect();
        let captured = match self.step.take() {
            Some(captured) => captured,
            None => CapturedStep::new(self.device, &given, settings.max_norm())?,
        };
        let captured = self.step.insert(captured);
        // A save reads what the launch will write.
        settings.saver.map_or(Ok(()), Saving::wait)?;
        let parameters = optimizer.parameters();
        captured.run_with(optimizer, &given, |inputs| {
            let here = inputs.chunks_exact(2).zip(micros);
            let here = here.map(|(pair, batch)| Batch {
                inputs: pair[0].clone(),
                targets: pair[1].clone(),
                first_row: batch.first_row,
            });
            let loss = gradients(model, &parameters, &here.collect::<Vec<_>>(), settings)?;
            loss.ok_or_else(|| phalanx::parallel::Error::Config("a step has no loss".into()))
        })?;
        Ok(captured.results())
    }
}
