//! (comm/wire/member.rs)
//! [`connect`]: one process of a run, as a communicator.
//!
//! (comm/wire/shared.rs)
//! [`Shared`]: where a process's ranks wait for its driver.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use super::driver::Event;
use super::{Driver, Wire};
use crate::comm::communicator::{Children, Meter, members};
use crate::comm::pending::{Ticket, Waiter};
use crate::comm::{Call, Comm, Communicator, Error, Pending, Result, Traffic};
use crate::panics::unpoisoned;

/// One process of a run, until it is dropped, which waits for the others to end as well.
#[derive(Debug)]
pub(crate) struct Process {
    events: Sender<Event>,
    shared: Arc<Shared>,
    driver: Option<JoinHandle<()>>,
}

impl Process {
    /// What ended the run.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.shared.failure()
    }

    /// Leaves the run, and waits until all have.
    pub(crate) fn leave(&mut self) {
        // Where the driver has ended there is nothing left to wait for.
        let _ = self.events.send(Event::End);
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Joins the run over a wire, which is made on the thread that will own it.
pub(crate) fn connect(
    (rank, size): (usize, usize),
    timeout: Duration,
    (events, heard): (Sender<Event>, Receiver<Event>),
    wire: impl FnOnce() -> Result<Box<dyn Wire>> + Send + 'static,
) -> Result<(Process, Comm)> {
    let shared = Arc::new(Shared::default());
    let (made, ready) = std::sync::mpsc::channel();
    let for_driver = Arc::clone(&shared);
    let drive = move || match wire() {
        Ok(wire) => {
            // The launcher waits for this.
            let _ = made.send(Ok(()));
            Driver::new(wire, heard, for_driver, (rank, size), timeout).run();
        }
        Err(error) => drop(made.send(Err(error))),
    };
    let spawned = std::thread::Builder::new().name("phalanx wire".into()).spawn(drive);
    let driver = spawned.map_err(|e| Error::Launch(format!("no thread for communication: {e}")))?;
    ready.recv().unwrap_or_else(|_| Err(Error::Launch("the communication thread panicked".into())))?;
    let desk = Desk { shared: Arc::clone(&shared), ranks: Arc::new((0..size).collect()) };
    let process = Process { events: events.clone(), shared, driver: Some(driver) };
    Ok((process, Arc::new(Member::new(desk, rank, 0, events))))
}

/// Who waits for the driver.
#[derive(Clone, Debug)]
struct Desk {
    shared: Arc<Shared>,
    ranks: Arc<Vec<usize>>,
}

impl Waiter for Desk {
    fn wait(&self, ticket: &Arc<Ticket>) -> Result<()> {
        self.shared.wait(ticket)
    }
}

/// This process's membership in a group.
#[derive(Debug)]
struct Member {
    desk: Desk,
    rank: usize,
    id: u64,
    events: Sender<Event>,
    /// The numbers of the next calls: of the group's, and of the messages to (true) and from each rank.
    next: Mutex<HashMap<Option<(usize, bool)>, u64>>,
    meter: Meter,
    children: Children,
}

impl Member {
    fn new(desk: Desk, rank: usize, id: u64, events: Sender<Event>) -> Member {
        let (next, meter, children) = Default::default();
        Member { desk, rank, id, events, next, meter, children }
    }
}

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        &self.desk.ranks
    }

    fn start(&self, call: Call) -> Pending {
        let call = match call.checked(self.rank, self.size()).and_then(|call| call.on_host(self.rank)) {
            Ok(call) => call,
            Err(error) => return Pending::done(Call::barrier(), Err(error)),
        };
        self.meter.count(&call.signature, self.rank, self.size());
        let key = call.peer().map(|peer| (peer, call.kind() == crate::comm::Kind::Send));
        // Numbered and handed over in the same order.
        let mut next = unpoisoned(self.next.lock());
        let number = next.entry(key).or_default();
        let ticket = Ticket::new(call, self.desk.ranks[self.rank], self.id, *number);
        *number += 1;
        let start = Event::Start(Arc::clone(&ticket), Arc::clone(&self.desk.ranks), self.rank);
        if self.events.send(start).is_err() {
            ticket.finish(Err(Error::Launch("the process has left the run".into())));
        }
        drop(next);
        Pending::new(ticket, Arc::new(self.desk.clone()))
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        let (rank, ranks) = members(&self.desk.ranks, self.rank, ranks)?;
        let id = self.children.identity(self.id, &ranks);
        let desk = Desk { shared: Arc::clone(&self.desk.shared), ranks: Arc::new(ranks) };
        Ok(Arc::new(Member::new(desk, rank, id, self.events.clone())))
    }

    fn traffic(&self) -> Traffic {
        self.meter.read()
    }

    fn fail(&self, cause: &str) {
        let rank = self.desk.ranks[self.rank];
        // Where the driver has ended, so has the run.
        let _ = self.events.send(Event::Fail(Error::Failed { rank, cause: cause.into() }));
    }

    fn failure(&self) -> Option<Error> {
        self.desk.shared.failure()
    }
}

/// What the driver and those who wait for it share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<Outcome>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Outcome {
    failure: Option<Error>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Outcome> {
        unpoisoned(self.state.lock())
    }

    /// What ended the run.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Keeps what ended the run: the first that went wrong.
    pub(super) fn fail(&self, error: Error) {
        self.lock().failure.get_or_insert(error);
    }

    /// Blocks until the ticket is done, which the driver sees to.
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<()> {
        let mut state = self.lock();
        loop {
            match ticket.outcome() {
                Some(outcome) => return outcome,
                None if state.closed => return Err(Error::Launch("the process has left the run".into())),
                None => state = unpoisoned(self.wake.wait(state)),
            }
        }
    }

    /// A ticket is done.
    pub(super) fn notify(&self) {
        drop(self.lock());
        self.wake.notify_all();
    }

    /// Nothing will come any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }
}
