//! 1F1B: a backward pass as soon as there can be one.

use super::{Backward, Result, Schedule, one_stage_each};

/// Rank `r` of `p` runs `p - r - 1` forward passes, then one forward and one backward in turn, then the other backward passes.
/// It holds at most `p - r` micro-batches.
///
/// ```text
/// rank 0 | F0 F1       B0--- F2 B1---    B2---
/// rank 1 |    F0 B0--- F1 B1--- F2 B2---
/// ```
///
/// Source: Narayanan et al., "PipeDream" (2019), section 3.2, with a flush after the last micro-batch (arXiv:2104.04473,
/// section 2.2.1).
///
/// # Errors
/// If a number is 0.
pub fn one_f_one_b(ranks: usize, micro_batches: usize) -> Result<Schedule> {
    one_stage_each("1f1b", ranks, micro_batches, |rank| (ranks - rank - 1, Backward::Whole))
}
