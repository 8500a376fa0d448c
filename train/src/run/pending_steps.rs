//! [`PendingSteps`]: steps whose loss and gradient norm the host has not read yet, so that it prepares the next step while the GPU works.

use std::collections::VecDeque;
use std::time::Instant;

use phalanx_tensor::cuda::{GpuEvent, Readback};
use phalanx_tensor::{Device, Tensor};

use super::step::{Outcome, StepReport};
use crate::Result;

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

    /// Forgets the pending steps, once they are done.
    pub fn clear(&mut self) -> Result<()> {
        while self.next(true)?.is_some() {}
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
