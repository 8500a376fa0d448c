//! ZB-H1: weight gradients fill 1F1B's bubbles, in 1F1B's memory.

use super::{Backward, Result, Schedule, one_stage_each};

/// 1F1B with its backward passes in two, so that the gradient of the input goes on before that of the weights is computed. Rank
/// `r` computes a `W` after `r` further `I`s, so every rank holds at most `p` micro-batches; what is put off fills the end.
///
/// ```text
/// rank 0 | F0 F1    I0 W0 F2 I1 W1 I2 W2
/// rank 1 |    F0 I0 F1 I1 W0 F2 I2 W1 W2
/// ```
///
/// Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.1.
///
/// # Errors
/// If a number is 0.
pub fn zb_h1(ranks: usize, micro_batches: usize) -> Result<Schedule> {
    one_stage_each("zb-h1", ranks, micro_batches, |rank| (ranks - rank - 1, Backward::Split { delay: rank }))
}
