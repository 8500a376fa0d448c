//! [`Stages`]: what a pipeline computes.

use phalanx_nn::autograd::Var;
use phalanx_tensor::{DType, Dims, Tensor};

use crate::Result;
use crate::data_parallel::NoSync;

/// The work of a rank's stages, numbered over the whole model.
///
/// With recomputation, `forward` is called twice for a micro-batch and must compute the same; what it does to the outside is
/// to be done only where [`is_recomputing`](phalanx_nn::autograd::is_recomputing) is false.
pub trait Stages: Send + Sync + 'static {
    /// The stage's output for a micro-batch: the stream for the next stage, or, of the last stage, the loss of one element,
    /// from which the backward pass begins. `input` is the output of the stage before; the first has none.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the run of all ranks.
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var>;

    /// The shape and dtype of a stage's input, where every rank knows it; then it is not sent along. Either all ranks know
    /// it or none does.
    fn input_spec(&self, _stage: usize, _micro_batch: usize) -> Option<Spec> {
        None
    }

    /// Called before every `B`, `I` and `W` but those of a stage's last micro-batch: while what it returns lives, gradients only
    /// accumulate. With data parallelism, its [`no_sync`](crate::data_parallel::DataParallel::no_sync).
    fn no_sync(&self) -> Option<NoSync> {
        None
    }
}

/// What a tensor is but for its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Sizes, outermost first.
    pub shape: Dims,
    /// The elements' type.
    pub dtype: DType,
}

impl Spec {
    /// That of a tensor.
    pub fn of(tensor: &Tensor) -> Spec {
        Spec { shape: Dims::from_slice(tensor.shape()), dtype: tensor.dtype() }
    }
}
