//! Schedules without flushes (PipeDream): weights are updated while micro-batches are in flight. A micro-batch uses one version
//! of a stage's weights, in forward and in backward.
//!
//! Gradients are those of weights some updates old, which is not what one device computes. So a program has to ask for these
//! schedules.

use std::collections::BTreeMap;

use super::{Action, ActionKind, Error, Result, Schedule, replicated, verify};

/// A schedule with updates, and the weight version that each action uses.
///
/// A stage makes version `u + 1` of its weights from version `u` by the gradients of the micro-batches
/// `u * i .. (u + 1) * i`, where `i` is [`Asynchronous::interval_of`] the stage. That is an action of the schedule, the `U` of the
/// last of these micro-batches. Version 0 is the initial weights. Micro-batches that are left over after the last whole interval
/// only add gradients.
///
/// Replicas of a stage take micro-batches in turn ([`replicated`](super::replicated)) and make the same updates, by the gradients of
/// all of them.
///
/// [`AsynchronousPipeline`](crate::pipeline::ranks::AsynchronousPipeline) runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asynchronous {
    /// The actions.
    pub schedule: Schedule,
    /// The number of micro-batches of an update, at stages that have no more replicas than that.
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
    weight_stashing_over(&vec![1; ranks], micro_batches)
}

/// [`weight_stashing`] over stages with replicas. A stage of `r` replicas updates when each of them has computed a micro-batch, by the
/// gradients of these `r`. So stages with unlike numbers of replicas make unlike numbers of updates.
///
/// ```text
/// replicas 2-1
/// stage 0 | F0    F2    B0--- U F4 B2--- U      F4 uses version 1, of the gradients of 0 and 1
///         | F1    F3       B1--- U F5 B3--- U
/// stage 1 |    F0 B0--- U F1 B1--- U ..         F1 uses version 1, of the gradients of 0
/// ```
///
/// Source: Narayanan et al., "PipeDream" (2019), section 3.2; the authors' program averages the gradients of a stage's replicas after
/// each backward pass.
///
/// # Errors
/// As [`replicated`](super::replicated).
pub fn weight_stashing_over(replicas: &[usize], micro_batches: usize) -> Result<Asynchronous> {
    with_updates(replicas, micro_batches, 1)
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
    vertical_sync_over(&vec![1; ranks], micro_batches)
}

/// [`vertical_sync`] over stages with replicas. All stages update after the same micro-batches, so that one number means the same
/// version everywhere: the interval is the least common multiple of the numbers of replicas.
///
/// # Errors
/// As [`replicated`](super::replicated).
pub fn vertical_sync_over(replicas: &[usize], micro_batches: usize) -> Result<Asynchronous> {
    let mut plan = with_updates(replicas, micro_batches, common_multiple(replicas))?;
    let (first, stages) = (plan.versions.swap_remove(0), replicas.len());
    plan.versions = vec![first; stages];
    Ok(plan)
}

/// PipeDream-2BW: 1F1B without flush, with an update after every `interval` backward passes. The micro-batches of update `u` use the
/// weights of version `u - 1` on every stage, so two versions are enough: `W(u + 1) = W(u) - lr * gradient(W(u - 1))`.
///
/// Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (arXiv:2006.09503), section 3.1.
///
/// # Errors
/// If a number is 0, or `interval` is smaller than `ranks`: then version `u - 1` would come too late.
pub fn double_buffered(ranks: usize, interval: usize, micro_batches: usize) -> Result<Asynchronous> {
    double_buffered_over(&vec![1; ranks], interval, micro_batches)
}

/// [`double_buffered`] over stages with replicas.
///
/// # Errors
/// As [`replicated`](super::replicated), and if `interval` is smaller than the number of ranks.
pub fn double_buffered_over(
    replicas: &[usize],
    interval: usize,
    micro_batches: usize,
) -> Result<Asynchronous> {
    let ranks = replicas.iter().fold(0_usize, |ranks, &count| ranks.saturating_add(count));
    if interval < ranks {
        let got = format!("an update every {interval} micro-batches over {ranks} ranks");
        return Err(Error::Invalid {
            op: "double_buffered",
            got,
            wanted: "at least as many as there are ranks",
        });
    }
    let mut plan = with_updates(replicas, micro_batches, interval)?;
    let versions = (0..micro_batches).map(|micro_batch| (micro_batch / interval).saturating_sub(1)).collect();
    plan.versions = vec![versions; replicas.len()];
    Ok(plan)
}

