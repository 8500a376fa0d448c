//! Schedules without flushes (PipeDream): weights are updated while micro-batches are in flight. A micro-batch uses one version
//! of a stage's weights, in forward and in backward.
//!
//! Gradients are those of weights some updates old, which is not what one device computes. So a program has to ask for these
//! schedules.

use std::collections::BTreeMap;

use super::{Action, ActionKind, Error, Result, Schedule, one_f_one_b, verify};

/// A schedule with updates, and the weight version that each action uses.
///
/// A stage makes version `u + 1` of its weights from version `u` by the gradients of the micro-batches
/// `u * interval .. (u + 1) * interval`. That is an action of the schedule, the `U` of the last of these micro-batches. Version 0
/// is the initial weights. Micro-batches that are left over after the last whole interval only add gradients.
///
/// [`AsynchronousPipeline`](crate::pipeline::ranks::AsynchronousPipeline) runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asynchronous {
    /// The actions.
    pub schedule: Schedule,
    /// The number of micro-batches of an update.
    pub interval: usize,
    /// For each stage, for each micro-batch, the version that its forward and its backward pass use.
    pub versions: Vec<Vec<usize>>,
}

/// PipeDream: 1F1B without flush, with an update after every backward pass. A forward pass uses the newest weights, and the
/// backward pass of the micro-batch uses the same version. So rank `r` of `p` keeps `p - r` versions, one more than its warm-up.
///
/// ```text
/// rank 0 | F0 F1       B0--- U F2 B1--- U    B2--- U      F2 uses version 1, B1 still version 0
/// rank 1 |    F0 B0--- U F1 B1--- U F2 B2--- U            F1 and B1 use version 1
/// ```
///
/// Source: Narayanan et al., "PipeDream" (2019), section 3.3, "weight stashing".
///
/// # Errors
/// If a number is 0.
pub fn weight_stashing(ranks: usize, micro_batches: usize) -> Result<Asynchronous> {
    let version = |stage: usize, micro_batch: usize| micro_batch.saturating_sub(ranks - stage - 1);
    build(ranks, micro_batches, 1, version)
}

/// PipeDream with vertical sync: as [`weight_stashing`], but a micro-batch uses at every stage the version that the first stage
/// has for it, so a gradient is one of a single version of the whole model. Every rank keeps `p` versions of `p` ranks.
///
/// ```text
/// rank 0 | F0 F1       B0--- U F2 B1--- U    B2--- U      F2 uses version 1 ..
/// rank 1 |    F0 B0--- U F1 B1--- U F2 B2--- U            .. here too, where version 2 is the newest
/// ```
///
/// Source: Narayanan et al., "PipeDream" (2019), section 3.3, "vertical sync".
///
/// # Errors
/// If a number is 0.
pub fn vertical_sync(ranks: usize, micro_batches: usize) -> Result<Asynchronous> {
    build(ranks, micro_batches, 1, |_, micro_batch| micro_batch.saturating_sub(ranks.saturating_sub(1)))
}

/// PipeDream-2BW: 1F1B without flush, with an update after every `interval` backward passes. The micro-batches of update `u` use the
/// weights of version `u - 1` on every stage, so two versions are enough: `W(u + 1) = W(u) - lr * gradient(W(u - 1))`.
///
/// Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (arXiv:2006.09503), section 3.1.
///
/// # Errors
/// If a number is 0, or `interval` is smaller than `ranks`: then version `u - 1` would come too late.
pub fn double_buffered(ranks: usize, interval: usize, micro_batches: usize) -> Result<Asynchronous> {
    if interval < ranks {
        let got = format!("an update every {interval} micro-batches over {ranks} ranks");
        return Err(Error::Invalid {
            op: "double_buffered",
            got,
            wanted: "at least as many as there are ranks",
        });
    }
    build(ranks, micro_batches, interval, |_, micro_batch| (micro_batch / interval).saturating_sub(1))
}

