//! All queued work as one graph: each operation knows which operations come before it.
//!
//! A stream is nothing but the last operation queued on it, an event the operation it was recorded behind. So stream
//! order, events, the legacy default stream and graphs are all the same thing here: edges. Which thread runs which
//! operation, and when, is decided in [`executor`](crate::executor).
//!
//! ```text
//! stream 1   copy ── kernel a ── event e ── kernel c
//!                                    \
//! stream 2   kernel b ── wait for e ──┴── kernel d        d runs after a and b; nothing orders c and d
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use crate::context::Context;
use crate::log::{self, Place, Work};
use crate::race::{Access, Accesses, Clock, Origin, Stamp};
use crate::settings::settings;
use crate::status::Failure;
use crate::unwaited::{HostRows, Unwaited};

/// How the place of a graph's node begins, as [`Queue::push`] is given it.
pub(crate) const OF_A_GRAPH: &str = " of a graph";

/// The outcome of running a task.
#[derive(Debug)]
pub(crate) enum Progress {
    /// It is done, and touched these bytes besides [`Task::accesses`].
    Done(Vec<Access>),
    /// It waits for something other than earlier operations (another rank, for one), and is to be run again.
    Waiting,
    /// It failed, which ends its context.
    Failed(Failure),
}

/// The number of an operation. A task gets a new one each time it is queued, larger than all before.
pub(crate) type Ticket = u64;

/// A piece of work that can be queued on a stream or be a node of a graph: it may run many times.
pub(crate) struct Task {
    /// Its name in reports, as in "kernel gelu". The stream is added when it is queued.
    pub what: String,
    pub context: Arc<Context>,
    /// Device memory that it is known to touch.
    pub accesses: Vec<Access>,
    /// Page-locked memory of the host that must stay until it has run: `start .. end`.
    pub host: Option<(usize, usize)>,
    /// It writes that memory.
    pub writes_host: bool,
    /// Whether it runs although a fault has ended its context: a callback, which is told so.
    pub even_if_lost: bool,
    pub run: Box<dyn Fn(Ticket) -> Progress + Send + Sync>,
    /// What it would have a GPU do, for the log.
    pub work: Work,
}

impl Task {
    /// A task that touches nothing.
    pub(crate) fn new(
        what: impl Into<String>,
        context: &Arc<Context>,
        run: impl Fn(Ticket) -> Progress + Send + Sync + 'static,
    ) -> Task {
        Task {
            what: what.into(),
            context: context.clone(),
            accesses: Vec::new(),
            host: None,
            writes_host: false,
            even_if_lost: false,
            run: Box::new(run),
            work: Work::default(),
        }
    }

    /// A task that does nothing but keep its place in the order.
    pub(crate) fn marker(what: &str, context: &Arc<Context>) -> Task {
        Task::new(what, context, |_| Progress::Done(Vec::new()))
    }

    /// With what it would have a GPU do.
    pub(crate) fn with_work(self, work: Work) -> Task {
        Task { work, ..self }
    }

    /// With device memory that it touches.
    pub(crate) fn touching(mut self, accesses: impl IntoIterator<Item = Access>) -> Task {
        self.accesses.extend(accesses);
        self
    }
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.what)
    }
}

/// `Done`, or the failure.
impl From<Result<(), Failure>> for Progress {
    fn from(result: Result<(), Failure>) -> Progress {
        result.map_or_else(Progress::Failed, |()| Progress::Done(Vec::new()))
    }
}

/// How many of the host's clocks are kept. With fewer, records are dropped later.
const KNOWN_MAX: usize = 8;
/// How many chains a clock may know of before those that are no longer needed are looked for.
const CHAINS_MAX: usize = 256;

/// A place in the order: behind an operation. It keeps its clock after the operation has run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Point {
    /// 0 is before everything.
    pub ticket: Ticket,
    pub clock: Arc<Clock>,
}

/// An operation that has not run yet.
#[derive(Debug)]
pub(crate) struct Operation {
    pub task: Arc<Task>,
    pub origin: Origin,
    /// Operations that have not run and come before this one.
    before: BTreeSet<Ticket>,
    after: Vec<Ticket>,
    /// The value of [`Queue::changes`] when it was last run and answered that it waits for something else.
    asked_at: Option<u64>,
    /// Whether it has said so before.
    postponed: bool,
    pub running: bool,
}

