//! [`Driver`]: the thread that owns a process's wire. It takes events (a call of this rank, a message, a lost process), lets each
//! group's first task go on, matches sends with receives, and finds the ranks that are late.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use phalanx_rendezvous::clean;
use phalanx_tensor::delivering;

use super::outcome::Shared;
use super::task::{Inbox, Task, malformed, read, write};
use super::{Address, Frame, FrameKind, Wire};
use crate::comm::pending::{Ticket, blame};
use crate::comm::plan::Side;
use crate::comm::{CollectiveKind, Error, Result, Signature};

/// How long the driver of a polled wire sleeps between polls while calls are under way.
const POLL: Duration = Duration::from_micros(20);
/// The same while there are none.
const POLL_IDLE: Duration = Duration::from_millis(1);
/// How long a process of a failed run waits for the others to end as well.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// A driver that has not looked at its events for so long has stood still, and was not just busy.
const STANDSTILL: Duration = Duration::from_millis(500);

/// An event that the driver handles.
#[derive(Debug)]
pub(crate) enum Event {
    /// A rank of this process calls something, as this member of these ranks.
    Start(Arc<Ticket>, Arc<Vec<usize>>, usize),
    /// A message has come.
    Message(usize, Vec<u8>),
    /// A process cannot be reached any more.
    Lost(usize, String),
    /// This rank has failed.
    Fail(Error),
    /// This rank has ended.
    End,
}

/// The thread that owns a process's wire.
pub(crate) struct Driver {
    wire: Box<dyn Wire>,
    events: Receiver<Event>,
    shared: Arc<Shared>,
    rank: usize,
    size: usize,
    timeout: Duration,
    inbox: Inbox,
    /// Collectives by group, in order; the first of each is under way.
    tasks: HashMap<u64, VecDeque<Task>>,
    /// Receives under way.
    receives: Vec<Receive>,
    /// The ranks for which each other rank waits, and those for which this rank has told it waits.
    waits: HashMap<usize, Vec<usize>>,
    waits_sent: Vec<usize>,
    /// Ranks that have ended.
    gone: HashSet<usize>,
    /// Whether one of them cannot be reached any more.
    lost: bool,
    /// When this rank ended.
    ended: Option<Instant>,
    /// Whether the others have been told.
    has_left: bool,
    /// When the driver last looked for ranks that are late.
    looked: Instant,
}

/// A receive under way, as a member of these ranks.
struct Receive {
    ticket: Arc<Ticket>,
    ranks: Arc<Vec<usize>>,
    me: usize,
    since: Instant,
}

impl Receive {
    /// The sender, by its number in the whole run.
    fn from(&self) -> usize {
        self.ranks[self.ticket.call.peer().unwrap_or(self.me)]
    }
}

