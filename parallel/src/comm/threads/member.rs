//! [`world`]: the ranks of one process, as communicators.

use std::sync::Arc;
use std::time::Duration;

use super::world::{Desk, World};
use crate::comm::communicator::{Children, Meter, members};
use crate::comm::{Call, Comm, Communicator, Error, Pending, Result, Traffic};

/// The communicators of `size` ranks, each to be used by a thread of its own. A rank that lets others wait for longer
/// than `timeout` ends the run of all. See [`launch::threads`](crate::launch::threads), which starts the threads too.
pub fn world(size: usize, timeout: Duration) -> Vec<Comm> {
    let world = World::new(size, timeout);
    (0..size).map(|rank| member(&world, rank)).collect()
}

/// Rank `rank` of a world.
pub(crate) fn member(world: &Arc<World>, rank: usize) -> Comm {
    let desk = Desk { world: Arc::clone(world), id: 0, ranks: (0..world.size()).collect() };
    Arc::new(Member::new(desk, rank))
}

/// A rank's membership in a group.
#[derive(Debug)]
struct Member {
    desk: Arc<Desk>,
    rank: usize,
    meter: Meter,
    children: Children,
}

impl Member {
    fn new(desk: Desk, rank: usize) -> Member {
        Member { desk: Arc::new(desk), rank, meter: Meter::default(), children: Children::default() }
    }

    fn begin(&self, call: Call, waits: bool) -> Pending {
        let call = match call.checked(self.rank, self.size()).and_then(|call| call.on_host(self.rank)) {
            Ok(call) => call,
            Err(error) => return Pending::done(Call::barrier(), Err(error)),
        };
        self.meter.count(&call.signature, self.rank, self.size());
        let Desk { world, id, ranks } = &*self.desk;
        let ticket = world.arrive((*id, ranks), self.rank, call, waits);
        Pending::new(ticket, Arc::clone(&self.desk) as _)
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
        self.begin(call, false)
    }

    fn run(&self, call: Call) -> Result<()> {
        self.begin(call, true).wait()
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        let (rank, ranks) = members(&self.desk.ranks, self.rank, ranks)?;
        let id = self.children.identity(self.desk.id, &ranks);
        Ok(Arc::new(Member::new(Desk { world: Arc::clone(&self.desk.world), id, ranks }, rank)))
    }

    fn traffic(&self) -> Traffic {
        self.meter.read()
    }

    fn fail(&self, cause: &str) {
        let rank = self.desk.ranks[self.rank];
        self.desk.world.fail(Error::Failed { rank, cause: cause.into() });
    }

    fn failure(&self) -> Option<Error> {
        self.desk.world.failure()
    }
}
