//! Interleaved 1F1B: several stages a rank, so the pipeline fills in smaller steps.

use super::{Backward, Cell, Result, Schedule, alternate, check, one_f_one_b};

/// Rank `r` of `p` has the stages `r`, `r + p`, `r + 2 p` and so on, `chunks` of them. Micro-batches go in groups: a group
/// passes all of a rank's stages before the next begins, forward from the first stage, backward from the last. The warm-up
/// is `2 (p - r - 1) + (chunks - 1) g` forward passes of one stage each, `g` being the largest group. One chunk is
/// [`one_f_one_b`].
///
/// Groups have `p` micro-batches. If these do not divide, there are as many groups as there could be of `p`, whose sizes differ
/// by one at the most, larger first. So with `p` micro-batches or more the bubble is `(p - 1) / (chunks m + p - 1)` for any number
/// `m`, if `B` takes twice as long as `F`. A rank holds at most `2 (p - 1) + (chunks - 1) g + 1` activations of a stage.
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
    let groups = (micro_batches / ranks).max(1);
    let warm_up = |rank| 2 * (ranks - rank - 1) + (chunks - 1) * micro_batches.div_ceil(groups);
    let list = |rank| {
        let stages = (0..chunks).map(|chunk| rank + chunk * ranks);
        let forwards = cells(micro_batches, groups, stages.clone());
        let backwards = cells(micro_batches, groups, stages.rev());
        alternate(&forwards, &backwards, warm_up(rank), Backward::Whole)
    };
    let placement = (0..ranks * chunks).map(|stage| stage % ranks).collect();
    Ok(Schedule { placement, micro_batches, ranks: (0..ranks).map(list).collect() })
}

/// Each group of micro-batches through all the stages, then the next.
fn cells(micro_batches: usize, groups: usize, stages: impl Iterator<Item = usize> + Clone) -> Vec<Cell> {
    let first = |group: usize| group * (micro_batches / groups) + group.min(micro_batches % groups);
    let through = |group| {
        let stages = stages.clone();
        stages.flat_map(move |stage| {
            (first(group)..first(group + 1)).map(move |micro_batch| (stage, micro_batch))
        })
    };
    (0..groups).flat_map(through).collect()
}
