//! GPipe: all forward passes, then all backward passes.

use super::{Backward, Result, Schedule, one_stage_each};

/// All forward passes, then all backward passes, both ascending. A rank holds every micro-batch at once.
///
/// ```text
/// rank 0 | F0 F1 F2       B0--- B1--- B2---
/// rank 1 |    F0 F1 F2 B0--- B1--- B2---
/// ```
///
/// Source: Huang et al., "GPipe" (2019), section 2.3, with the backward passes ascending.
///
/// # Errors
/// If a number is 0.
pub fn gpipe(ranks: usize, micro_batches: usize) -> Result<Schedule> {
    one_stage_each("gpipe", ranks, micro_batches, |_| (micro_batches, Backward::Whole))
}
