//! The streams: what was queued last on each, and how they are ordered among each other.
//!
//! A stream here is a lane: its last operation, or, while it is captured, the nodes at its end. The legacy default
//! stream of a context comes behind everything in the context's blocking streams, and they behind it; per-thread
//! default streams are blocking ones.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use crate::capture::{Capture, Joined};
use crate::context::Context;
use crate::queue::Point;
use crate::status::{Result, Status};
use crate::task::Task;
use crate::world::World;

/// The legacy default stream.
const LEGACY: usize = 1;
/// The default stream of each thread.
const PER_THREAD: usize = 2;
/// The upper half of stream handles.
const BASE: usize = 2 << 40;

/// A lane's number.
pub(crate) type LaneId = u64;

/// How a lane is ordered with the legacy default stream of its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Legacy,
    Blocking,
    NonBlocking,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Lane {
    pub context: Arc<Context>,
    pub kind: Kind,
    pub priority: i32,
    chain: u64,
    pub tail: Point,
    pub capture: Option<Joined>,
    thread: Option<ThreadId>,
    destroyed: bool,
}

/// All streams, and what they are captured into.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    lanes: BTreeMap<LaneId, Lane>,
    last: LaneId,
    pub captures: BTreeMap<u64, Capture>,
    pub last_capture: u64,
}

impl Lanes {
    /// A new lane.
    pub(crate) fn add(&mut self, context: &Arc<Context>, kind: Kind, priority: i32) -> LaneId {
        self.last += 1;
        let chain = context.world().executor.queue().chain();
        let (context, tail) = (context.clone(), Point::default());
        let lane =
            Lane { context, kind, priority, chain, tail, capture: None, thread: None, destroyed: false };
        self.lanes.insert(self.last, lane);
        self.last
    }

    /// What C knows a lane by.
    pub(crate) fn handle(lane: LaneId) -> usize {
        BASE + lane as usize * 16
    }

    /// The lane of a handle; default streams are those of the current context.
    pub(crate) fn find(&mut self, handle: usize) -> Result<LaneId> {
        match handle {
            0 | LEGACY => Ok(self.default_lane(&crate::context::here()?, Kind::Legacy, None)),
            PER_THREAD => {
                Ok(self.default_lane(&crate::context::here()?, Kind::Blocking, Some(thread::current().id())))
            }
            _ => {
                let lane = handle.wrapping_sub(BASE) as u64 / 16;
                let living =
                    self.lanes.get(&lane).is_some_and(|l| !l.destroyed && Lanes::handle(lane) == handle);
                let unknown = || Status::INVALID_HANDLE.because(format!("{handle:#x} is no living stream"));
                living.then_some(lane).ok_or_else(unknown)
            }
        }
    }

    fn default_lane(&mut self, context: &Arc<Context>, kind: Kind, thread: Option<ThreadId>) -> LaneId {
        let is_it = |l: &Lane| {
            l.context.id == context.id
                && l.thread == thread
                && (kind == Kind::Legacy) == (l.kind == Kind::Legacy)
        };
        if kind == Kind::Legacy || thread.is_some() {
            let found = self.lanes.iter().find(|(_, lane)| is_it(lane)).map(|(id, _)| *id);
            if let Some(found) = found {
                return found;
            }
        }
        let lane = self.add(context, kind, 0);
        if let Some(new) = self.lanes.get_mut(&lane) {
            new.thread = thread;
        }
        lane
    }

    /// A lane that `find` or `add` gave.
    pub(crate) fn lane(&mut self, id: LaneId) -> Result<&mut Lane> {
        self.lanes.get_mut(&id).ok_or_else(|| Status::INVALID_HANDLE.because("the stream was destroyed"))
    }

