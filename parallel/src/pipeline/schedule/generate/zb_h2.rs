//! ZB-H2: no bubbles between a rank's first and last action, in nearly twice 1F1B's memory.

use super::{Backward, Result, Schedule, one_stage_each};

/// [`zb_h1`](super::zb_h1) with twice the warm-up: rank `r` of `p` begins with `2 (p - r - 1)` forward passes and puts a
/// `W` off by `2 r` `I`s, so every rank holds at most `2 p - 1` micro-batches. If `F`, `I` and `W` take equally long and
/// there are `2 p - 1` micro-batches or more, no rank is idle between its first and its last action.
///
/// Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.2.
///
/// # Errors
/// If a number is 0.
pub fn zb_h2(ranks: usize, micro_batches: usize) -> Result<Schedule> {
    let plan = |rank| (2 * (ranks - rank - 1), Backward::Split { delay: 2 * rank });
    one_stage_each("zb-h2", ranks, micro_batches, plan)
}
