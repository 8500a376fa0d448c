//! One query for each head, and heads that share a key head: these queries are those of one head, so that the keys and the values
//! are read once for all of them.

use phalanx_tensor::{DType, Result, Tensor};

use super::{Attention, Problem};

/// How the heads of one query each are joined.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    /// Heads, and how many share a key head.
    heads: usize,
    group: usize,
}

impl Groups {
    /// What can be joined with the same bits: no query has a number of its own that matters. A GPU's tiles join heads
    /// themselves.
    pub(super) fn new(
        problem: &Problem,
        query: &Tensor,
        mask: Option<&Tensor>,
        config: &Attention,
    ) -> Option<Groups> {
        let numbered = config.is_causal
            || config.dropout.is_some()
            || mask.is_some_and(|mask| mask.dtype() == DType::I64);
        let joins = problem.queries == 1
            && problem.keys > 1
            && problem.group > 1
            && !numbered
            && !query.device().is_cuda();
        joins.then(|| Groups { heads: query.shape()[query.rank() - 3], group: problem.group })
    }

    /// [.., H, 1, D] as [.., H / group, group, D].
    pub(super) fn join(self, tensor: &Tensor) -> Result<Tensor> {
        self.seen_as(tensor, [self.heads / self.group, self.group])
    }

    /// And back.
    pub(super) fn part(self, tensor: &Tensor) -> Result<Tensor> {
        self.seen_as(tensor, [self.heads, 1])
    }

    fn seen_as(self, tensor: &Tensor, [heads, queries]: [usize; 2]) -> Result<Tensor> {
        let mut shape: Vec<isize> = tensor.shape().iter().map(|&size| size as isize).collect();
        let lead = shape.len() - 3;
        (shape[lead], shape[lead + 1]) = (heads as isize, queries as isize);
        tensor.reshape(&shape)
    }

    /// The mask that queries joined so see.
    pub(super) fn join_mask(
        self,
        problem: &Problem,
        query: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        mask.map(|mask| self.join(&mask.broadcast_to(&problem.scores_shape(query))?)).transpose()
    }
}