/// 1F1B with an update after each whole interval; `version` of a stage and micro-batch.
fn build(
    ranks: usize,
    micro_batches: usize,
    interval: usize,
    version: impl Fn(usize, usize) -> usize,
) -> Result<Asynchronous> {
    let mut schedule = one_f_one_b(ranks, micro_batches)?;
    for list in &mut schedule.ranks {
        let updated = |action: &Action| {
            let due =
                action.kind == ActionKind::Backward && (action.micro_batch + 1).is_multiple_of(interval);
            due.then_some(action.with(ActionKind::Update))
        };
        *list = list.iter().flat_map(|action| std::iter::once(*action).chain(updated(action))).collect();
    }
    let of_stage = |stage| (0..micro_batches).map(|micro_batch| version(stage, micro_batch)).collect();
    Ok(Asynchronous { interval, versions: (0..ranks).map(of_stage).collect(), schedule })
}

impl Asynchronous {
    /// Checks the schedule as [`verify`] does, that there is an update after each interval, and that every version is made before
    /// it is used. Returns how many versions each stage keeps at most: those that are used again, and the newest.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn verify(&self, capacity: usize) -> Result<Vec<usize>> {
        verify(&self.schedule, capacity)?;
        if self.schedule.replicas.iter().any(|&replicas| replicas > 1) {
            let got = format!("replicas {:?} in a schedule with updates", self.schedule.replicas);
            return Err(Error::Invalid { op: "verify", got, wanted: "one of each stage" });
        }
        let (stages, micro_batches) = (self.schedule.stages(), self.schedule.micro_batches);
        let fits = self.versions.len() == stages && self.versions.iter().all(|v| v.len() == micro_batches);
        if !fits || self.interval == 0 {
            let lengths: Vec<usize> = self.versions.iter().map(Vec::len).collect();
            let got = format!("versions for {lengths:?} micro-batches, an update every {}", self.interval);
            return Err(Error::Invalid {
                op: "verify",
                got,
                wanted: "one for each stage and micro-batch, 1 or more",
            });
        }
        (0..stages).map(|stage| self.kept(stage)).collect()
    }

    /// How many of a stage's computations use each version, of its own weights or of another stage's.
    pub(crate) fn uses(&self, stage: usize, of: usize) -> BTreeMap<usize, usize> {
        let mut uses = BTreeMap::new();
        for (_, action) in self.work(stage).filter(|(_, action)| action.kind != ActionKind::Update) {
            *uses.entry(self.versions[of][action.micro_batch]).or_default() += 1;
        }
        uses
    }

    /// A stage's computations and updates, with their positions in its rank's list.
    fn work(&self, stage: usize) -> impl Iterator<Item = (usize, Action)> + '_ {
        let all = self.schedule.ranks[self.schedule.placement[stage]].iter().copied().enumerate();
        all.filter(move |(_, action)| action.stage == stage && !action.kind.is_transfer())
    }

    /// How many versions a stage keeps at most.
    fn kept(&self, stage: usize) -> Result<usize> {
        let rank = self.schedule.placement[stage];
        let (mut left, mut newest, mut most) = (self.uses(stage, stage), 0, 1);
        for (position, action) in self.work(stage) {
            let wrong = |why| Err(Error::Action { rank, position, action, why });
            let due = (newest + 1) * self.interval;
            let used = self.versions[stage][action.micro_batch];
            match action.kind {
                ActionKind::Update if action.micro_batch + 1 == due => newest += 1,
                ActionKind::Update => {
                    return wrong(format!("the next update is due after micro-batch {}", due - 1));
                }
                ActionKind::Backward | ActionKind::Weight if action.micro_batch >= due => {
                    return wrong(format!("an update was due after micro-batch {}", due - 1));
                }
                _ if used > newest => {
                    return wrong(format!("uses version {used} of the weights, the newest is {newest}"));
                }
                _ => {}
            }
            let again = left.iter().filter(|&(&version, &count)| version < newest && count > 0).count();
            most = most.max(again + 1);
            if action.kind != ActionKind::Update {
                left.entry(used).and_modify(|count| *count -= 1);
            }
        }
        let last = (newest + 1) * self.interval;
        match last <= self.schedule.micro_batches {
            true => Err(Error::Missing { rank, action: Action::new(stage, ActionKind::Update, last - 1) }),
            false => Ok(most),
        }
    }
}