/// What is queued, and what was touched by what has run.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    operations: BTreeMap<Ticket, Operation>,
    /// Operations whose predecessors have all run, and which are not running.
    ready: BTreeSet<Ticket>,
    last: Ticket,
    /// Counts changes after which an operation that waits for something else is run again.
    pub changes: u64,
    /// How many operations each chain has had.
    ticks: HashMap<u64, u64>,
    /// How many chains there were.
    chains: u64,
    /// What the host knows to have run.
    host: Clock,
    /// What it knew when so many operations had been queued: records of those can be forgotten when what was queued
    /// until then has run, for it may be in conflict with them.
    known: VecDeque<(Ticket, Clock)>,
    /// Chains that get no more operations.
    retired: Vec<u64>,
    /// Clocks with fewer entries are not pruned.
    long: usize,
    pub accesses: Accesses,
    pub unwaited: Unwaited,
}

impl Queue {
    /// A new chain: operations that come one after another, as those of a stream do.
    pub(crate) fn chain(&mut self) -> u64 {
        self.chains += 1;
        self.chains
    }

    /// Queues a task behind `before`. `place` is added to its name.
    pub(crate) fn push(&mut self, task: Arc<Task>, place: &str, chain: u64, before: &[Point]) -> Point {
        self.last += 1;
        self.changes += 1;
        let ticket = self.last;
        let tick = self.ticks.entry(chain).or_default();
        *tick += 1;
        let stamp = Stamp { chain, tick: *tick };
        if settings().dry {
            let (device, in_graph) = (task.context.ordinal, place.starts_with(OF_A_GRAPH));
            log::log(&task.work, Place { ticket, device, chain, in_graph, before });
        }
        let mut clock = self.host.clone();
        before.iter().for_each(|point| clock.join(&point.clock));
        self.prune(&mut clock);
        clock.add(stamp);
        let clock = Arc::new(clock);
        let waits: BTreeSet<Ticket> = before
            .iter()
            .map(|point| point.ticket)
            .filter(|ticket| self.operations.contains_key(ticket))
            .collect();
        for earlier in &waits {
            if let Some(operation) = self.operations.get_mut(earlier) {
                operation.after.push(ticket);
            }
        }
        if waits.is_empty() {
            self.ready.insert(ticket);
        }
        let origin = Origin { what: format!("{}{place}", task.what).into(), stamp, clock: clock.clone() };
        let (after, asked_at) = (Vec::new(), None);
        let operation =
            Operation { task, origin, before: waits, after, asked_at, postponed: false, running: false };
        self.operations.insert(ticket, operation);
        Point { ticket, clock }
    }

    /// Whether the operation behind which the point lies has run.
    pub(crate) fn passed(&self, point: &Point) -> bool {
        self.has_run(point.ticket)
    }

    /// Whether an operation has run.
    pub(crate) fn has_run(&self, ticket: Ticket) -> bool {
        !self.operations.contains_key(&ticket)
    }

    /// How many operations have not run.
    pub(crate) fn len(&self) -> usize {
        self.operations.len()
    }

    /// Operations that may run now, in the order in which they were queued. One that has answered that it waits for
    /// something else is among them only if [`Queue::changes`] was below `since` then.
    pub(crate) fn runnable(&self, since: u64) -> impl Iterator<Item = Ticket> {
        let fresh = move |ticket: &Ticket| {
            self.operations.get(ticket).is_some_and(|o| o.asked_at.is_none_or(|asked| asked < since))
        };
        self.ready.iter().copied().filter(fresh)
    }

    /// `ticket` and everything that has to run before it.
    pub(crate) fn needed(&self, ticket: Ticket) -> BTreeSet<Ticket> {
        let (mut needed, mut waiting) = (BTreeSet::new(), vec![ticket]);
        while let Some(ticket) = waiting.pop() {
            if let Some(operation) = self.operations.get(&ticket)
                && needed.insert(ticket)
            {
                waiting.extend(&operation.before);
            }
        }
        needed
    }

    /// Takes an operation to run it.
    pub(crate) fn start(&mut self, ticket: Ticket) -> Option<(Arc<Task>, Origin)> {
        self.ready.remove(&ticket);
        let operation = self.operations.get_mut(&ticket)?;
        operation.running = true;
        operation.asked_at = Some(self.changes);
        Some((operation.task.clone(), operation.origin.clone()))
    }

    /// Puts an operation back that waits for something else. Says whether it is the first time: others may wait for
    /// just that.
    pub(crate) fn postpone(&mut self, ticket: Ticket) -> bool {
        let Some(operation) = self.operations.get_mut(&ticket) else { return false };
        let is_first = !std::mem::replace(&mut operation.postponed, true);
        operation.running = false;
        self.ready.insert(ticket);
        self.changes += u64::from(is_first);
        is_first
    }

