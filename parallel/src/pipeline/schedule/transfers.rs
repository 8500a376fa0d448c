//! [`with_transfers`]: puts sends and receives into a schedule of computations.

use std::collections::HashSet;

use super::{Action, Error, Kind, Result, Schedule, Transfer, Wait, verify};

/// The schedule with a send and a receive for whatever goes between stages of different ranks.
///
/// A send stands right after the computation of what it sends, a receive right before the computation that needs it, so that
/// a transfer has as much time as there is. Where ranks would then wait for each other in a circle if sends waited for
/// their receives, one of them receives before it sends. So the lists can run over any buffering, none included.
///
/// It is done by running the lists with sends that wait: whenever no rank can go on, the transfer that was ready first is
/// received early, on a clock by which `B` takes 2, an update nothing, and everything else 1. On that clock a receive that blocks its rank then
/// loses no time.
///
/// # Errors
/// If the schedule has transfers already, or [`verify`] finds it wrong.
pub fn with_transfers(schedule: &Schedule) -> Result<Schedule> {
    let has = schedule.ranks.iter().flatten().find(|action| action.kind.is_transfer());
    if let Some(action) = has {
        let got = format!("a schedule with {action}");
        return Err(Error::Invalid { op: "with_transfers", got, wanted: "one without transfers" });
    }
    verify(schedule, 0)?;
    let mut run = Run::new(schedule);
    while !run.is_over() {
        let mut moved = false;
        for rank in 0..schedule.ranks.len() {
            while run.advance(rank) {
                moved = true;
            }
        }
        if !moved && !run.receive_early() {
            return Err(Error::Deadlock { waits: run.waits() });
        }
    }
    Ok(Schedule { ranks: run.lists, ..schedule.clone() })
}

/// A run in which a send waits for its receive.
struct Run<'a> {
    schedule: &'a Schedule,
    /// Each rank's next computation.
    next: Vec<usize>,
    /// What each rank stands and waits to send.
    offers: Vec<Option<Transfer>>,
    received: HashSet<Transfer>,
    /// Each rank's time.
    clocks: Vec<u64>,
    /// Each rank's list so far.
    lists: Vec<Vec<Action>>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule) -> Run<'a> {
        let ranks = schedule.ranks.len();
        Run {
            schedule,
            next: vec![0; ranks],
            offers: vec![None; ranks],
            received: HashSet::new(),
            clocks: vec![0; ranks],
            lists: vec![Vec::new(); ranks],
        }
    }

    fn is_over(&self) -> bool {
        let through =
            self.next.iter().zip(&self.schedule.ranks).all(|(&next, actions)| next == actions.len());
        through && self.offers.iter().all(Option::is_none)
    }

    /// Lets a rank receive or compute, if it can.
    fn advance(&mut self, rank: usize) -> bool {
        let Some(&action) = self.schedule.ranks[rank].get(self.next[rank]) else { return false };
        if self.offers[rank].is_some() {
            return false;
        }
        if let Some(transfer) = self.awaited(action) {
            let from = self.schedule.placement[transfer.from];
            let offered = self.offers[from].filter(|offer| self.schedule.placement[offer.to] == rank);
            return offered.is_some_and(|offer| self.carry(offer));
        }
        self.lists[rank].push(action);
        self.next[rank] += 1;
        self.clocks[rank] += match action.kind {
            Kind::Backward => 2,
            Kind::Update => 0,
            _ => 1,
        };
        self.offers[rank] = self.schedule.output(action).filter(|&output| self.schedule.travels(output));
        true
    }

    /// What has not come yet for a computation.
    fn awaited(&self, action: Action) -> Option<Transfer> {
        let travels = |input: &Transfer| self.schedule.travels(*input) && !self.received.contains(input);
        self.schedule.input(action).filter(travels)
    }

    /// Carries out a transfer that is offered.
    fn carry(&mut self, transfer: Transfer) -> bool {
        let (from, to) = (self.schedule.placement[transfer.from], self.schedule.placement[transfer.to]);
        self.offers[from] = None;
        self.lists[from].push(transfer.send());
        self.lists[to].push(transfer.receive());
        self.clocks[to] = self.clocks[to].max(self.clocks[from]);
        self.received.insert(transfer)
    }

    /// Lets a rank receive what it does not need yet.
    fn receive_early(&mut self) -> bool {
        let ready = |offer: &Transfer| self.clocks[self.schedule.placement[offer.from]];
        let first = self.offers.iter().copied().flatten().min_by_key(|offer| (ready(offer), *offer));
        first.is_some_and(|offer| self.carry(offer))
    }

    /// Where the ranks stand.
    fn waits(&self) -> Vec<Wait> {
        let wait = |rank: usize| {
            let (position, placement) = (self.next[rank], &self.schedule.placement);
            let sends = self.offers[rank].map(|offer| (offer.send(), placement[offer.to]));
            let action = self.schedule.ranks[rank].get(position);
            let needs = || action.and_then(|&a| Some((a, placement[self.awaited(a)?.from])));
            sends.or_else(needs).map(|(action, peer)| Wait { rank, position, action, peer })
        };
        (0..self.next.len()).filter_map(wait).collect()
    }
}
