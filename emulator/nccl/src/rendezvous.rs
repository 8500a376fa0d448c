//! Where the calls of a communicator's ranks meet.
//!
//! The rendezvous matches the ranks' calls by their number: the n-th call of all ranks is one, whatever streams they
//! are on. It matches sends and receives in order for each pair of ranks. A rank posts its calls when its stream has
//! come to them, and asks again until all have been carried out. The rank whose call was the last one missing carries
//! out the call of all. Calls of ranks in other processes are posted when this process hears of them; each process
//! carries out what its own ranks get.
//!
//! The driver gives a *ticket* to each operation that it queues: a number that no other operation has. Rank and ticket
//! name a batch of calls.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use phalanx_emulator_link::driver::{Driver, Progress};
use phalanx_emulator_link::lock;

use crate::call::{Call, Operation, Refused, abandon, carry_out, read_input, write_output};
use crate::message::Message;
use crate::relay::{Ranks, Relay};
use crate::status::{Failure, Status};

/// `CUDA_ERROR_LAUNCH_FAILED`: what the stream of a call that cannot be carried out gets.
const LAUNCH_FAILED: i32 = 719;

/// The calls of one operation on a rank's stream, which the stream has come to: one call, or those of a group.
#[derive(Debug)]
struct Batch {
    since: Instant,
    /// Those that have not been carried out, by their index in the batch.
    open: BTreeMap<usize, Call>,
}

/// One rank's call: the rank, the ticket of its batch, the call's index in the batch, and the bytes that the rank
/// brings.
#[derive(Debug, Clone)]
struct RankCall {
    rank: usize,
    ticket: u64,
    index: usize,
    call: Call,
    data: Vec<u8>,
}

#[derive(Debug, Default)]
struct RendezvousState {
    /// By rank and ticket.
    batches: HashMap<(usize, u64), Batch>,
    /// Calls that not all ranks have posted yet, by number.
    together: BTreeMap<u64, Vec<RankCall>>,
    /// The number of each rank's next one.
    next: Vec<u64>,
    /// Sends (or receives) that wait for the other side, by sender and receiver.
    mail: HashMap<(usize, usize), VecDeque<RankCall>>,
    /// Ranks that have left.
    left: Vec<usize>,
    error: Option<(i32, Failure)>,
    /// Ranks that are not in this process.
    elsewhere: Vec<usize>,
}

/// The ranks of one communicator.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    pub ranks: usize,
    /// The communicator's number in this process, for reports.
    pub number: u64,
    timeout: Duration,
    state: Mutex<RendezvousState>,
    /// The way to the processes of ranks that are not in this one.
    relay: Option<Arc<Relay>>,
}

impl Rendezvous {
    pub(crate) fn new(ranks: usize, timeout: Duration) -> Rendezvous {
        let state = RendezvousState { next: vec![0; ranks], ..RendezvousState::default() };
        Rendezvous { ranks, number: number(), timeout, state: Mutex::new(state), relay: None }
    }

    /// With ranks in other processes.
    pub(crate) fn across(
        ranks: usize,
        timeout: Duration,
        elsewhere: Vec<usize>,
        relay: Arc<Relay>,
    ) -> Rendezvous {
        let state = RendezvousState { next: vec![0; ranks], elsewhere, ..RendezvousState::default() };
        Rendezvous { ranks, number: number(), timeout, state: Mutex::new(state), relay: Some(relay) }
    }

    /// Whether all ranks are in this process.
    pub(crate) fn is_here(&self) -> bool {
        self.relay.is_none()
    }

