//! [`Cell`]: what a rank keeps of a micro-batch at one of its stages.

use phalanx_nn::autograd::{Leaf, Recompute, Var, WeightWork};
use phalanx_tensor::Tensor;

use super::Spec;

/// Everything waits here for the action that uses it.
#[derive(Default)]
pub(super) struct Cell {
    /// The stage's input, for `F`.
    pub(super) input: Option<Tensor>,
    /// The stage's output, for `SEND_F`.
    pub(super) output: Option<Tensor>,
    /// For `B` or `I`.
    pub(super) graph: Option<Graph>,
    /// The output's gradient, for `B` or `I`.
    pub(super) output_grad: Option<Tensor>,
    /// The input's gradient, for `SEND_B`.
    pub(super) input_grad: Option<Tensor>,
    /// For `W`.
    pub(super) weights: Option<Weights>,
}

impl Cell {
    /// Whether nothing waits here.
    pub(super) fn is_empty(&self) -> bool {
        let Cell { input, output, graph, output_grad, input_grad, weights } = self;
        let tensors = [input, output, output_grad, input_grad];
        tensors.iter().all(|tensor| tensor.is_none()) && graph.is_none() && weights.is_none()
    }
}

/// What a forward pass leaves for the backward pass.
pub(super) struct Graph {
    /// The input, whose gradient the stage before waits for.
    pub(super) input: Option<Leaf>,
    /// The output: of a stage but the last, without its values.
    pub(super) root: Var,
    /// What the output was.
    pub(super) output: Spec,
    /// What computes again what was not kept.
    pub(super) recompute: Option<Recompute>,
}

/// What `I` leaves for `W`; nothing where no parameter is trained.
pub(super) struct Weights(pub(super) Option<WeightWork>);