impl Driver {
    pub(crate) fn new(
        wire: Box<dyn Wire>,
        events: Receiver<Event>,
        shared: Arc<Shared>,
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Driver {
        let (inbox, tasks, receives) = Default::default();
        let (waits, waits_sent, gone) = Default::default();
        Driver {
            wire,
            events,
            shared,
            rank,
            size,
            timeout,
            inbox,
            tasks,
            receives,
            waits,
            waits_sent,
            gone,
            lost: false,
            ended: None,
            has_left: false,
            looked: Instant::now(),
        }
    }

    /// Runs until all ranks have ended, or until the run has failed and this rank has ended.
    pub(crate) fn run(mut self) {
        let _delivering = delivering();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work()));
        if outcome.is_err() {
            let cause = "the communication thread panicked".into();
            self.shared.fail(Error::Failed { rank: self.rank, cause });
        }
        self.finish_all();
        self.shared.close();
    }

    fn work(&mut self) {
        let mut quiet = Instant::now();
        loop {
            let wait = match (self.wire.is_polled(), self.is_idle()) {
                (true, false) if quiet.elapsed() < POLL * 10 => Duration::ZERO,
                (true, false) => POLL,
                (true, true) => POLL_IDLE,
                (false, _) => (self.timeout / 10).clamp(POLL_IDLE, POLL_IDLE * 50),
            };
            match self.events.recv_timeout(wait) {
                Ok(event) => {
                    quiet = Instant::now();
                    self.handle(event);
                    while let Ok(event) = self.events.try_recv() {
                        self.handle(event);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => self.end(),
                Err(RecvTimeoutError::Timeout) => {}
            }
            loop {
                match self.wire.poll() {
                    Ok(None) => break,
                    Ok(Some((from, message))) => {
                        quiet = Instant::now();
                        self.handle(Event::Message(from, message));
                    }
                    Err(error) => {
                        self.fail(error);
                        break;
                    }
                }
            }
            if let Err(error) = self.progress() {
                self.fail(error);
            }
            self.leave();
            if self.is_over() {
                return;
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.tasks.values().all(VecDeque::is_empty) && self.receives.is_empty()
    }

    /// Whether this rank has ended and the others no longer need its wire; closes it then.
    fn is_over(&mut self) -> bool {
        let Some(ended) = self.ended.filter(|_| self.is_idle()) else { return false };
        if self.shared.failure().is_none() && ended.elapsed() > self.timeout {
            let missing = (0..self.size).filter(|r| *r != self.rank && !self.gone.contains(r)).collect();
            self.fail(Error::Late {
                missing,
                call: "the end of the run".into(),
                waited: self.timeout,
                hint: self.shared.recorder.hint(),
            });
        }
        let orderly = self.gone.len() + 1 >= self.size && self.wire.is_flushed();
        // After a failure others may never come to an end.
        let over = orderly || (self.shared.failure().is_some() && ended.elapsed() > SHUTDOWN_TIMEOUT);
        if over {
            self.wire.close(orderly && !self.lost);
        }
        over
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Start(ticket, ranks, me) => self.start(ticket, ranks, me),
            Event::Message(from, message) => self.handle_message(from, message),
            Event::Lost(rank, why) if !self.gone.contains(&rank) => {
                self.gone.insert(rank);
                self.lost = true;
                self.fail(Error::Lost { rank, why });
            }
            Event::Lost(..) => {}
            Event::Fail(error) => self.fail(error),
            Event::End => self.end(),
        }
    }

    fn end(&mut self) {
        self.ended.get_or_insert_with(Instant::now);
    }

    /// Tells the others that this rank has ended, once it has done its part of the collectives that it started and did not wait for.
    fn leave(&mut self) {
        if self.ended.is_some() && !self.has_left && self.tasks.values().all(VecDeque::is_empty) {
            self.has_left = true;
            self.send_to_all(Address::plain(FrameKind::Leave), &[]);
        }
    }

    fn send_to_all(&mut self, address: Address, content: &[u8]) {
        for rank in (0..self.size).filter(|rank| *rank != self.rank) {
            // A rank that cannot be reached is reported by its reader.
            let _ = self.wire.send(rank, address.frame(content));
        }
    }

    fn start(&mut self, ticket: Arc<Ticket>, ranks: Arc<Vec<usize>>, me: usize) {
        if let Some(failure) = self.shared.failure() {
            ticket.finish(Err(failure.seen_in(|| ticket.describe(&ranks))));
            return self.shared.notify();
        }
        match ticket.call.kind() {
            CollectiveKind::Send => {
                let outcome = self.post(&ticket, &ranks);
                let failed = outcome.clone().err();
                ticket.finish(outcome);
                self.shared.notify();
                failed.into_iter().for_each(|error| self.fail(error));
            }
            CollectiveKind::Receive => {
                self.receives.push(Receive { ticket, ranks, me, since: Instant::now() });
            }
            _ => {
                self.wire.expect(ticket.call.signature.bytes());
                self.tasks.entry(ticket.group).or_default().push_back(Task::new(ticket, ranks, me));
            }
        }
    }

    fn handle_message(&mut self, from: usize, message: Vec<u8>) {
        let Some(address) = Address::of(&message) else { return self.fail(malformed(from)) };
        let frame = Frame(message);
        match address.kind {
            FrameKind::Leave => {
                self.gone.insert(from);
            }
            FrameKind::Waiting => {
                let words = frame.content().as_chunks::<8>().0;
                self.waits
                    .insert(from, words.iter().map(|word| u64::from_le_bytes(*word) as usize).collect());
            }
            kind @ (FrameKind::Failure | FrameKind::Loss) => {
                let what = clean(frame.content());
                // No other rank reports this rank's own failure, which it would know.
                let is_other = address.part < self.size && address.part != self.rank;
                let rank = if is_other { address.part } else { from };
                let by = if rank == from { String::new() } else { format!(" (passed on by rank {from})") };
                // Passed on, so that every rank learns the cause before this process's end.
                let is_loss = kind == FrameKind::Loss;
                self.end_run(Error::Reported { rank, what: format!("{what}{by}"), is_loss }, rank, &what);
            }
            _ => {
                self.inbox.insert((from, address), frame);
            }
        }
    }

    /// Sends a message of the pair.
    fn post(&mut self, ticket: &Ticket, ranks: &[usize]) -> Result<()> {
        let (call, to) = (&ticket.call, ranks[ticket.call.peer().unwrap_or(0)]);
        let mut content = call.signature.encode();
        if let Some(tensor) = &ticket.tensor(Side::Input) {
            content.extend(read(tensor, 0..tensor.numel(), call.kind().name())?);
        }
        self.deliver(to, ticket, &content)
    }

    fn deliver(&mut self, to: usize, ticket: &Ticket, content: &[u8]) -> Result<()> {
        let Ticket { group, sequence, .. } = *ticket;
        let address = Address { kind: FrameKind::Message, group, sequence, part: 0 };
        if to == self.rank {
            self.inbox.insert((to, address), Frame(address.frame(content)));
            return Ok(());
        }
        self.wire.send(to, address.frame(content))
    }

    fn progress(&mut self) -> Result<()> {
        for queue in self.tasks.values_mut() {
            while let Some(task) = queue.front_mut() {
                if !task.progress(&mut self.inbox, &mut *self.wire)? {
                    break;
                }
                task.ticket.finish(Ok(()));
                self.shared.notify();
                queue.pop_front();
                if let Some(next) = queue.front_mut() {
                    next.since = Instant::now();
                }
            }
        }
        let mut waiting = std::mem::take(&mut self.receives);
        let mut outcome = Ok(());
        waiting.retain(|receive| match self.receive(receive) {
            Ok(done) => !done,
            Err(error) => {
                outcome = Err(error);
                true
            }
        });
        self.receives = waiting;
        outcome.and_then(|()| self.look_for_missing())
    }

    /// Takes the pair's next message if it has come.
    fn receive(&mut self, receive: &Receive) -> Result<bool> {
        let Receive { ticket, ranks, me, .. } = receive;
        let (call, from) = (&ticket.call, receive.from());
        let Ticket { group, sequence, .. } = **ticket;
        let address = Address { kind: FrameKind::Message, group, sequence, part: 0 };
        let Some(frame) = self.inbox.remove(&(from, address)) else { return Ok(false) };
        let head = call.signature.encode().len();
        let sent = frame.content().get(..head).and_then(Signature::decode).ok_or_else(|| malformed(from))?;
        if let Some(error) = Signature::undeliverable(&sent, &call.signature, [from, ranks[*me]], sequence) {
            return Err(error);
        }
        if let Some(tensor) = &ticket.tensor(Side::Output) {
            write(tensor, 0..tensor.numel(), &frame.content()[head..], call.kind().name())?;
        }
        ticket.completed_by(from);
        ticket.finish(Ok(()));
        self.shared.notify();
        Ok(true)
    }

    /// A process that stood still, because it or its machine was stopped, has heard nothing meanwhile. That time makes no rank late.
    fn forgive_standstill(&mut self) {
        let (still, now) = (self.looked.elapsed(), Instant::now());
        self.looked = now;
        if still > STANDSTILL.max(self.timeout / 4) {
            let tasks = self.tasks.values_mut().flatten().map(|task| &mut task.since);
            let receives = self.receives.iter_mut().map(|receive| &mut receive.since);
            tasks.chain(receives).chain(&mut self.ended).for_each(|since| *since = now.min(*since + still));
        }
    }

    /// Fails if a rank is late, or has ended without coming.
    fn look_for_missing(&mut self) -> Result<()> {
        self.forgive_standstill();
        let tasks = self.tasks.values().filter_map(VecDeque::front);
        let tasks = tasks.map(|task| (&task.ticket, &task.ranks, task.missing(&self.inbox), task.since));
        let receives = self.receives.iter().map(|r| (&r.ticket, &r.ranks, vec![r.from()], r.since));
        let mut long = vec![];
        for (ticket, ranks, missing, since) in tasks.chain(receives) {
            let call = || ticket.describe(ranks);
            if let Some(&rank) = missing.iter().find(|rank| self.gone.contains(rank)) {
                return Err(Error::Deserted { rank, call: call() });
            }
            if since.elapsed() > self.timeout {
                // This rank may wait for others, too: a thread of its own in another call.
                let waits =
                    |rank| if rank == self.rank { Some(&self.waits_sent) } else { self.waits.get(&rank) };
                let missing = blame(missing, |rank| waits(rank).cloned().unwrap_or_default());
                return Err(Error::Late { missing, call: call(), waited: self.timeout, hint: ticket.hint() });
            }
            if since.elapsed() > self.timeout / 2 {
                long.extend(missing);
            }
        }
        if long != self.waits_sent {
            let words: Vec<u8> = long.iter().flat_map(|&rank| (rank as u64).to_le_bytes()).collect();
            self.send_to_all(Address::plain(FrameKind::Waiting), &words);
            self.waits_sent = long;
        }
        Ok(())
    }

    /// Ends the run for an error found here.
    fn fail(&mut self, error: Error) {
        let what = error.to_string();
        self.end_run(error, self.rank, &what);
    }

    /// Ends the run with the error that rank `from` reported, unless it has ended already.
    fn end_run(&mut self, error: Error, from: usize, what: &str) {
        if self.shared.failure().is_some() {
            return;
        }
        let kind = if error.is_loss() { FrameKind::Loss } else { FrameKind::Failure };
        let shared = Arc::clone(&self.shared);
        shared.recorder.failing(|| {
            self.shared.fail(error);
            self.send_to_all(Address { part: from, ..Address::plain(kind) }, what.as_bytes());
            what.to_string()
        });
        self.finish_all();
    }

    fn finish_all(&mut self) {
        let failure = self.shared.failure().unwrap_or_else(|| Error::Launch("the run has ended".into()));
        let tasks = self.tasks.drain().flat_map(|(_, queue)| queue).map(|task| (task.ticket, task.ranks));
        let receives = self.receives.drain(..).map(|receive| (receive.ticket, receive.ranks));
        for (ticket, ranks) in tasks.chain(receives) {
            ticket.finish(Err(failure.seen_in(|| ticket.describe(&ranks))));
        }
        self.shared.notify();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use phalanx_tensor::{Device, Tensor};

    use super::*;
    use crate::comm::Call;
    use crate::flight::FlightRecorder;

    struct Nowhere;

    impl Wire for Nowhere {
        fn send(&mut self, _: usize, _: Vec<u8>) -> Result<()> {
            Ok(())
        }
        fn is_flushed(&mut self) -> bool {
            true
        }
        fn close(&mut self, _: bool) {}
    }

    const TIMEOUT: Duration = Duration::from_secs(2);

    /// Rank 0 of these.
    fn driver(ranks: usize) -> Driver {
        let shared = Arc::new(Shared::new(FlightRecorder::of_ranks(0..1, ranks).swap_remove(0)));
        Driver::new(Box::new(Nowhere), channel().1, shared, (0, ranks), TIMEOUT)
    }

    /// Begins to receive from a rank, since a time.
    fn receive(driver: &mut Driver, from: usize, since: Instant) {
        let tensor = Tensor::from_slice(&[0f32], &[1], Device::CPU).unwrap();
        let ranks = Arc::new((0..driver.size).collect());
        driver.start(Ticket::new(Call::recv(tensor, from), None, 0, 0, 0), ranks, 0);
        driver.receives.last_mut().unwrap().since = since;
    }

    /// Rank 1 waits for this rank and for rank 2, and so does this rank in another call.
    #[test]
    fn a_rank_that_waits_for_others_is_not_to_blame_itself() {
        let mut driver = driver(3);
        driver.waits.insert(1, vec![0, 2]);
        let begun = Instant::now() - TIMEOUT * 3 / 4;
        receive(&mut driver, 2, begun);
        driver.look_for_missing().unwrap();
        receive(&mut driver, 1, begun - TIMEOUT);
        let error = driver.look_for_missing().unwrap_err().to_string();
        assert!(error.contains("ranks [2] did not arrive within 2000 ms"), "{error}");
    }

    #[test]
    fn time_in_which_this_process_stood_still_makes_no_rank_late() {
        let (mut driver, timeout) = (driver(2), TIMEOUT);
        receive(&mut driver, 1, Instant::now());
        let before = Instant::now() - 2 * timeout;
        driver.receives[0].since = before;
        driver.looked = before;
        driver.look_for_missing().unwrap();
        // Now it has looked all the time.
        driver.receives[0].since = before;
        let error = driver.look_for_missing().unwrap_err().to_string();
        assert!(error.contains("ranks [1] did not arrive within 2000 ms"), "{error}");
    }
}