    fn state(&self) -> MutexGuard<'_, RendezvousState> {
        lock(&self.state)
    }

    /// Why the communicator does not work any more.
    pub(crate) fn error(&self) -> Option<Failure> {
        self.state().error.clone().map(|(_, failure)| failure)
    }

    /// Makes the communicator's calls fail from now on, for all ranks of this process.
    pub(crate) fn fail(&self, why: &str) {
        self.state().fail(usage(why.into()));
    }

    /// Whether a rank takes part no more.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.state().left.contains(&rank)
    }

    /// The ranks that a rank's operation waits for.
    pub(crate) fn missing_of(&self, rank: usize, ticket: u64) -> Vec<usize> {
        let state = self.state();
        let waiting = state.batches.get(&(rank, ticket));
        waiting.map_or(Vec::new(), |waiting| state.missing(rank, waiting, self.ranks))
    }

    /// A rank's stream has come to its calls: posts them the first time, and says how they are.
    pub(crate) fn ask(&self, driver: &Driver, rank: usize, ticket: u64, calls: &[Call]) -> Progress {
        let mut state = self.state();
        let is_known = state.batches.contains_key(&(rank, ticket));
        if state.left.contains(&rank) && !is_known {
            eprintln!("phalanx emulated NCCL: rank {rank} left with {} not carried out", list(calls));
            calls.iter().for_each(|call| abandon(driver, rank, self.ranks, call));
            return Progress::Done;
        }
        if !is_known {
            let open = calls.iter().copied().enumerate().collect();
            state.batches.insert((rank, ticket), Batch { since: Instant::now(), open });
            // After an error no other rank comes to them: they wait for their rank to leave, or for the time to be
            // over.
            let posted = if state.error.is_some() { &[] } else { calls };
            let bring = |call: &Call| Ok((*call, read_input(driver, rank, self.ranks, call)?));
            match posted.iter().map(bring).collect::<Result<Vec<_>, _>>() {
                Ok(calls) => {
                    if let Some(relay) = &self.relay {
                        relay.tell(&Message::Post { rank, ticket, calls: calls.clone() });
                    }
                    state.post_all(driver, self.ranks, rank, ticket, calls);
                }
                Err(error) => state.fail(refused(error)),
            }
        }
        if driver.is_dry() {
            // Without data no rank has anything to wait for. The next call tells of an error.
            state.batches.remove(&(rank, ticket));
            let failed = |(status, failure): &Error| Progress::Failed(*status, failure.message.clone());
            return state.error.as_ref().map_or(Progress::Done, failed);
        }
        // Its process may end once it is done: the others have to have been told by then.
        let is_told = self.relay.as_ref().is_none_or(|relay| relay.is_flushed());
        let is_early =
            |batch: &Batch| batch.open.is_empty() && !is_told && batch.since.elapsed() < self.timeout;
        if state.batches.get(&(rank, ticket)).is_some_and(is_early) {
            return Progress::Waiting;
        }
        state.progress(rank, ticket, self.ranks, self.timeout)
    }
}

/// The number of the next communicator.
fn number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Ranks for Rendezvous {
    fn leave(&self, rank: usize) {
        let mut state = self.state();
        if let (Some(relay), false) = (&self.relay, state.elsewhere.contains(&rank)) {
            relay.tell(&Message::Leave { rank });
        }
        state.left.push(rank);
        // What was carried out is done, even if the rank has not asked yet.
        state.batches.retain(|(of, _), batch| *of != rank || batch.open.is_empty());
        // Its buffers may be gone.
        state.mail.values_mut().for_each(|rank_calls| rank_calls.retain(|rank_call| rank_call.rank != rank));
        state
            .together
            .values_mut()
            .for_each(|rank_calls| rank_calls.retain(|rank_call| rank_call.rank != rank));
    }

    fn posted(&self, rank: usize, ticket: u64, calls: Vec<(Call, Vec<u8>)>) {
        if let Ok(driver) = Driver::loaded() {
            self.state().post_all(driver, self.ranks, rank, ticket, calls);
        }
    }
}

fn refused((status, message): Refused) -> Error {
    (status, Status::UNHANDLED_CUDA_ERROR.because(message))
}

type Error = (i32, Failure);

fn usage(message: String) -> Error {
    (LAUNCH_FAILED, Status::INVALID_USAGE.because(message))
}

fn list<'a>(calls: impl IntoIterator<Item = &'a Call>) -> String {
    calls.into_iter().map(Call::to_string).collect::<Vec<_>>().join(", ")
}

impl RendezvousState {
    fn fail(&mut self, error: Error) {
        if self.error.is_none() {
            self.error = Some(error);
        }
    }

    fn post_all(
        &mut self,
        driver: &Driver,
        ranks: usize,
        rank: usize,
        ticket: u64,
        calls: Vec<(Call, Vec<u8>)>,
    ) {
        for (index, (call, data)) in calls.into_iter().enumerate() {
            if let Err(error) = self.post(driver, ranks, RankCall { rank, ticket, index, call, data }) {
                return self.fail(error);
            }
        }
    }

    fn post(&mut self, driver: &Driver, ranks: usize, rank_call: RankCall) -> Result<(), Error> {
        if rank_call.rank >= ranks {
            return Err(usage(format!("a call of rank {} of {ranks}", rank_call.rank)));
        }
        if rank_call.call.is_between_two() {
            let Some((send, receive)) = self.pair(rank_call)? else { return Ok(()) };
            if !self.elsewhere.contains(&receive.rank) {
                write_output(driver, receive.rank, &receive.call, &send.data).map_err(refused)?;
            }
            self.carried_out(&[send, receive]);
            return Ok(());
        }
        let number = self.next[rank_call.rank];
        self.next[rank_call.rank] += 1;
        let posted = self.together.entry(number).or_default();
        if let Some(other) = posted.first().filter(|other| !other.call.fits(&rank_call.call)) {
            return Err(usage(format!(
                "call {number} of the communicator differs between ranks: rank {} calls {}, rank {} calls {}",
                other.rank, other.call, rank_call.rank, rank_call.call
            )));
        }
        posted.push(rank_call);
        if posted.len() < ranks {
            return Ok(());
        }
        let mut rank_calls = self.together.remove(&number).unwrap_or_default();
        rank_calls.sort_by_key(|rank_call| rank_call.rank);
        let brought: Vec<&[u8]> = rank_calls.iter().map(|rank_call| rank_call.data.as_slice()).collect();
        for rank_call in rank_calls.iter().filter(|rank_call| !self.elsewhere.contains(&rank_call.rank)) {
            carry_out(driver, rank_call.rank, &rank_call.call, &brought).map_err(refused)?;
        }
        self.carried_out(&rank_calls);
        Ok(())
    }

