//! Sends and receives of a schedule: [`with_transfers`] adds them; [`acknowledgements`] says by which action a sender can be
//! sure that a tensor has been received.

use std::collections::{HashMap, HashSet};

use super::{Action, ActionKind, Error, Result, Schedule, Transfer, Wait, verify};

/// The schedule with a send and a receive for each transfer between stages of different ranks.
///
/// A send comes right after the computation of its tensor, and a receive right before the computation that needs it, so that a
/// transfer has as much time as possible. If ranks would then wait for each other in a circle with blocking sends, one of them
/// receives before it sends. So the lists run with any number of buffers, or none.
///
/// The function runs the lists with blocking sends. Whenever no rank can go on, the transfer that was ready first is received
/// early. Times are those of a clock by which `B` takes 2, an update 0, and everything else 1. On that clock a blocking receive
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
    let mut run = Rendezvous::new(schedule);
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

/// A run of the lists with blocking sends.
struct Rendezvous<'a> {
    schedule: &'a Schedule,
    /// Each rank's next computation.
    next: Vec<usize>,
    /// The transfer that each rank is waiting to send.
    offers: Vec<Option<Transfer>>,
    received: HashSet<Transfer>,
    /// The stages and micro-batches whose weights' gradients have been added.
    added: HashSet<(usize, usize)>,
    /// Each rank's time.
    clocks: Vec<u64>,
    /// Each rank's list with transfers, so far.
    lists: Vec<Vec<Action>>,
}

impl<'a> Rendezvous<'a> {
    fn new(schedule: &'a Schedule) -> Rendezvous<'a> {
        let ranks = schedule.ranks.len();
        Rendezvous {
            schedule,
            next: vec![0; ranks],
            offers: vec![None; ranks],
            received: HashSet::new(),
            added: HashSet::new(),
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
            let from = self.rank(transfer.from, transfer);
            let offered = self.offers[from].filter(|offer| self.rank(offer.to, *offer) == rank);
            return offered.is_some_and(|offer| self.carry(offer));
        }
        let before = self.schedule.sum_before(action);
        if before.is_some_and(|before| !self.added.contains(&(action.stage, before))) {
            return false;
        }
        self.added.extend(action.kind.adds().then_some((action.stage, action.micro_batch)));
        self.lists[rank].push(action);
        self.next[rank] += 1;
        self.clocks[rank] += match action.kind {
            ActionKind::Backward => 2,
            ActionKind::Update => 0,
            _ => 1,
        };
        self.offers[rank] = self.schedule.output(action).filter(|&output| self.schedule.travels(output));
        true
    }

    /// The rank of a stage, for the micro-batch of a transfer.
    fn rank(&self, stage: usize, transfer: Transfer) -> usize {
        self.schedule.rank_of(stage, transfer.micro_batch).unwrap_or_default()
    }

    /// The transfer that a computation still has to receive.
    fn awaited(&self, action: Action) -> Option<Transfer> {
        let travels = |input: &Transfer| self.schedule.travels(*input) && !self.received.contains(input);
        self.schedule.input(action).filter(travels)
    }

    /// Carries out a transfer that its sender offers.
    fn carry(&mut self, transfer: Transfer) -> bool {
        let (from, to) = (self.rank(transfer.from, transfer), self.rank(transfer.to, transfer));
        self.offers[from] = None;
        self.lists[from].push(transfer.send());
        self.lists[to].push(transfer.receive());
        self.clocks[to] = self.clocks[to].max(self.clocks[from]);
        self.received.insert(transfer)
    }

    /// Lets a rank receive a transfer that it does not need yet.
    fn receive_early(&mut self) -> bool {
        let ready = |offer: &Transfer| self.clocks[self.rank(offer.from, *offer)];
        let first = self.offers.iter().copied().flatten().min_by_key(|offer| (ready(offer), *offer));
        first.is_some_and(|offer| self.carry(offer))
    }

    /// The actions at which ranks wait.
    fn waits(&self) -> Vec<Wait> {
        let wait = |rank: usize| {
            let position = self.next[rank];
            let sends = self.offers[rank].map(|offer| (offer.send(), self.rank(offer.to, offer)));
            let action = self.schedule.ranks[rank].get(position);
            let input =
                |&action: &Action| self.awaited(action).map(|input| (action, self.rank(input.from, input)));
            let needs = || action.and_then(input);
            sends.or_else(needs).map(|(action, peer)| Wait { rank, position, action, peer })
        };
        (0..self.next.len()).filter_map(wait).collect()
    }
}

/// For each rank and each of its sends, the receive of the same rank that acknowledges the send: the sender of that message had
/// received the tensor before it sent. So after it the tensor has certainly been received, however slow the other ranks are.
/// `None` if there is no such receive before the end of the step.
///
/// ```
/// use phalanx_parallel::pipeline::schedule::{acknowledgements, one_f_one_b, with_transfers};
///
/// let schedule = with_transfers(&one_f_one_b(2, 2)?)?;
/// let [first, _] = &acknowledgements(&schedule)?[..] else { unreachable!() };
/// let told = |send: &str| first.iter().find(|(action, _)| action.to_string() == send).map(|(_, by)| by.unwrap().to_string());
/// // Rank 1 sends its first gradient after it has received both outputs.
/// assert_eq!(told("0SEND_F1").as_deref(), Some("0RECV_B0"));
/// # Ok::<(), phalanx_parallel::pipeline::schedule::Error>(())
/// ```
///
/// # Errors
/// If the schedule has no transfers, or as [`verify`].
pub fn acknowledgements(schedule: &Schedule) -> Result<Vec<HashMap<Action, Option<Action>>>> {
    verify(schedule, usize::MAX)?;
    if !schedule.has_transfers() && schedule.ranks.len() > 1 {
        let got = "a schedule without transfers".into();
        return Err(Error::Invalid { op: "acknowledgements", got, wanted: "one with transfers" });
    }
    let mut run = VectorClocks::new(schedule);
    while (0..schedule.ranks.len()).any(|rank| run.advance(rank)) {}
    Ok(run.known)
}

/// The former name of [`acknowledgements`].
///
/// # Errors
/// As [`acknowledgements`].
#[deprecated(since = "0.1.0", note = "renamed to `acknowledgements`")]
pub fn receipts(schedule: &Schedule) -> Result<Vec<HashMap<Action, Option<Action>>>> {
    acknowledgements(schedule)
}

/// A run in which every rank keeps a vector clock: how many actions of each rank have certainly ended.
struct VectorClocks<'a> {
    schedule: &'a Schedule,
    next: Vec<usize>,
    clocks: Vec<Vec<usize>>,
    /// The sender's clock at each send.
    sent: HashMap<Transfer, Vec<usize>>,
    /// The position of each receive in its rank's list.
    positions: HashMap<Transfer, usize>,
    known: Vec<HashMap<Action, Option<Action>>>,
}

