//! [`Step`]: a training step as the work of a pipeline's stages; [`Part`], whatever model they are of.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, Documents};
use phalanx_nn::{Batch, Layers, Parameters};
use phalanx_tensor::Context;

use crate::Result;
use crate::data_parallel::{DataParallel, NoSync};
use crate::pipeline::ranks::{Chunks, Spec, Stages};

/// A rank's stages of a model, whatever their layers are made of.
pub trait Part: Parameters + Send + Sync + 'static {
    /// The stream after a stage (of a language model `[B, T, width]`), or after the last one the sum of the losses of all that counts
    /// (rows, or tokens) times `scale`; `input` is the stream before it, which the first stage has not.
    ///
    /// # Errors
    /// If the stage is not here, or the batch does not fit.
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var>;

    /// What a batch is between two stages; none if only the stage before knows.
    fn stream(&self, batch: &Batch) -> Option<Spec>;
}

/// A language model's batch has inputs and targets `[rows, positions]`, and perhaps the [`Documents`] that rows consist of: for each
/// position the one at which its document begins. Every stage has them all, so nothing but the stream goes from stage to stage.
impl<L: Layers> Part for Chunks<Decoder<L>> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        let model = self.of(stage)?;
        let (inputs, targets, documents) = tokens(batch)?;
        let x = match &documents {
            None => model.forward(input.unwrap_or(&inputs))?,
            Some(documents) => model.forward_packed(input.unwrap_or(&inputs), documents)?,
        };
        if !model.stage().last {
            return Ok(x);
        }
        Ok(model.loss(&x, &targets, scale)?)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        let [rows, positions] = *batch.tensors.first()?.shape() else { return None };
        let (shape, dtype) = self.iter().next()?.stream(rows, positions).ok()?;
        Some(Spec { shape, dtype })
    }
}

/// Inputs, targets, and the documents if there are.
fn tokens(batch: &Batch) -> Result<(Var, Var, Option<Documents>)> {
    if batch.tensors.len() < 3 {
        let [inputs, targets] = batch.vars()?;
        return Ok((inputs, targets, None));
    }
    let [inputs, targets, starts] = batch.vars()?;
    Ok((inputs, targets, Some(Documents::new(&starts)?)))
}

/// A step's work: every rank of a pipeline has the same micro-batches.
pub struct Step {
    /// The stages of this rank.
    pub model: Arc<dyn Part>,
    /// What the gradients are shared with.
    pub replicas: Arc<dyn DataParallel>,
    /// In order of their rows.
    pub micro_batches: Vec<Batch>,
    /// What losses are multiplied by: 1 / (counted rows or tokens of the global batch), and so each micro-batch's gradients have
    /// their weight in the mean, however many tokens it has.
    pub scale: f64,
}

impl Stages for Step {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let batch = &self.micro_batches[micro_batch];
        let _context = Context::with(|c| c.batch_offset = batch.first_row as u64);
        self.model.run(stage, input, batch, self.scale)
    }

    fn input_spec(&self, _stage: usize, micro_batch: usize) -> Option<Spec> {
        self.model.stream(&self.micro_batches[micro_batch])
    }

    fn no_sync(&self) -> Option<NoSync> {
        Some(self.replicas.no_sync())
    }
}
