//! A step as a CUDA graph: captured once, launched whole from then on, with the numbers of a step that is not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use phalanx_nn::{Batch, CapturedStep, Optimizer};
use phalanx_parallel::hybrid::Part;
use phalanx_tensor::cuda::{GpuEvent, Readback};
use phalanx_tensor::{Device, Tensor};

use crate::optimizers::AnyRule;
use crate::record::Told;
use crate::step::{Outcome, Settings, context, gradients};
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

/// Steps that may be on their way when the next one has begun: a GPU's queue is never empty then.
const DEPTH: usize = 1;

/// Steps begun, in order, whose numbers are still to come. A GPU's come later; others are there at once.
pub(crate) struct Ahead {
    device: Device,
    depth: usize,
    /// No other rank has to hear of a step at the same time.
    alone: bool,
    steps: VecDeque<Begun>,
    /// To be used again.
    idle: Vec<Readback>,
    /// When the last step was over.
    over: Instant,
}

struct Begun {
    step: u64,
    since: Instant,
    peak: usize,
    numbers: Numbers,
}

enum Numbers {
    Here(Vec<f64>),
    /// And the point in the device's work at which they are there.
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

impl Ahead {
    /// Of a rank on `device`, `alone` or of many; `waits` for each step at once.
    pub fn new(device: Device, alone: bool, waits: bool) -> Ahead {
        let depth = if device.is_cuda() && !waits { DEPTH } else { 0 };
        Ahead { device, depth, alone, steps: VecDeque::new(), idle: Vec::new(), over: Instant::now() }
    }

    /// A step that was begun at `since` will have these `results` (f64 `[2]`: loss and norm), and had `peak` bytes at most.
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
        self.steps.push_back(Begun { step, since, peak, numbers });
        Ok(())
    }

    /// The first step of which nothing was told: if others wait behind it, its numbers are there, or `all` are wanted. Ranks do
    /// the same at the same time.
    pub fn next(&mut self, all: bool) -> Result<Option<Told>> {
        let Some(first) = self.steps.front() else { return Ok(None) };
        let due = all || self.steps.len() > self.depth || self.alone && first.numbers.are_here()?;
        let Some(Begun { step, since, peak, numbers }) = due.then(|| self.steps.pop_front()).flatten() else {
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
        Ok(Some(Told { step, outcome, seconds: (self.over - since).as_secs_f64(), peak }))
    }
}
