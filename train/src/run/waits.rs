//! The share of time that other ranks waited for each rank: what makes a slow rank visible.
//!
//! Each rank's flight recorder adds up how long the rank's thread waited in calls, by the rank that came last. Now and then the ranks
//! exchange these sums, as many numbers each time whatever the run does. A rank that came late to one group because it waited in another
//! is not the cause: [`waited_for`] passes such time on to the rank that it waited for.

use std::collections::BTreeMap;

use super::training_loop::TrainingLoop;
use crate::Result;
use crate::callback::Event;
use crate::report::conspicuous;

/// The ranks for which a rank waited the longest: as many are exchanged.
const CULPRITS: usize = 8;
/// The steps between two exchanges, if there is no pause before.
pub(super) const EVERY: u64 = 100;
/// Seconds below which the shares say little.
const SECONDS_MIN: f64 = 0.5;

/// How long a rank waited for others.
#[derive(Clone, Debug, Default, PartialEq)]
struct Waited {
    /// The time that passed.
    seconds: f64,
    /// Ranks, and the seconds that it waited for each.
    culprits: Vec<(usize, f64)>,
}

impl TrainingLoop<'_> {
    /// Exchanges how long the ranks waited for each other since the last time, for the next record. A conspicuous rank is an event. All
    /// ranks call it.
    pub(super) fn exchange_waits(&mut self) -> Result<()> {
        let mesh_rank = &self.run.mesh_rank;
        let Some(recorder) = mesh_rank.all_ranks().flight_recorder().filter(|_| mesh_rank.size() > 1) else {
            return Ok(());
        };
        let (culprits, seconds) = recorder.take_waits();
        let mut own = vec![seconds];
        // A rank that is none is in the places that are left.
        let none = (mesh_rank.size(), 0.0);
        let culprits = culprits.into_iter().chain(std::iter::repeat(none)).take(CULPRITS);
        own.extend(culprits.flat_map(|(rank, seconds)| [rank as f64, seconds]));
        let all = mesh_rank.all_gather_slice(&own)?;
        let ranks = all.chunks(own.len()).map(|rank| Waited {
            seconds: rank[0],
            culprits: rank[1..].chunks(2).map(|pair| (pair[0] as usize, pair[1])).collect(),
        });
        let ranks: Vec<Waited> = ranks.collect();
        let shares = waited_for(&ranks);
        let seconds = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
        let found = conspicuous(&shares).filter(|_| seconds > SECONDS_MIN);
        if let Some(rank) = found.filter(|_| found != self.slow_rank) {
            let text =
                format!("rank {rank}: the others waited {:.0} % of the time for it", 100.0 * shares[rank]);
            self.event(&Event::Notice { step: self.run.done, text: &text })?;
        }
        (self.slow_rank, self.waited_for) = (found, Some(shares));
        Ok(())
    }
}

/// The share of time that the other ranks, on average, waited for each rank.
///
/// If rank 3 waits for rank 1 while rank 1 waits for rank 0, the time is rank 0's. As far as rank 1 waited itself, what others waited for
/// it is therefore passed on to the ranks that it waited for, but never to the one that waits. Waits are followed as many times as there
/// are ranks.
fn waited_for(ranks: &[Waited]) -> Vec<f64> {
    let size = ranks.len();
    let share = |rank: &Waited, seconds: f64| if rank.seconds > 0.0 { seconds / rank.seconds } else { 0.0 };
    let direct = |rank: &Waited| -> Vec<(usize, f64)> {
        let others = rank.culprits.iter().filter(|(other, _)| *other < size);
        others.map(|&(other, seconds)| (other, share(rank, seconds))).collect()
    };
    let direct: Vec<Vec<(usize, f64)>> = ranks.iter().map(direct).collect();
    let mut waited = vec![0.0; size];
    for (rank, own) in direct.iter().enumerate() {
        let mut open: Vec<(usize, f64)> = own.clone();
        for _ in 0..size {
            if open.is_empty() {
                break;
            }
            let mut next: BTreeMap<usize, f64> = BTreeMap::new();
            for (other, time) in std::mem::take(&mut open) {
                let further = direct[other].iter().filter(|(cause, _)| *cause != rank);
                let all: f64 = further.clone().map(|(_, time)| time).sum();
                let passed = time.min(all);
                waited[other] += time - passed;
                let further = further.filter(|_| all > 0.0);
                further.for_each(|(cause, part)| *next.entry(*cause).or_default() += passed * part / all);
            }
            open = next.into_iter().filter(|(_, time)| *time > 0.0).collect();
        }
        // Ranks that wait in a circle.
        open.into_iter().for_each(|(other, time)| waited[other] += time);
    }
    waited.iter().map(|time| time / (size - 1).max(1) as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(culprits: &[(usize, f64)]) -> Waited {
        Waited { seconds: 10.0, culprits: culprits.to_vec() }
    }

    fn near(got: &[f64], wanted: &[f64]) {
        assert!(
            got.len() == wanted.len() && got.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-9),
            "{got:?}"
        );
    }

    #[test]
    fn a_rank_that_is_late_because_it_waited_is_not_the_cause() {
        // dp 2 x tp 2: rank 0 is slow. Rank 1 waits for it, and so comes late to rank 3.
        let ranks = [rank(&[]), rank(&[(0, 4.0)]), rank(&[(0, 4.0)]), rank(&[(1, 3.0), (2, 1.0)])];
        let shares = waited_for(&ranks);
        near(&shares, &[0.4, 0.0, 0.0, 0.0]);
        assert_eq!(conspicuous(&shares), Some(0));
    }

    #[test]
    fn ranks_that_wait_for_each_other_alike_are_not_conspicuous() {
        // The bubble of a pipeline of two stages.
        let shares = waited_for(&[rank(&[(1, 4.0)]), rank(&[(0, 4.0)])]);
        near(&shares, &[0.4, 0.4]);
        assert_eq!(conspicuous(&shares), None);
        // A balanced pipeline of three stages.
        let shares = waited_for(&[rank(&[(1, 2.0)]), rank(&[(0, 1.0), (2, 1.0)]), rank(&[(1, 2.0)])]);
        assert_eq!(conspicuous(&shares), None, "{shares:?}");
        // A circle ends.
        let shares = waited_for(&[rank(&[(1, 3.0)]), rank(&[(2, 3.0)]), rank(&[(0, 3.0)])]);
        assert!((shares.iter().sum::<f64>() - 0.45).abs() < 1e-9, "{shares:?}");
        assert_eq!(conspicuous(&[0.1, 0.0]), None);
        assert_eq!(conspicuous(&[]), None);
    }
}
