//! Schedules as pure functions of the number of ranks and of micro-batches. Both can be any number from 1 up.

use phalanx_tensor::even_piece;

use super::action::trim;
use super::{Action, ActionKind, Error, Result, Schedule};
use crate::pipeline::Cell;

/// A schedule of ranks, stages of each, and micro-batches.
type Generator = fn(usize, usize, usize) -> Result<Schedule>;

const GENERATORS: &[(&str, Generator)] = &[
    ("gpipe", |ranks, _, micro_batches| gpipe(ranks, micro_batches)),
    ("1f1b", |ranks, _, micro_batches| one_f_one_b(ranks, micro_batches)),
    ("interleaved", interleaved),
    ("zb-h1", |ranks, _, micro_batches| zb_h1(ranks, micro_batches)),
    ("zb-h2", |ranks, _, micro_batches| zb_h2(ranks, micro_batches)),
    ("zb-v", |ranks, _, micro_batches| zb_v(ranks, micro_batches)),
];

/// The names that [`by_name`] knows.
pub const NAMES: [&str; GENERATORS.len()] = {
    let (mut names, mut i) = ([""; GENERATORS.len()], 0);
    while i < names.len() {
        names[i] = GENERATORS[i].0;
        i += 1;
    }
    names
};

/// The schedule of a name, one of [`NAMES`]. `chunks` is the number of stages of a rank for `interleaved`. The other schedules
/// ignore it: `zb-v` has two stages a rank, and the rest have one.
///
/// # Errors
/// For any other name, and if a number is 0.
pub fn by_name(name: &str, ranks: usize, chunks: usize, micro_batches: usize) -> Result<Schedule> {
    match GENERATORS.iter().find(|(known, _)| *known == name) {
        Some((_, generate)) => generate(ranks, chunks, micro_batches),
        None => Err(Error::Invalid {
            op: "schedule",
            got: format!("{name:?}"),
            wanted: "gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v",
        }),
    }
}

/// Whether the backward passes of a rank are whole or split.
#[derive(Clone, Copy)]
enum Backward {
    /// `B`.
    Whole,
    /// `I`, and its `W` after `delay` further `I`s.
    Split { delay: usize },
}

/// A rank's list: `warm_up` forward passes, then one forward and one backward in turn, then the remaining backward passes, and
/// the remaining `W`s.
fn alternate(forwards: &[Cell], backwards: &[Cell], warm_up: usize, backward: Backward) -> Vec<Action> {
    let act = |kind, Cell { stage, micro_batch }: Cell| Action::new(stage, kind, micro_batch);
    let (first, rest) = forwards.split_at(warm_up.min(forwards.len()));
    let mut actions: Vec<Action> = first.iter().map(|&f| act(ActionKind::Forward, f)).collect();
    let mut rest = rest.iter();
    for (i, &b) in backwards.iter().enumerate() {
        actions.extend(rest.next().map(|&f| act(ActionKind::Forward, f)));
        match backward {
            Backward::Whole => actions.push(act(ActionKind::Backward, b)),
            Backward::Split { delay } => {
                actions.push(act(ActionKind::Input, b));
                actions.extend(i.checked_sub(delay).map(|done| act(ActionKind::Weight, backwards[done])));
            }
        }
    }
    if let Backward::Split { delay } = backward {
        let left = backwards.len().saturating_sub(delay);
        actions.extend(backwards[left..].iter().map(|&b| act(ActionKind::Weight, b)));
    }
    actions
}

/// A schedule of one stage a rank. `plan` gives the warm-up and the kind of backward passes of a rank.
fn one_stage_each(
    op: &'static str,
    ranks: usize,
    micro_batches: usize,
    plan: impl Fn(usize) -> (usize, Backward),
) -> Result<Schedule> {
    check(op, &[("ranks", ranks), ("micro-batches", micro_batches)])?;
    let list = |rank| {
        let cells: Vec<Cell> =
            (0..micro_batches).map(|micro_batch| Cell { stage: rank, micro_batch }).collect();
        let (warm_up, backward) = plan(rank);
        alternate(&cells, &cells, warm_up, backward)
    };
    let (placement, replicas) = ((0..ranks).collect(), Vec::new());
    Ok(Schedule { placement, replicas, micro_batches, ranks: (0..ranks).map(list).collect() })
}

/// Refuses numbers that are 0.
fn check(op: &'static str, numbers: &[(&str, usize)]) -> Result<()> {
    match numbers.iter().find(|&&(_, number)| number == 0) {
        Some((what, _)) => Err(Error::Invalid { op, got: format!("0 {what}"), wanted: "at least 1" }),
        None => Ok(()),
    }
}

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