    /// The send and the receive, if the other side is there already.
    fn pair(&mut self, rank_call: RankCall) -> Result<Option<(RankCall, RankCall)>, Error> {
        let ends = match rank_call.call.operation {
            Operation::Send(to) => (rank_call.rank, to),
            Operation::Receive(from) => (from, rank_call.rank),
            _ => return Ok(None),
        };
        let sends = |rank_call: &RankCall| matches!(rank_call.call.operation, Operation::Send(_));
        let mail = self.mail.entry(ends).or_default();
        if mail.front().is_none_or(|other| sends(other) == sends(&rank_call)) {
            mail.push_back(rank_call);
            return Ok(None);
        }
        let Some(other) = mail.pop_front() else { return Ok(None) };
        let (send, receive) = if sends(&rank_call) { (rank_call, other) } else { (other, rank_call) };
        if (send.call.kind, send.call.count) != (receive.call.kind, receive.call.count) {
            let (sent, received) = (send.call, receive.call);
            return Err(usage(format!("rank {} calls {sent}, rank {} calls {received}", ends.0, ends.1)));
        }
        Ok(Some((send, receive)))
    }

    fn carried_out(&mut self, rank_calls: &[RankCall]) {
        for rank_call in rank_calls {
            if let Some(batch) = self.batches.get_mut(&(rank_call.rank, rank_call.ticket)) {
                batch.open.remove(&rank_call.index);
            }
        }
    }

    fn progress(&mut self, rank: usize, ticket: u64, ranks: usize, timeout: Duration) -> Progress {
        if self.batches.get(&(rank, ticket)).is_some_and(|batch| batch.open.is_empty()) {
            self.batches.remove(&(rank, ticket));
            return Progress::Done;
        }
        let late = self.batches.get(&(rank, ticket)).is_some_and(|batch| batch.since.elapsed() > timeout);
        if let (None, Some(waiting)) = (&self.error, self.batches.get(&(rank, ticket))) {
            self.error = self.trouble(rank, waiting, ranks, late);
        }
        match &self.error {
            // As on a GPU the call stays there until this rank aborts as well; but not for ever.
            Some((_, failure)) if failure.status == Status::REMOTE_ERROR && !late => Progress::Waiting,
            Some((status, failure)) => {
                self.batches.remove(&(rank, ticket));
                Progress::Failed(*status, failure.message.clone())
            }
            None => Progress::Waiting,
        }
    }

    /// The error of a rank that still waits: a rank that it waits for has left, or the timeout has passed.
    fn trouble(&self, rank: usize, waiting: &Batch, ranks: usize, late: bool) -> Option<Error> {
        let missing = self.missing(rank, waiting, ranks);
        let calls = list(waiting.open.values());
        if let Some(gone) = missing.iter().find(|missing| self.left.contains(missing)) {
            let why = format!("rank {rank} waits in {calls} for rank {gone}, which has left");
            eprintln!("phalanx emulated NCCL: {why}");
            return Some((LAUNCH_FAILED, Status::REMOTE_ERROR.because(why)));
        }
        let (waited, others) = (waiting.since.elapsed().as_secs_f64(), self.others(rank));
        let why = format!("rank {rank} has waited {waited:.1} s in {calls} for {missing:?}; {others}");
        late.then(|| (LAUNCH_FAILED, Status::TIMEOUT.because(why)))
    }

    /// The ranks that a batch waits for.
    fn missing(&self, rank: usize, waiting: &Batch, ranks: usize) -> Vec<usize> {
        let mut missing = Vec::new();
        for call in waiting.open.values() {
            match call.operation {
                Operation::Send(peer) | Operation::Receive(peer) => missing.push(peer),
                _ => missing.extend((0..ranks).filter(|other| self.is_missing(rank, *other))),
            }
        }
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    fn is_missing(&self, rank: usize, other: usize) -> bool {
        let waits = |rank_calls: &Vec<RankCall>| {
            rank_calls.iter().any(|p| p.rank == rank) && rank_calls.iter().all(|p| p.rank != other)
        };
        self.together.values().any(waits)
    }

    /// What the others are doing.
    fn others(&self, rank: usize) -> String {
        let doing: Vec<String> = self
            .batches
            .iter()
            .filter(|((other, _), _)| *other != rank)
            .map(|((other, _), batch)| format!("rank {other} is in {}", list(batch.open.values())))
            .collect();
        if doing.is_empty() { "no other rank is in any call".into() } else { doing.join(", ") }
    }
}