impl<'a> VectorClocks<'a> {
    fn new(schedule: &'a Schedule) -> VectorClocks<'a> {
        let ranks = schedule.ranks.len();
        let receives = schedule.ranks.iter().flat_map(|list| list.iter().enumerate());
        let position = |(position, &action): (usize, &Action)| {
            let transfer = schedule.transfer(action).filter(|t| t.receive() == action)?;
            Some((transfer, position))
        };
        VectorClocks {
            schedule,
            next: vec![0; ranks],
            clocks: vec![vec![0; ranks]; ranks],
            sent: HashMap::new(),
            positions: receives.filter_map(position).collect(),
            known: vec![HashMap::new(); ranks],
        }
    }

    /// Carries out a rank's next action, unless it is a receive of a tensor that has not been sent.
    fn advance(&mut self, rank: usize) -> bool {
        let Some(&action) = self.schedule.ranks[rank].get(self.next[rank]) else { return false };
        match self.schedule.transfer(action) {
            Some(transfer) if transfer.send() == action => {
                self.sent.insert(transfer, self.clocks[rank].clone());
                self.known[rank].insert(action, None);
            }
            Some(transfer) => {
                let Some(told) = self.sent.get(&transfer) else { return false };
                let clock = &mut self.clocks[rank];
                clock.iter_mut().zip(told).for_each(|(known, told)| *known = (*known).max(*told));
                self.note(rank, action);
            }
            None => {}
        }
        self.next[rank] += 1;
        self.clocks[rank][rank] = self.next[rank];
        true
    }

    /// After a receive: records which sends it acknowledges.
    fn note(&mut self, rank: usize, by: Action) {
        let (schedule, positions, clock) = (self.schedule, &self.positions, &self.clocks[rank]);
        for (&send, known) in self.known[rank].iter_mut().filter(|(_, known)| known.is_none()) {
            let Some(transfer) = schedule.transfer(send) else { continue };
            let position = positions.get(&transfer);
            let to = schedule.rank_of(transfer.to, transfer.micro_batch).unwrap_or_default();
            if position.is_some_and(|&position| clock[to] > position) {
                *known = Some(by);
            }
        }
    }
}