/// The least number that all of these divide: the micro-batches after which every stage of a pipeline with these replicas has
/// updated under [`weight_stashing_over`]. 0 if one is 0.
pub fn common_multiple(replicas: &[usize]) -> usize {
    let divisor = |a: usize, b: usize| {
        let (mut a, mut b) = (a, b);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a.max(1)
    };
    replicas.iter().fold(1, |all: usize, &count| (all / divisor(all, count)).saturating_mul(count))
}

/// 1F1B with an update after each whole interval, whose forward passes use the newest weights.
fn with_updates(replicas: &[usize], micro_batches: usize, interval: usize) -> Result<Asynchronous> {
    let schedule = replicated(replicas, micro_batches)?;
    let mut plan = Asynchronous { schedule, interval, versions: Vec::new() };
    for (stage, &count) in replicas.iter().enumerate() {
        let interval = plan.interval_of(stage);
        // The update that comes after a replica's backward pass, if it is the replica's last of an interval.
        let updated = |action: &Action| {
            let end = (action.micro_batch / interval + 1) * interval;
            let due = action.kind == ActionKind::Backward && action.micro_batch + count >= end;
            (due && end <= micro_batches).then(|| Action::new(stage, ActionKind::Update, end - 1))
        };
        let mut newest = vec![0; micro_batches];
        for list in &mut plan.schedule.ranks[plan.schedule.placement[stage]..][..count] {
            *list = list.iter().flat_map(|action| std::iter::once(*action).chain(updated(action))).collect();
            let mut updates = 0;
            for action in list {
                match action.kind {
                    ActionKind::Update => updates += 1,
                    ActionKind::Forward => newest[action.micro_batch] = updates,
                    _ => {}
                }
            }
        }
        plan.versions.push(newest);
    }
    Ok(plan)
}

impl Asynchronous {
    /// Checks the schedule as [`verify`] does, that there is an update after each interval, and that every version is made before
    /// it is used. Returns how many versions each stage keeps at most: those that are used again, and the newest.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn verify(&self, capacity: usize) -> Result<Vec<usize>> {
        verify(&self.schedule, capacity)?;
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
        let kept = |stage| {
            let ranks = self.schedule.ranks_of(stage);
            ranks.map(|rank| self.kept(rank, stage)).try_fold(0, |most, kept| Ok(kept?.max(most)))
        };
        (0..stages).map(kept).collect()
    }

    /// The number of micro-batches of an update of a stage: the interval, or one of each replica if there are more replicas.
    pub fn interval_of(&self, stage: usize) -> usize {
        self.interval.max(self.schedule.ranks_of(stage).len())
    }

    /// How many of a rank's computations at a stage use each version, of the stage's weights or of another stage's.
    pub(crate) fn uses(&self, rank: usize, stage: usize, of: usize) -> BTreeMap<usize, usize> {
        let mut uses = BTreeMap::new();
        for (_, action) in self.work(rank, stage).filter(|(_, action)| action.kind != ActionKind::Update) {
            *uses.entry(self.versions[of][action.micro_batch]).or_default() += 1;
        }
        uses
    }

    /// A rank's computations and updates at a stage, with their positions in its list.
    fn work(&self, rank: usize, stage: usize) -> impl Iterator<Item = (usize, Action)> + '_ {
        let all = self.schedule.ranks[rank].iter().copied().enumerate();
        all.filter(move |(_, action)| action.stage == stage && !action.kind.is_transfer())
    }

    /// How many versions a rank keeps of a stage at most.
    fn kept(&self, rank: usize, stage: usize) -> Result<usize> {
        let (mut left, mut newest, mut most) = (self.uses(rank, stage, stage), 0, 1);
        for (position, action) in self.work(rank, stage) {
            let wrong = |why| Err(Error::Action { rank, position, action, why });
            let due = (newest + 1) * self.interval_of(stage);
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
        let last = (newest + 1) * self.interval_of(stage);
        match last <= self.schedule.micro_batches {
            true => Err(Error::Missing { rank, action: Action::new(stage, ActionKind::Update, last - 1) }),
            false => Ok(most),
        }
    }
}
