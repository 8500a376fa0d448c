//! Schedules without flushes: weights are updated while micro-batches are on their way, each of which uses one version of a
//! stage's weights, forward and backward.
//!
//! Not what one device computes: gradients are of weights some updates old. So nothing uses these schedules unless asked to.

use std::collections::HashMap;

use super::{Action, Error, Kind, Result, Schedule, one_f_one_b, verify};

/// A schedule of many updates, and which weights it uses.
///
/// A stage makes version `u + 1` of its weights from version `u` once it has the gradients of the micro-batches
/// `u * interval .. (u + 1) * interval`. Version 0 is what it begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asynchronous {
    /// The actions.
    pub schedule: Schedule,
    /// The micro-batches of an update, whose gradients are averaged.
    pub interval: usize,
    /// For each stage, for each micro-batch, the version that its forward and its backward pass use.
    pub versions: Vec<Vec<usize>>,
}

/// PipeDream: 1F1B without flush, an update after every backward pass. A forward pass uses the newest weights, and the
/// backward pass the same again, so rank `r` of `p` keeps `p - r` versions: one more than its warm-up.
///
/// Source: Narayanan et al., "PipeDream" (2019), section 3.3, "weight stashing".
///
/// # Errors
/// If a number is 0.
pub fn weight_stashing(ranks: usize, micro_batches: usize) -> Result<Asynchronous> {
    let schedule = one_f_one_b(ranks, micro_batches)?;
    let version = |stage: usize, micro_batch: usize| micro_batch.saturating_sub(ranks - stage - 1);
    let of_stage = |stage| (0..micro_batches).map(|micro_batch| version(stage, micro_batch)).collect();
    Ok(Asynchronous { interval: 1, versions: (0..ranks).map(of_stage).collect(), schedule })
}

/// PipeDream-2BW: 1F1B without flush, an update after every `interval` backward passes. The micro-batches of update `u` use the
/// weights of version `u - 1` on every stage, so two versions are enough.
///
/// Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (arXiv:2006.09503), section 3.1.
///
/// # Errors
/// If a number is 0, or `interval` is smaller than `ranks`: then version `u - 1` would come too late.
pub fn double_buffered(ranks: usize, interval: usize, micro_batches: usize) -> Result<Asynchronous> {
    let schedule = one_f_one_b(ranks, micro_batches)?;
    if interval < ranks {
        let got = format!("an update every {interval} micro-batches over {ranks} ranks");
        return Err(Error::Invalid {
            op: "double_buffered",
            got,
            wanted: "at least as many as there are ranks",
        });
    }
    let of_stage: Vec<usize> = (0..micro_batches).map(|m| (m / interval).saturating_sub(1)).collect();
    Ok(Asynchronous { interval, versions: vec![of_stage; ranks], schedule })
}

impl Asynchronous {
    /// Checks the schedule as [`verify`] does, and that every version has been made before it is used. Returned is how
    /// many versions each stage keeps at the most: those that will be used again, and the newest.
    ///
    /// # Errors
    /// What is wrong first.
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
        (0..stages).map(|stage| self.kept(stage)).collect()
    }

    /// The most versions that a stage keeps at once.
    fn kept(&self, stage: usize) -> Result<usize> {
        let rank = self.schedule.placement[stage];
        let all = self.schedule.ranks[rank].iter().copied().enumerate();
        let uses = || all.clone().filter(|(_, a)| a.stage == stage && !a.kind.is_transfer());
        let version = |action: Action| self.versions[stage][action.micro_batch];
        let mut left: HashMap<usize, usize> = HashMap::new();
        uses().for_each(|(_, action)| *left.entry(version(action)).or_default() += 1);
        let (mut newest, mut gradients, mut most) = (0, 0, 1);
        for (position, action) in uses() {
            let used = version(action);
            if used > newest {
                let why = format!("uses version {used} of the weights, the newest is {newest}");
                return Err(Error::Action { rank, position, action, why });
            }
            left.entry(used).and_modify(|count| *count -= 1);
            if matches!(action.kind, Kind::Backward | Kind::Weight) {
                gradients += 1;
                newest = gradients / self.interval;
            }
            let again = left.iter().filter(|&(&v, &count)| v < newest && count > 0).count();
            most = most.max(again + 1);
        }
        Ok(most)
    }
}
