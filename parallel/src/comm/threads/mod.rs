//! Ranks in one process. Each brings its tensors; the rank that comes last moves the elements of all, directly between the
//! tensors, with one thread for each rank.
//!
//! ```text
//! rank 0  ──arrives──waits───────────────────────┐
//! rank 1  ────────arrives──waits─────────────────┤ all go on
//! rank 2  ───────────────arrives──moves all──────┘
//! ```
//!
//! Elements are copied once, from tensor to tensor. A call for which no rank waits costs no thread until all ranks have come.
//!
//! `World` is the state that all ranks share; [`world`] makes their communicators.

mod exchange;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use exchange::{deliver, exchange};
use phalanx_tensor::{Pool, delivering, unpoisoned};

use super::communicator::{ChildGroups, Meter, members};
use super::pending::{Ticket, Waiter, blame};
use super::{Call, CollectiveKind, Comm, Communicator, Error, Pending, Result, Traffic};
use crate::flight::FlightRecorder;

/// The communicators of `size` ranks, each to be used by a thread of its own. A rank that lets others wait for longer
/// than `timeout` ends the run of all. See [`launch::threads`](crate::launch::threads), which starts the threads too.
pub fn world(size: usize, timeout: Duration) -> Vec<Comm> {
    let world = World::new(size, timeout);
    (0..size).map(|rank| member(&world, rank)).collect()
}

/// Rank `rank` of a world.
pub(crate) fn member(world: &Arc<World>, rank: usize) -> Comm {
    let waiter = GroupWaiter { world: Arc::clone(world), id: 0, ranks: (0..world.size()).collect() };
    Arc::new(Member::new(waiter, rank))
}

/// A rank's membership in a group.
#[derive(Debug)]
struct Member {
    waiter: Arc<GroupWaiter>,
    rank: usize,
    meter: Meter,
    children: ChildGroups,
}

impl Member {
    fn new(waiter: GroupWaiter, rank: usize) -> Member {
        waiter.world.recorders[waiter.ranks[rank]].group(waiter.id, &waiter.ranks);
        Member { waiter: Arc::new(waiter), rank, meter: Meter::default(), children: ChildGroups::default() }
    }

    fn begin(&self, call: Call, waits: bool) -> Pending {
        let call = match call.checked(self.rank, self.size()).and_then(|call| call.on_host(self.rank)) {
            Ok(call) => call,
            Err(error) => return Pending::done(Call::barrier(), Err(error)),
        };
        self.meter.count(&call.signature, self.rank, self.size());
        let GroupWaiter { world, id, ranks } = &*self.waiter;
        let ticket = world.arrive((*id, ranks), self.rank, call, waits);
        Pending::new(ticket, Arc::clone(&self.waiter) as _)
    }
}

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        &self.waiter.ranks
    }

    fn start(&self, call: Call) -> Pending {
        self.begin(call, false)
    }

    fn run(&self, call: Call) -> Result<()> {
        self.begin(call, true).wait()
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        let (rank, ranks) = members(&self.waiter.ranks, self.rank, ranks)?;
        let id = self.children.identity(self.waiter.id, &ranks);
        Ok(Arc::new(Member::new(GroupWaiter { world: Arc::clone(&self.waiter.world), id, ranks }, rank)))
    }

    fn traffic(&self) -> Traffic {
        self.meter.read()
    }

    fn fail(&self, cause: &str) {
        let rank = self.waiter.ranks[self.rank];
        self.waiter.world.fail(Error::failed(rank, cause));
    }

    fn failure(&self) -> Option<Error> {
        self.waiter.world.failure()
    }

    fn flight_recorder(&self) -> Option<&FlightRecorder> {
        self.waiter.world.recorders.get(self.waiter.ranks[self.rank])
    }
}

/// How long a rank watches for the end of a call before it sleeps.
const WATCH: Duration = Duration::from_micros(50);

/// All ranks of a process.
pub(crate) struct World {
    size: usize,
    timeout: Duration,
    state: Mutex<WorldState>,
    wake: Condvar,
    sleepers: AtomicUsize,
    pool: OnceLock<Pool>,
    /// One a rank.
    recorders: Vec<FlightRecorder>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World of {} ranks", self.size)
    }
}

