//! Interleaved 1F1B: several stages a rank, so the pipeline fills in smaller steps.

use super::{Backward, Cell, Result, Schedule, alternate, check, one_f_one_b, truncated};

/// Rank `r` of `p` has the stages `r`, `r + p`, `r + 2 p` and so on, `chunks` of them. Micro-batches go in groups of `p`: a group passes
/// all of a rank's stages before the next begins, forward from the first stage, backward from the last. The warm-up is
/// `2 (p - r - 1) + (chunks - 1) p` forward passes, of one stage each. One chunk is [`one_f_one_b`].
///
/// Micro-batches that fill no group are scheduled as if they did, and what does not exist left out.
///
/// Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (arXiv:2104.04473), section 2.2.2.
///
/// # Errors
/// If a number is 0.
pub fn interleaved(ranks: usize, chunks: usize, micro_batches: usize) -> Result<Schedule> {
    check("interleaved", &[("ranks", ranks), ("stages a rank", chunks), ("micro-batches", micro_batches)])?;
    if chunks == 1 {
        return one_f_one_b(ranks, micro_batches);
    }
    let list = |rank| {
        let forwards = cells(ranks, micro_batches, (0..chunks).map(|chunk| rank + chunk * ranks));
        let backwards = cells(ranks, micro_batches, (0..chunks).rev().map(|chunk| rank + chunk * ranks));
        alternate(&forwards, &backwards, 2 * (ranks - rank - 1) + (chunks - 1) * ranks, Backward::Whole)
    };
    let placement = (0..ranks * chunks).map(|stage| stage % ranks).collect();
    let whole = Schedule { placement, micro_batches, ranks: (0..ranks).map(list).collect() };
    Ok(truncated(whole, micro_batches))
}

/// Groups of `group` micro-batches, the last one full too, each through all `stages`.
fn cells(group: usize, micro_batches: usize, stages: impl Iterator<Item = usize> + Clone) -> Vec<Cell> {
    let through = |first| {
        stages
            .clone()
            .flat_map(move |stage| (first..first + group).map(move |micro_batch| (stage, micro_batch)))
    };
    (0..micro_batches).step_by(group).flat_map(through).collect()
}
