//! ZB-V: two stages a rank, laid out as a V, with 1F1B's memory and no bubbles between a rank's first and last action.

use super::{Action, Kind, Result, Schedule, check};

/// Rank `r` of `p` has the stages `r` and `2 p - 1 - r`, so a micro-batch comes back to where it began, the loss is
/// computed on rank 0, and the last stage's backward pass can follow at once. A rank holds at most `2 p` activations of a
/// stage, which is what 1F1B holds. If `F`, `I` and `W` take equally long, and there are `2 p - 1` micro-batches or more,
/// no rank is idle between its first and its last action.
///
/// Fewer micro-batches are scheduled as if there were `2 p - 1`, and what does not exist left out.
///
/// Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362), section 3.
///
/// # Errors
/// If a number is 0.
pub fn zb_v(ranks: usize, micro_batches: usize) -> Result<Schedule> {
    check("zb-v", &[("ranks", ranks), ("micro-batches", micro_batches)])?;
    let count = micro_batches.max(2 * ranks - 1);
    let placement = (0..2 * ranks).map(|stage| stage.min(2 * ranks - 1 - stage)).collect();
    // No micro-batch needs another, so lists stay right without some of them.
    let exists = |action: &Action| action.micro_batch < micro_batches;
    let list = |rank| list(ranks, rank, count).into_iter().filter(exists).collect();
    Ok(Schedule { placement, micro_batches, ranks: (0..ranks).map(list).collect() })
}

/// What a rank does with that many micro-batches, `2 ranks - 1` or more. `Down` is its stage on the way down the V, `up`
/// the one on the way back.
fn list(ranks: usize, rank: usize, count: usize) -> Vec<Action> {
    use Kind::{Forward, Input, Weight};
    let (mut down, mut up) = (Stage::new(rank), Stage::new(2 * ranks - 1 - rank));
    let mut actions = Vec::new();

    // The V fills: as many micro-batches go down as others need to come back up to here.
    for _ in 0..2 * (ranks - rank) - 1 {
        actions.push(down.next(Forward));
    }
    for _ in 0..rank {
        actions.extend([up.next(Forward), down.next(Forward)]);
    }
    for _ in rank..ranks {
        actions.extend([up.next(Forward), up.next(Input), up.next(Weight)]);
    }
    // One forward, input and weight pass of each stage in turn.
    while up.forwards < count {
        if down.forwards < count {
            actions.push(down.next(Forward));
        }
        actions.extend([down.next(Input), down.next(Weight)]);
        actions.extend([up.next(Forward), up.next(Input), up.next(Weight)]);
    }
    // The V empties: first what others wait for.
    for _ in 0..rank {
        actions.extend([down.next(Input), up.next(Input)]);
    }
    for _ in rank..ranks {
        actions.extend([down.next(Input), down.next(Weight)]);
    }
    while up.weights < count {
        actions.push(up.next(Weight));
    }
    while down.weights < count {
        actions.push(down.next(Weight));
    }
    actions
}

/// How far a stage has come.
struct Stage {
    stage: usize,
    forwards: usize,
    inputs: usize,
    weights: usize,
}

impl Stage {
    fn new(stage: usize) -> Stage {
        Stage { stage, forwards: 0, inputs: 0, weights: 0 }
    }

    /// The kind's next micro-batch.
    fn next(&mut self, kind: Kind) -> Action {
        let count = match kind {
            Kind::Forward => &mut self.forwards,
            Kind::Input => &mut self.inputs,
            _ => &mut self.weights,
        };
        *count += 1;
        Action::new(self.stage, kind, *count - 1)
    }
}