    /// An operation has run: those behind it may. `false` if it had run before.
    pub(crate) fn finish(&mut self, ticket: Ticket) -> bool {
        let Some(operation) = self.operations.remove(&ticket) else { return false };
        self.changes += 1;
        for later in operation.after {
            if let Some(waiting) = self.operations.get_mut(&later) {
                waiting.before.remove(&ticket);
                if waiting.before.is_empty() {
                    self.ready.insert(later);
                }
            }
        }
        true
    }

    /// The host has waited for `point`: all that is queued from now on comes behind it.
    pub(crate) fn host_waited(&mut self, point: &Point) {
        self.host.join(&point.clock);
        self.unwaited.waited(&self.host, settings().races);
        if self.known.len() == KNOWN_MAX || self.known.back().is_some_and(|(ticket, _)| *ticket == self.last)
        {
            self.known.pop_back();
        }
        self.known.push_back((self.last, self.host.clone()));
        let oldest = self.operations.keys().next().copied().unwrap_or(Ticket::MAX);
        while self.known.front().is_some_and(|(ticket, _)| *ticket < oldest) {
            if let Some((_, host)) = self.known.pop_front() {
                self.accesses.forget(&host);
            }
        }
    }

    /// An operation that is running tells the host that all before it has run.
    pub(crate) fn tells_host(&mut self, ticket: Ticket) {
        if let Some(operation) = self.operations.get(&ticket) {
            let point = Point { ticket, clock: operation.origin.clock.clone() };
            self.host_waited(&point);
        }
    }

    /// An operation that is running has read rows which are to be in page-locked memory once the host waits for it.
    pub(crate) fn brings_host(&mut self, ticket: Ticket, range: (usize, usize), rows: HostRows) {
        if let Some(Operation { origin, task, .. }) = self.operations.get(&ticket) {
            self.unwaited.brings(origin.clone(), task.context.clone(), range, rows);
        }
    }

    /// An operation that is running is about to read page-locked memory.
    pub(crate) fn reads_host(&mut self, ticket: Ticket, range: (usize, usize)) {
        if let Some(operation) = self.operations.get(&ticket) {
            self.unwaited.is_read(&operation.origin.clock, range);
        }
    }

    /// An operation that is running has read page-locked memory, whose sum was `sum`.
    pub(crate) fn has_read_host(&mut self, ticket: Ticket, range: (usize, usize), sum: u64) {
        if let Some(Operation { origin, task, .. }) = self.operations.get(&ticket) {
            self.unwaited.has_read(origin.clone(), task.context.clone(), range, sum);
        }
    }

    /// Whether copies that the host has not waited for write page-locked memory in `start .. end`.
    pub(crate) fn writes_host(&self, start: usize, end: usize) -> bool {
        let writes =
            |o: &Operation| o.task.writes_host && o.task.host.is_some_and(|(s, e)| s < end && start < e);
        self.unwaited.is_brought(start, end) || self.operations.values().any(writes)
    }

    /// A chain gets no more operations. Clocks drop it when no record and no later operation can refer to it.
    pub(crate) fn retire(&mut self, chain: u64) {
        self.retired.push(chain);
    }

    /// Drops retired chains from a clock, so that clocks do not grow with every stream that was ever made.
    fn prune(&mut self, clock: &mut Clock) {
        if clock.len() <= self.long.max(CHAINS_MAX) {
            return;
        }
        let (recorded, host, ticks) = (self.accesses.chains(), &mut self.host, &mut self.ticks);
        self.retired.retain(|&chain| {
            let last = Stamp { chain, tick: ticks.get(&chain).copied().unwrap_or(0) };
            let gone = host.covers(last) && !recorded.contains(&chain);
            if gone {
                ticks.remove(&chain);
            }
            !gone
        });
        clock.retain(|stamp| ticks.contains_key(&stamp.chain));
        host.retain(|stamp| ticks.contains_key(&stamp.chain));
        self.long = 2 * clock.len();
    }

    /// The operations of a context that have not run.
    pub(crate) fn of_context(&self, id: u64) -> Vec<Point> {
        let of_it = self.operations.iter().filter(|(_, o)| o.task.context.id == id);
        of_it.map(|(ticket, o)| Point { ticket: *ticket, clock: o.origin.clock.clone() }).collect()
    }

    /// Operations that have not run and use page-locked memory in `start .. end`.
    pub(crate) fn using_host(&self, start: usize, end: usize) -> Vec<(Point, Arc<str>)> {
        let point = |ticket: &Ticket, o: &Operation| Point { ticket: *ticket, clock: o.origin.clock.clone() };
        let uses = |o: &Operation| o.task.host.is_some_and(|(s, e)| s < end && start < e);
        self.operations
            .iter()
            .filter(|(_, o)| uses(o))
            .map(|(t, o)| (point(t, o), o.origin.what.clone()))
            .collect()
    }
}
