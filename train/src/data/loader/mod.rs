//! [`DataLoader`]: the batches of steps, read ahead by worker threads.
//!
//! ```text
//!   ReadPlan     which rows a step has, and the chunks of rows that workers take (pure)
//!   ReadJob      reads the rows of a chunk, makes a batch of a piece             (runs on any thread)
//!   Workers      threads that take chunks in the order of the steps              (up to `ahead` steps)
//!   DataLoader   returns the steps in order, on the device
//! ```
//!
//! A row is computed from its number alone, and a step's parts are put together in the order of the rows. So neither the number of workers nor
//! their pace changes what a step yields.

#[cfg(test)]
mod tests;
mod workers;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use phalanx_tensor::{Category, Context, Device, Tensor};

use super::{Batch, Dataset, Ordered, Samples, Shuffled, wrong};
use crate::Result;
use workers::{ReadJob, ReadPlan, Workers};

/// How a [`DataLoader`] reads. By default it reads the whole batch as one piece, to the CPU, from step 0 on, with one worker thread that
/// prefetches up to two steps.
#[derive(Clone, Debug)]
#[must_use = "it reads nothing before `train`, `stream` or `evaluate`"]
pub struct DataLoaderConfig {
    batch: usize,
    pieces: Option<Vec<Range<usize>>>,
    workers: usize,
    ahead: usize,
    device: Device,
    position: u64,
}

impl DataLoaderConfig {
    /// Steps of `batch` rows, counted over all ranks.
    pub fn new(batch: usize) -> DataLoaderConfig {
        DataLoaderConfig { batch, pieces: None, workers: 1, ahead: 2, device: Device::CPU, position: 0 }
    }

    /// Reads only these ranges of rows of each step, each as a batch of its own: a rank's rows, cut into micro-batches.
    pub fn with_pieces(self, pieces: Vec<Range<usize>>) -> DataLoaderConfig {
        DataLoaderConfig { pieces: Some(pieces), ..self }
    }

    /// Reads on this many threads; with 0 on the caller's thread, in [`DataLoader::next_step`].
    pub fn with_workers(self, workers: usize) -> DataLoaderConfig {
        DataLoaderConfig { workers, ..self }
    }

    /// The workers prefetch up to this many steps, at least 1.
    pub fn with_ahead(self, steps: usize) -> DataLoaderConfig {
        DataLoaderConfig { ahead: steps, ..self }
    }

    /// Batches are made on this device.
    pub fn with_device(self, device: Device) -> DataLoaderConfig {
        DataLoaderConfig { device, ..self }
    }

    /// Begins at this step: the [`DataLoader::position`] of an earlier loader.
    pub fn with_position(self, step: u64) -> DataLoaderConfig {
        DataLoaderConfig { position: step, ..self }
    }

    /// Batches for training, without end: all items once an epoch, in an order drawn by (seed, epoch). Row r of step s is sample
    /// `s * batch + r`, counted over all epochs, so a step may have items of two epochs.
    ///
    /// # Errors
    /// If there are no items, the batch is 0, a piece is empty or does not lie in the batch, no step may be ahead, or a thread cannot
    /// be started.
    pub fn train(self, dataset: impl Dataset + 'static, seed: u64) -> Result<DataLoader> {
        self.stream(Shuffled::new(dataset, seed)?)
    }

    /// Batches for training, without end: row r of step s is sample `s * batch + r`.
    ///
    /// # Errors
    /// As [`DataLoaderConfig::train`].
    pub fn stream(self, samples: impl Samples + 'static) -> Result<DataLoader> {
        self.init(Box::new(samples), None)
    }

    /// Batches for evaluation: all items once, in order. The last step may be smaller. A piece without items is left out of it, so a rank
    /// may get no batch in that step.
    ///
    /// # Errors
    /// As [`DataLoaderConfig::train`].
    pub fn evaluate(self, dataset: impl Dataset + 'static) -> Result<DataLoader> {
        let samples = Ordered::new(dataset)?;
        let count = samples.count();
        self.init(Box::new(samples), Some(count))
    }

    fn init(self, samples: Box<dyn Samples>, total: Option<u64>) -> Result<DataLoader> {
        let plan = ReadPlan::new(self.batch, self.pieces, total, self.workers)?;
        if self.ahead == 0 {
            return Err(wrong("DataLoader", "got 0 steps ahead, wanted at least 1"));
        }
        if self.position >= u64::MAX / 2 / self.batch as u64 {
            return Err(wrong("DataLoader", format!("got step {}, wanted a smaller one", self.position)));
        }
        let job = Arc::new(ReadJob::new(samples, plan));
        let start = || Workers::start(&job, self.workers, self.ahead, self.position);
        let workers = if self.workers == 0 { None } else { Some(start()?) };
        Ok(DataLoader { job, workers, device: self.device, position: self.position })
    }
}

/// Steps of batches, read ahead by worker threads: [`DataLoaderConfig`] makes it. The threads end when it is dropped.
///
/// Rows are read to [`HOST`](super::HOST). The batches' tensors are made on the device when a step asks for them, so that the device's
/// ledger does not depend on how far ahead the workers are.
///
/// As an iterator it yields [`DataLoader::next_step`] until an evaluation has ended.
pub struct DataLoader {
    job: Arc<ReadJob>,
    /// `None` if the caller's thread reads.
    workers: Option<Workers>,
    device: Device,
    position: u64,
}

impl DataLoader {
    /// The next step's batches, one for each piece.
    ///
    /// # Errors
    /// If an item of this step could not be read, or its reading panicked: the first such item by the number of its row. If items do
    /// not fit each other, a tensor cannot be allocated, or an evaluation has ended. The next call is about the next step.
    pub fn next_step(&mut self) -> Result<Vec<Batch>> {
        if let Some(steps) = self.steps().filter(|&steps| self.position >= steps) {
            let why = format!(
                "the evaluation has ended after {steps} steps, wanted another loader to go through the data again"
            );
            return Err(wrong("DataLoader", why));
        }
        let read = match &self.workers {
            Some(workers) => workers.next()?,
            None => self.job.step(self.position, &AtomicBool::new(false)),
        };
        self.position += 1;
        let _category = Context::with(|c| c.category = Category::Buffers);
        let batch = |(rows, tensors): (Range<usize>, Result<Vec<Tensor>>)| {
            let tensors = tensors?.into_iter().map(|t| t.to_device(self.device, true));
            Ok(Batch { tensors: tensors.collect::<Result<_, _>>()?, first_row: rows.start })
        };
        read.into_iter().map(batch).collect()
    }

    /// The number of the next step. A checkpoint saves it.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// How many steps an evaluation has in all; training has no last one.
    pub fn steps(&self) -> Option<u64> {
        self.job.plan().steps()
    }
}

impl Iterator for DataLoader {
    type Item = Result<Vec<Batch>>;

    fn next(&mut self) -> Option<Result<Vec<Batch>>> {
        match self.steps() {
            Some(steps) if self.position >= steps => None,
            _ => Some(self.next_step()),
        }
    }
}
