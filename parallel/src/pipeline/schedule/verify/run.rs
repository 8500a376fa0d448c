//! Whether the ranks come to their ends over bounded buffers.

use std::collections::{HashMap, HashSet};

use super::super::{Action, Error, Kind, Result, Schedule, Transfer, Wait};

/// Runs the lists, every rank as far as it can. Lists are fixed, so if one order of doing that comes to the end, all do.
pub(super) fn check(schedule: &Schedule, capacity: usize) -> Result<()> {
    let ranks = schedule.ranks.len();
    let mut run = Run {
        schedule,
        capacity,
        next: vec![0; ranks],
        sent: vec![false; ranks],
        in_flight: HashMap::new(),
        given: HashSet::new(),
        transfers: schedule.has_transfers(),
    };
    loop {
        let mut moved = false;
        for rank in 0..ranks {
            while run.step(rank) {
                moved = true;
            }
        }
        let waits: Vec<Wait> = (0..ranks).filter_map(|rank| run.wait(rank)).collect();
        if waits.is_empty() {
            return Ok(());
        }
        if !moved {
            return Err(Error::Deadlock { waits });
        }
    }
}

struct Run<'a> {
    schedule: &'a Schedule,
    capacity: usize,
    /// Each rank's next action.
    next: Vec<usize>,
    /// Whether the send at which a rank stands is in flight already.
    sent: Vec<bool>,
    /// What has been sent and not received, for each pair of ranks.
    in_flight: HashMap<(usize, usize), usize>,
    /// What stages have computed for each other.
    given: HashSet<Transfer>,
    /// Whether transfers are actions.
    transfers: bool,
}

impl Run<'_> {
    fn action(&self, rank: usize) -> Option<Action> {
        self.schedule.ranks[rank].get(self.next[rank]).copied()
    }

    /// Carries out a rank's next action, if it can be done.
    ///
    /// A send that finds the buffer full is in flight as well, but its rank stays until there is room: so with a capacity
    /// of 0 until it has been received.
    fn step(&mut self, rank: usize) -> bool {
        let Some(action) = self.action(rank) else { return false };
        let pair = self.pair(action);
        let can = match action.kind {
            Kind::SendForward | Kind::SendBackward => {
                let flying = self.in_flight.entry(pair).or_default();
                *flying += usize::from(!self.sent[rank]);
                self.sent[rank] = *flying > self.capacity;
                !self.sent[rank]
            }
            Kind::RecvForward | Kind::RecvBackward => {
                let flying = self.in_flight.entry(pair).or_default();
                let has = *flying > 0;
                *flying -= usize::from(has);
                has
            }
            _ => {
                let input = self.schedule.input(action).filter(|_| !self.transfers);
                input.is_none_or(|input| self.given.contains(&input))
            }
        };
        if can {
            self.next[rank] += 1;
            self.given.extend(self.schedule.output(action));
        }
        can
    }

    /// The ranks that send and receive, or give and need, the action's data.
    fn pair(&self, action: Action) -> (usize, usize) {
        let transfer = self.schedule.transfer(action).or_else(|| self.schedule.input(action));
        let place = |stage: usize| self.schedule.placement[stage];
        let own = place(action.stage);
        transfer.map_or((own, own), |transfer| (place(transfer.from), place(transfer.to)))
    }

    fn wait(&self, rank: usize) -> Option<Wait> {
        let action = self.action(rank)?;
        let (from, to) = self.pair(action);
        Some(Wait { rank, position: self.next[rank], action, peer: if from == rank { to } else { from } })
    }
}
