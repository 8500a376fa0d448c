//! Steps of one GPU: [`Captured`] launches a step as a CUDA graph, with the bits of a step without one. [`PendingSteps`] are the steps
//! whose losses the host has not read yet, so that it prepares the next step while the GPU works.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use phalanx_nn::{Batch, CapturedStep, Optimizer};
use phalanx_parallel::hybrid::StagedModel;
use phalanx_tensor::cuda::{GpuEvent, Readback};
use phalanx_tensor::{Device, Tensor};

use crate::optimizers::AnyRule;
use crate::record::StepReport;
use crate::step::{Outcome, Settings, context, gradients};
use crate::{Error, Result};

/// A step of [`crate::step`] as a CUDA graph. Its micro-batches are on the host.
pub(crate) struct Captured {
    device: Device,
    /// It is made with the first batch.
    step: Option<CapturedStep>,
}

impl Captured {
    pub fn new(device: Device) -> Captured {
        Captured { device, step: None }
    }

    /// A step; the loss and the gradients' norm before clipping, f64 `[2]`, on the device, until the next step.
    pub fn step(
        &mut self,
        model: &Arc<dyn StagedModel>,
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
        // A checkpoint that is being saved reads the tensors that the launch writes.
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

/// Steps that may be pending when the next one has begun. With one, the GPU's queue is never empty.
const DEPTH: usize = 1;

/// Steps that have begun, in order, whose loss and norm the host has not read. On a CPU they are read at once.
pub(crate) struct PendingSteps {
    device: Device,
    depth: usize,
    /// Whether this is the only rank, so that it need not read a step at the same time as others.
    alone: bool,
    steps: VecDeque<PendingStep>,
    /// Pinned buffers to be reused.
    idle: Vec<Readback>,
    /// When the last step's numbers were read.
    over: Instant,
}

struct PendingStep {
    step: u64,
    since: Instant,
    peak: usize,
    numbers: Numbers,
}

enum Numbers {
    Here(Vec<f64>),
    /// The copy to the host, and the event that marks its end.
    Coming(Readback, GpuEvent),
}

impl Numbers {
    fn are_here(&self) -> Result<bool> {
        match self {
            Numbers::Here(_) => Ok(true),
            Numbers::Coming(_, there) => Ok(there.is_done()?),
        }
    }
}

impl PendingSteps {
    /// For a rank on `device`, which is the only one if `alone`. With `waits` each step is read at once.
    pub fn new(device: Device, alone: bool, waits: bool) -> PendingSteps {
        let depth = if device.is_cuda() && !waits { DEPTH } else { 0 };
        PendingSteps { device, depth, alone, steps: VecDeque::new(), idle: Vec::new(), over: Instant::now() }
    }

    /// Adds a step that began at `since` and whose peak was `peak` bytes. `results` (f64 `[2]`) will have its loss and norm.
    pub fn begun(&mut self, step: u64, since: Instant, peak: usize, results: &Tensor) -> Result<()> {
        let numbers = match self.depth {
            0 => Numbers::Here(results.to_vec()?),
            _ => {
                let mut readback = match self.idle.pop() {
                    Some(idle) => idle,
                    None => Readback::new(self.device, 2)?,
                };
                readback.start(results)?;
                Numbers::Coming(readback, GpuEvent::record(self.device.gpu()?)?)
            }
        };
        self.steps.push_back(PendingStep { step, since, peak, numbers });
        Ok(())
    }

    /// The first pending step, if others are pending behind it, its numbers have arrived, or `all` are asked for. All ranks of a run
    /// return the same steps.
    pub fn next(&mut self, all: bool) -> Result<Option<StepReport>> {
        let Some(first) = self.steps.front() else { return Ok(None) };
        let due = all || self.steps.len() > self.depth || self.alone && first.numbers.are_here()?;
        let Some(PendingStep { step, since, peak, numbers }) = due.then(|| self.steps.pop_front()).flatten()
        else {
            return Ok(None);
        };
        let numbers = match numbers {
            Numbers::Here(numbers) => numbers,
            Numbers::Coming(mut readback, _) => {
                let numbers = readback.finish()?;
                self.idle.push(readback);
                numbers
            }
        };
        let since = since.max(std::mem::replace(&mut self.over, Instant::now()));
        let outcome = Outcome { loss: numbers[0], grad_norm: numbers[1] };
        Ok(Some(StepReport { step, outcome, seconds: (self.over - since).as_secs_f64(), peak }))
    }
}