/// The calls of all ranks that have begun, under the world's lock.
#[derive(Debug, Default)]
struct WorldState {
    /// The first error, which ended the run.
    failure: Option<Error>,
    /// Ranks that have ended.
    ended: Vec<bool>,
    groups: HashMap<u64, Group>,
    /// By group, sender, receiver.
    mailboxes: HashMap<(u64, usize, usize), Mailbox>,
    /// Calls that ranks wait for, with the ranks of their groups.
    waits: Vec<(Arc<Ticket>, Vec<usize>)>,
    /// Complete calls that no rank is there to carry out, in order.
    ready: VecDeque<CompleteCall>,
    /// Whether a thread is carrying them out.
    running: bool,
}

/// A group's calls that have begun.
#[derive(Debug)]
struct Group {
    /// The number of each rank's next call.
    next: Vec<u64>,
    /// The number of `rounds`' first.
    first: u64,
    rounds: VecDeque<Vec<Option<Arc<Ticket>>>>,
    /// Complete calls not yet carried out: later ones must not overtake them.
    waiting: usize,
}

/// The sends and receives between two ranks, in one direction.
#[derive(Debug, Default)]
struct Mailbox {
    sent: u64,
    received: u64,
    sends: VecDeque<Arc<Ticket>>,
    receives: VecDeque<Arc<Ticket>>,
}

/// A call for which all ranks have come: of a group, or a send and its receive.
#[derive(Debug)]
struct CompleteCall {
    group: Option<u64>,
    tickets: Vec<Arc<Ticket>>,
    ranks: Vec<usize>,
}

impl World {
    pub(crate) fn new(size: usize, timeout: Duration) -> Arc<World> {
        let state = WorldState { ended: vec![false; size], ..WorldState::default() };
        let (wake, sleepers, pool) = (Condvar::new(), AtomicUsize::new(0), OnceLock::new());
        let recorders = FlightRecorder::of_ranks(0..size, size);
        Arc::new(World { size, timeout, state: Mutex::new(state), wake, sleepers, pool, recorders })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    fn lock(&self) -> MutexGuard<'_, WorldState> {
        unpoisoned(self.state.lock())
    }

    /// The error that ended the run.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Ends the run with an error, unless it has ended already.
    pub(crate) fn fail(&self, error: Error) {
        let tell = || {
            let failure = self.lock().failure.get_or_insert(error).to_string();
            self.wake.notify_all();
            failure
        };
        match self.recorders.first() {
            Some(recorder) => recorder.failing(tell),
            None => drop(tell()),
        }
    }

    /// Notes that `rank` has ended.
    pub(crate) fn end(&self, rank: usize) {
        self.lock().ended[rank] = true;
        self.wake.notify_all();
    }

    /// Rank `rank` of a group brings a call. The last rank to come carries it out, if it waits for it anyway.
    pub(super) fn arrive(
        self: &Arc<World>,
        group: (u64, &[usize]),
        rank: usize,
        call: Call,
        waits: bool,
    ) -> Arc<Ticket> {
        let recorder = &self.recorders[group.1[rank]];
        let mut state = self.lock();
        let (ticket, work) = match call.kind() {
            CollectiveKind::Send | CollectiveKind::Receive => state.post(group, rank, call, recorder),
            _ => state.join(group, rank, call, recorder),
        };
        if let Some(failure) = &state.failure {
            ticket.finish(Err(failure.seen_in(|| ticket.describe(group.1))));
            return ticket;
        }
        let Some(work) = work else { return ticket };
        work.tickets.iter().for_each(|each| each.completed_by(ticket.rank));
        let mut before = work.group.and_then(|id| state.groups.get_mut(&id)).map(|group| &mut group.waiting);
        // The last rank also carries out a call that moves no elements: starting a thread would take longer.
        if (waits || ticket.call.signature.on_gpus) && before.as_ref().is_none_or(|waiting| **waiting == 0) {
            drop(state);
            self.carry_out(&work);
            return ticket;
        }
        before.iter_mut().for_each(|waiting| **waiting += 1);
        state.ready.push_back(work);
        let idle = !std::mem::replace(&mut state.running, true);
        drop(state);
        if idle {
            self.run_ready();
        }
        ticket
    }