    /// All lanes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (LaneId, &Lane)> {
        self.lanes.iter().map(|(id, lane)| (*id, lane))
    }

    /// All lanes, to change them.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        self.lanes.values_mut()
    }

    /// The stream's handle is one no more; what is queued on it still runs, and still counts for the legacy stream.
    pub(crate) fn destroy(&mut self, id: LaneId, world: &World) -> Result<()> {
        let lane = self.lane(id)?;
        lane.destroyed = true;
        let mut queue = world.executor.queue();
        queue.retire(lane.chain);
        self.lanes.retain(|_, lane| !(lane.destroyed && queue.passed(&lane.tail)));
        Ok(())
    }

    /// A context's lanes are no more.
    pub(crate) fn forget(&mut self, context: u64, world: &World) {
        let mut queue = world.executor.queue();
        let gone = self.lanes.values().filter(|lane| lane.context.id == context && !lane.destroyed);
        gone.for_each(|lane| queue.retire(lane.chain));
        self.lanes.retain(|_, lane| lane.context.id != context);
    }

    /// The operations behind which new work of the lane comes.
    pub(crate) fn before(&self, id: LaneId) -> Vec<Point> {
        let Some(lane) = self.lanes.get(&id) else { return Vec::new() };
        let others = self.lanes.values().filter(|other| other.context.id == lane.context.id);
        let ordered = others.filter(|other| match lane.kind {
            Kind::NonBlocking => false,
            Kind::Blocking => other.kind == Kind::Legacy,
            Kind::Legacy => other.kind == Kind::Blocking,
        });
        std::iter::once(&lane.tail).chain(ordered.map(|other| &other.tail)).cloned().collect()
    }

    /// Queues a task on a lane, or makes it a node of what the lane is captured into.
    pub(crate) fn enqueue(&mut self, world: &World, id: LaneId, task: Arc<Task>) -> Result<Point> {
        if self.lane(id)?.capture.is_some() {
            self.capture_task(id, task)?;
            return Ok(Point::default());
        }
        self.check_implicit(id)?;
        let before = self.before(id);
        Ok(self.push(world, id, task, &before))
    }

    /// The lane's next work comes behind `point` too.
    pub(crate) fn wait_for(&mut self, world: &World, id: LaneId, marker: Arc<Task>, point: Point) {
        let mut before = self.before(id);
        before.push(point);
        self.push(world, id, marker, &before);
    }

    fn push(&mut self, world: &World, id: LaneId, task: Arc<Task>, before: &[Point]) -> Point {
        let name = self.name(id);
        let Some(lane) = self.lanes.get_mut(&id) else { return Point::default() };
        lane.tail = world.executor.queue().push(task, &name, lane.chain, before);
        lane.tail.clone()
    }

    /// Queues the nodes of a graph behind everything in the lane and behind `before`, and the lane's next work behind
    /// them. A node is a task and the nodes before it, which come earlier in the list. `branches` are chains for the
    /// graph's branches, to be used again at its next launch.
    pub(crate) fn enqueue_graph(
        &mut self,
        world: &World,
        id: LaneId,
        nodes: &[(Arc<Task>, Vec<usize>)],
        before: &Point,
        branches: &mut Vec<u64>,
    ) -> Result<Point> {
        self.check_implicit(id)?;
        let mut start = self.before(id);
        start.push(before.clone());
        let name = format!(" of a graph{}", self.name(id));
        let (context, chain) = (self.lane(id)?.context.clone(), self.lane(id)?.chain);
        let mut points: Vec<Point> = Vec::with_capacity(nodes.len());
        let mut chains: Vec<u64> = Vec::with_capacity(nodes.len());
        let mut queue = world.executor.queue();
        let mut spare = 0;
        for (i, (task, earlier)) in nodes.iter().enumerate() {
            // A chain goes on with the first node behind its last one; other branches are chains of their own.
            let free = earlier
                .iter()
                .map(|&e| (e, chains[e]))
                .find(|&(e, c)| chains[e + 1..i].iter().all(|&o| o != c));
            let chain = match free {
                Some((_, chain)) => chain,
                None if i == 0 => chain,
                None => {
                    if spare == branches.len() {
                        branches.push(queue.chain());
                    }
                    spare += 1;
                    branches[spare - 1]
                }
            };
            let behind: Vec<Point> = match earlier.is_empty() {
                true => start.clone(),
                false => earlier.iter().map(|&e| points[e].clone()).collect(),
            };
            points.push(queue.push(task.clone(), &name, chain, &behind));
            chains.push(chain);
        }
        drop(queue);
        start.extend(points);
        Ok(self.push(world, id, Arc::new(Task::marker("the end of a graph", &context)), &start))
    }

    /// As it is called in reports.
    fn name(&self, id: LaneId) -> String {
        match self.lanes.get(&id) {
            Some(lane) if lane.kind == Kind::Legacy => {
                format!(" on the default stream of device {}", lane.context.ordinal)
            }
            Some(lane) => format!(" on stream {id} of device {}", lane.context.ordinal),
            None => String::new(),
        }
    }
}
