//! [`connect`]: a process of a run joins it over a wire. [`Process`] is its end, [`Member`] its communicator.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx_tensor::unpoisoned;

use super::driver::Event;
use super::outcome::Shared;
use super::{Driver, Wire};
use crate::comm::communicator::{ChildGroups, Meter, members};
use crate::comm::pending::{Ticket, Waiter};
use crate::comm::{Call, Comm, Communicator, Error, Pending, Result, Traffic};
use crate::flight::FlightRecorder;

/// One process of a run, until it is dropped, which waits for the others to end as well.
#[derive(Debug)]
pub(crate) struct Process {
    events: Sender<Event>,
    shared: Arc<Shared>,
    driver: Option<JoinHandle<()>>,
}

impl Process {
    /// The error that ended the run.
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
    let shared = Arc::new(Shared::new(FlightRecorder::of_ranks(rank..rank + 1, size).remove(0)));
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
    let waiter = GroupWaiter { shared: Arc::clone(&shared), ranks: Arc::new((0..size).collect()) };
    let process = Process { events: events.clone(), shared, driver: Some(driver) };
    Ok((process, Arc::new(Member::new(waiter, rank, 0, events))))
}

/// The members of a group, which wait for the driver.
#[derive(Clone, Debug)]
struct GroupWaiter {
    shared: Arc<Shared>,
    ranks: Arc<Vec<usize>>,
}

impl Waiter for GroupWaiter {
    fn wait(&self, ticket: &Arc<Ticket>) -> Result<()> {
        self.shared.wait(ticket)
    }
}

/// This process's membership in a group.
#[derive(Debug)]
struct Member {
    waiter: GroupWaiter,
    rank: usize,
    id: u64,
    events: Sender<Event>,
    /// The numbers of the next calls: of the group's, and of the messages to (true) and from each rank.
    next: Mutex<HashMap<Option<(usize, bool)>, u64>>,
    meter: Meter,
    children: ChildGroups,
}

impl Member {
    fn new(waiter: GroupWaiter, rank: usize, id: u64, events: Sender<Event>) -> Member {
        waiter.shared.recorder.group(id, &waiter.ranks);
        let (next, meter, children) = Default::default();
        Member { waiter, rank, id, events, next, meter, children }
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
        let call = match call.checked(self.rank, self.size()).and_then(|call| call.on_host(self.rank)) {
            Ok(call) => call,
            Err(error) => return Pending::done(Call::barrier(), Err(error)),
        };
        self.meter.count(&call.signature, self.rank, self.size());
        let key = call.peer().map(|peer| (peer, call.kind() == crate::comm::CollectiveKind::Send));
        // Numbered and handed over in the same order.
        let mut next = unpoisoned(self.next.lock());
        let number = next.entry(key).or_default();
        let recorder = &self.waiter.shared.recorder;
        let ticket = Ticket::new(call, Some(recorder), self.waiter.ranks[self.rank], self.id, *number);
        *number += 1;
        let start = Event::Start(Arc::clone(&ticket), Arc::clone(&self.waiter.ranks), self.rank);
        if self.events.send(start).is_err() {
            ticket.finish(Err(Error::Launch("the process has left the run".into())));
        }
        drop(next);
        Pending::new(ticket, Arc::new(self.waiter.clone()))
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        let (rank, ranks) = members(&self.waiter.ranks, self.rank, ranks)?;
        let id = self.children.identity(self.id, &ranks);
        let waiter = GroupWaiter { shared: Arc::clone(&self.waiter.shared), ranks: Arc::new(ranks) };
        Ok(Arc::new(Member::new(waiter, rank, id, self.events.clone())))
    }

    fn traffic(&self) -> Traffic {
        self.meter.read()
    }

    fn fail(&self, cause: &str) {
        let rank = self.waiter.ranks[self.rank];
        // Where the driver has ended, so has the run.
        let _ = self.events.send(Event::Fail(Error::failed(rank, cause)));
    }

    fn failure(&self) -> Option<Error> {
        self.waiter.shared.failure()
    }

    fn flight_recorder(&self) -> Option<&FlightRecorder> {
        Some(&self.waiter.shared.recorder)
    }
}