    /// Carries out the ready calls on a thread of their own.
    fn run_ready(self: &Arc<World>) {
        let world = Arc::clone(self);
        let run = move || {
            loop {
                let mut state = world.lock();
                let Some(work) = state.ready.pop_front() else {
                    state.running = false;
                    return;
                };
                drop(state);
                world.carry_out(&work);
                let mut state = world.lock();
                if let Some(group) = work.group.and_then(|id| state.groups.get_mut(&id)) {
                    group.waiting -= 1;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("phalanx comm".into()).spawn(run) {
            self.fail(Error::Launch(format!("no thread for communication: {error}")));
        }
    }

    fn carry_out(&self, work: &CompleteCall) {
        let _delivering = delivering();
        let pool = self.pool.get_or_init(|| {
            Pool::new(self.size.min(std::thread::available_parallelism().map_or(1, |n| n.get())))
        });
        let outcome = catch_unwind(AssertUnwindSafe(|| work.carry_out(pool))).unwrap_or_else(|_| {
            // An error of this crate, since calls are checked before. It must not leave a rank waiting for ever.
            Err(Error::Launch(format!("moving the elements of {:?} panicked", work.tickets[0].call.kind())))
        });
        if let Err(error) = &outcome {
            self.lock().failure.get_or_insert(error.clone());
        }
        for ticket in &work.tickets {
            let seen = |e: &Error| e.seen_in(|| ticket.describe(&work.ranks));
            ticket.finish(outcome.as_ref().copied().map_err(seen));
        }
        // A rank counts itself among the sleepers before it looks at its ticket for the last time; the fences keep both
        // sides from looking before the other's write is visible.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 || outcome.is_err() {
            drop(self.lock());
            self.wake.notify_all();
        }
    }
}

impl WorldState {
    /// Enters a collective; complete if all have come.
    fn join(
        &mut self,
        (id, ranks): (u64, &[usize]),
        rank: usize,
        call: Call,
        recorder: &FlightRecorder,
    ) -> (Arc<Ticket>, Option<CompleteCall>) {
        let group = self.groups.entry(id).or_insert_with(|| Group {
            next: vec![0; ranks.len()],
            first: 0,
            rounds: VecDeque::new(),
            waiting: 0,
        });
        let sequence = group.next[rank];
        group.next[rank] += 1;
        let place = (sequence - group.first) as usize;
        if place == group.rounds.len() {
            group.rounds.push_back(vec![None; ranks.len()]);
        }
        let ticket = Ticket::new(call, Some(recorder), ranks[rank], id, sequence);
        group.rounds[place][rank] = Some(Arc::clone(&ticket));
        // Each rank comes to the first round first, so it is complete before any other.
        let complete = group.rounds.front().is_some_and(|round| round.iter().all(Option::is_some));
        let round = if complete { group.rounds.pop_front() } else { None };
        group.first += u64::from(complete);
        let work = |round: Vec<_>| CompleteCall {
            group: Some(id),
            tickets: round.into_iter().flatten().collect(),
            ranks: ranks.to_vec(),
        };
        (ticket, round.map(work))
    }

    /// Enters a send or receive; complete if there is one of each.
    fn post(
        &mut self,
        (id, ranks): (u64, &[usize]),
        rank: usize,
        call: Call,
        recorder: &FlightRecorder,
    ) -> (Arc<Ticket>, Option<CompleteCall>) {
        let peer = call.signature.root.unwrap_or(rank);
        let sends = call.kind() == CollectiveKind::Send;
        let (from, to) = if sends { (rank, peer) } else { (peer, rank) };
        let mailbox = self.mailboxes.entry((id, from, to)).or_default();
        let (count, queue) = match sends {
            true => (&mut mailbox.sent, &mut mailbox.sends),
            false => (&mut mailbox.received, &mut mailbox.receives),
        };
        let ticket = Ticket::new(call, Some(recorder), ranks[rank], id, *count);
        *count += 1;
        queue.push_back(Arc::clone(&ticket));
        if mailbox.sends.is_empty() || mailbox.receives.is_empty() {
            return (ticket, None);
        }
        let tickets = mailbox.sends.pop_front().into_iter().chain(mailbox.receives.pop_front()).collect();
        (ticket, Some(CompleteCall { group: None, tickets, ranks: vec![ranks[from], ranks[to]] }))
    }

    /// The ranks that have not come to a call; none if all have.
    fn missing(&self, ticket: &Ticket, ranks: &[usize]) -> Vec<usize> {
        if let Some(peer) = ticket.call.peer() {
            let unmatched = |mailbox: &Mailbox| {
                mailbox.sends.iter().chain(&mailbox.receives).any(|t| std::ptr::eq(Arc::as_ptr(t), ticket))
            };
            return if self.mailboxes.values().any(unmatched) { vec![ranks[peer]] } else { vec![] };
        }
        let Some(group) = self.groups.get(&ticket.group).filter(|g| ticket.sequence >= g.first) else {
            return vec![];
        };
        let round = &group.rounds[(ticket.sequence - group.first) as usize];
        ranks.iter().zip(round).filter(|(_, ticket)| ticket.is_none()).map(|(&rank, _)| rank).collect()
    }

    /// The error of a call that cannot end, if that is known by now.
    fn verdict(&self, ticket: &Ticket, ranks: &[usize], late: Option<Duration>) -> Option<Error> {
        let missing = self.missing(ticket, ranks);
        let call = || ticket.describe(ranks);
        if let Some(&rank) = missing.iter().find(|&&rank| self.ended[rank]) {
            return Some(Error::Deserted { rank, call: call() });
        }
        let waited = late.filter(|_| !missing.is_empty())?;
        let blockers = |rank| {
            let waits = self.waits.iter().filter(|(ticket, _)| ticket.rank == rank);
            waits.flat_map(|(ticket, ranks)| self.missing(ticket, ranks)).collect()
        };
        Some(Error::Late { missing: blame(missing, blockers), call: call(), waited, hint: ticket.hint() })
    }
}

impl CompleteCall {
    fn carry_out(&self, pool: &Pool) -> Result<()> {
        let calls: Vec<Call> = self.tickets.iter().map(|ticket| ticket.whole_call()).collect();
        let calls: Vec<&Call> = calls.iter().collect();
        match (self.group, &calls[..], &self.ranks[..]) {
            (None, &[send, recv], &[from, to]) => {
                deliver(send, recv, [from, to], self.tickets[0].sequence, pool)
            }
            _ => exchange(&calls, &self.ranks, self.tickets[0].sequence, pool),
        }
    }
}

/// A group of a world; its members wait for their calls here.
#[derive(Debug)]
pub(super) struct GroupWaiter {
    pub(super) world: Arc<World>,
    pub(super) id: u64,
    pub(super) ranks: Vec<usize>,
}

impl Waiter for GroupWaiter {
    fn wait(&self, ticket: &Arc<Ticket>) -> Result<()> {
        let (world, start) = (&self.world, Instant::now());
        while start.elapsed() < WATCH && !ticket.is_done() {
            (0..32).for_each(|_| std::hint::spin_loop());
        }
        if let Some(outcome) = ticket.outcome() {
            return outcome;
        }
        world.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let outcome = world.sleep(ticket, &self.ranks, start);
        world.sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}

impl World {
    fn sleep(&self, ticket: &Arc<Ticket>, ranks: &[usize], start: Instant) -> Result<()> {
        let mut state = self.lock();
        state.waits.push((Arc::clone(ticket), ranks.to_vec()));
        let outcome = loop {
            if let Some(outcome) = ticket.outcome() {
                break outcome;
            }
            if let Some(failure) = &state.failure {
                break Err(failure.seen_in(|| ticket.describe(ranks)));
            }
            let left = self.timeout.checked_sub(start.elapsed());
            let late = left.is_none().then_some(self.timeout);
            if let Some(error) = state.verdict(ticket, ranks, late) {
                // The flight recorder notes what is under way before the other ranks know.
                drop(state);
                self.fail(error);
                state = self.lock();
                continue;
            }
            // When all ranks have come, the thread only waits for the elements to be moved.
            let left = left.unwrap_or(self.timeout).max(Duration::from_millis(1));
            state = unpoisoned(self.wake.wait_timeout(state, left)).0;
        };
        state.waits.retain(|(other, _)| !Arc::ptr_eq(other, ticket));
        outcome
    }
}