/// 1F1B over stages with unlike numbers of replicas, which take micro-batches in turn (PipeDream's 1F1B-RR): micro-batch `m` is
/// computed at stage `s` by replica `m % replicas[s]`, forward and backward. The ranks of a stage follow those of the stage
/// before. With `n` ranks in later stages, a replica of a stage with `r` runs `n / r` forward passes (rounded up) before
/// its first backward pass, and one more. With one replica each it is [`one_f_one_b`].
///
/// ```text
/// replicas 2-1
/// stage 0 | F0    F2    B0--- F4 B2---
///         | F1    F3       B1--- F5 B3---
/// stage 1 |    F0 B0--- F1 B1--- F2 B2---
/// ```
///
/// Source: Narayanan et al., "PipeDream" (2019), section 3.2, with a flush after the last micro-batch.
///
/// # Errors
/// If a number is 0, or there are fewer micro-batches than replicas of a stage.
pub fn replicated(replicas: &[usize], micro_batches: usize) -> Result<Schedule> {
    let fewest = replicas.iter().copied().min().unwrap_or(0);
    check(
        "replicated",
        &[("stages", replicas.len()), ("replicas", fewest), ("micro-batches", micro_batches)],
    )?;
    if let Some(most) = replicas.iter().find(|&&count| count > micro_batches) {
        let got = format!("{micro_batches} micro-batches for {most} replicas");
        return Err(Error::Invalid { op: "replicated", got, wanted: "at least one for each replica" });
    }
    let (mut placement, mut ranks) = (Vec::new(), Vec::new());
    for (stage, &count) in replicas.iter().enumerate() {
        placement.push(ranks.len());
        let later: usize = replicas[stage + 1..].iter().sum();
        for replica in 0..count {
            let own = (replica..micro_batches).step_by(count);
            let cells: Vec<Cell> = own.map(|micro_batch| Cell { stage, micro_batch }).collect();
            ranks.push(alternate(&cells, &cells, later.div_ceil(count), Backward::Whole));
        }
    }
    let mut replicas = replicas.to_vec();
    trim(&mut replicas);
    Ok(Schedule { placement, replicas, micro_batches, ranks })
}

/// Rank `r` of `p` has the stages `r`, `r + p`, `r + 2 p` and so on, `chunks` of them. Micro-batches go in groups: a group
/// passes all of a rank's stages before the next begins, forward from the first stage, backward from the last. The warm-up
/// is `2 (p - r - 1) + (chunks - 1) g` forward passes of one stage each, `g` being the largest group. One chunk is
/// [`one_f_one_b`].
///
/// Groups have `p` micro-batches. If `p` does not divide their number, there are as many groups as there are whole groups of `p`,
/// and their sizes differ by at most one, larger first. So with `p` micro-batches or more the bubble is `(p - 1) / (chunks m + p - 1)` for any number
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
        let forwards = interleaved_cells(micro_batches, groups, stages.clone());
        let backwards = interleaved_cells(micro_batches, groups, stages.rev());
        alternate(&forwards, &backwards, warm_up(rank), Backward::Whole)
    };
    let placement = (0..ranks * chunks).map(|stage| stage % ranks).collect();
    let replicas = Vec::new();
    Ok(Schedule { placement, replicas, micro_batches, ranks: (0..ranks).map(list).collect() })
}

/// The cells in order: each group of micro-batches goes through all stages before the next group begins.
fn interleaved_cells(
    micro_batches: usize,
    groups: usize,
    stages: impl Iterator<Item = usize> + Clone,
) -> Vec<Cell> {
    let through = |group| {
        let stages = stages.clone();
        stages.flat_map(move |stage| {
            even_piece(micro_batches, groups, group).map(move |micro_batch| Cell { stage, micro_batch })
        })
    };
    (0..groups).flat_map(through).collect()
}

/// 1F1B with split backward passes: the gradient of the input is sent on before the gradient of the weights is computed. Rank
/// `r` computes a `W` after `r` further `I`s, so every rank holds at most `p` micro-batches, and the delayed `W`s fill the
/// bubble at the end.
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

/// [`zb_h1`] with twice the warm-up: rank `r` of `p` begins with `2 (p - r - 1)` forward passes and puts a
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

/// Rank `r` of `p` has the stages `r` and `2 p - 1 - r`. So a micro-batch comes back to the rank where it began, the loss is
/// computed on rank 0, and the last stage's backward pass can follow at once. A rank holds at most `2 p` activations of a
/// stage, which is what 1F1B holds. If `F`, `I` and `W` take equally long, and there are `2 p - 1` micro-batches or more,
/// no rank is idle between its first and its last action.
///
/// Fewer micro-batches are scheduled as `2 p - 1`, and the actions of those that do not exist are left out.
///
/// Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362), section 3.
///
/// # Errors
/// If a number is 0.
pub fn zb_v(ranks: usize, micro_batches: usize) -> Result<Schedule> {
    check("zb-v", &[("ranks", ranks), ("micro-batches", micro_batches)])?;
    let count = micro_batches.max(2 * ranks - 1);
    let placement = (0..2 * ranks).map(|stage| stage.min(2 * ranks - 1 - stage)).collect();
    // Micro-batches do not depend on each other, so the lists stay valid without some of them.
    let exists = |action: &Action| action.micro_batch < micro_batches;
    let list = |rank| zb_v_list(ranks, rank, count).into_iter().filter(exists).collect();
    let replicas = Vec::new();
    Ok(Schedule { placement, replicas, micro_batches, ranks: (0..ranks).map(list).collect() })
}

/// A rank's actions for `count` micro-batches, `2 ranks - 1` or more. `down` is its stage on the way down the V, `up` the one on
/// the way back.
fn zb_v_list(ranks: usize, rank: usize, count: usize) -> Vec<Action> {
    use ActionKind::{Forward, Input, Weight};
    let (mut down, mut up) = (StageProgress::new(rank), StageProgress::new(2 * ranks - 1 - rank));
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
    // The V empties: first the actions that other ranks wait for.
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

/// How many passes of each kind a stage has scheduled.
struct StageProgress {
    stage: usize,
    forwards: usize,
    inputs: usize,
    weights: usize,
}

impl StageProgress {
    fn new(stage: usize) -> StageProgress {
        StageProgress { stage, forwards: 0, inputs: 0, weights: 0 }
    }

    /// The kind's next micro-batch.
    fn next(&mut self, kind: ActionKind) -> Action {
        let count = match kind {
            ActionKind::Forward => &mut self.forwards,
            ActionKind::Input => &mut self.inputs,
            _ => &mut self.weights,
        };
        *count += 1;
        Action::new(self.stage, kind, *count - 1)
    }
}
