//! The streams: the last operation of each, how they are ordered among each other, and the graph that each is captured
//! into.
//!
//! A stream has its last operation, or, while it is captured, the nodes at its end. The legacy default stream of a
//! context comes behind everything in the context's blocking streams, and they behind it; per-thread default streams
//! are blocking ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use phalanx_emulator_link::lock;

use crate::context::{Context, here};
use crate::executor::executor;
use crate::graph::{Capture, Joined};
use crate::queue::{OF_A_GRAPH, Point, Task};
use crate::status::{Result, Status};

/// The legacy default stream.
const LEGACY: usize = 1;
/// The default stream of each thread.
const PER_THREAD: usize = 2;
/// The upper half of stream handles.
const BASE: usize = 2 << 40;

/// Larger numbers are less urgent.
pub(crate) const PRIORITY_LEAST: i32 = 0;
/// See [`PRIORITY_LEAST`].
pub(crate) const PRIORITY_GREATEST: i32 = -5;

/// A stream's number.
pub(crate) type StreamId = u64;

/// How a stream is ordered with the legacy default stream of its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamKind {
    Legacy,
    Blocking,
    NonBlocking,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub context: Arc<Context>,
    pub kind: StreamKind,
    pub priority: i32,
    chain: u64,
    pub tail: Point,
    pub capture: Option<Joined>,
    thread: Option<ThreadId>,
    destroyed: bool,
}

/// All streams, and what they are captured into.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: BTreeMap<StreamId, Stream>,
    last: StreamId,
    pub captures: BTreeMap<u64, Capture>,
    pub last_capture: u64,
}

static STREAMS: Mutex<Streams> =
    Mutex::new(Streams { streams: BTreeMap::new(), last: 0, captures: BTreeMap::new(), last_capture: 0 });

/// The streams of this process, locked. The queue's lock may be taken while this one is held, not the other way round.
pub(crate) fn streams() -> MutexGuard<'static, Streams> {
    lock(&STREAMS)
}

impl Streams {
    /// A new stream.
    pub(crate) fn add(&mut self, context: &Arc<Context>, kind: StreamKind, priority: i32) -> StreamId {
        self.last += 1;
        let chain = executor().queue().chain();
        let (context, tail) = (context.clone(), Point::default());
        let stream =
            Stream { context, kind, priority, chain, tail, capture: None, thread: None, destroyed: false };
        self.streams.insert(self.last, stream);
        self.last
    }

    /// What C knows a stream by.
    pub(crate) fn handle(stream: StreamId) -> usize {
        BASE + stream as usize * 16
    }

    /// The stream of a handle; default streams are those of the current context.
    pub(crate) fn find(&mut self, handle: usize) -> Result<StreamId> {
        match handle {
            0 | LEGACY => Ok(self.default_stream(&here()?, StreamKind::Legacy, None)),
            PER_THREAD => {
                Ok(self.default_stream(&here()?, StreamKind::Blocking, Some(thread::current().id())))
            }
            _ => {
                let stream = handle.wrapping_sub(BASE) as u64 / 16;
                let living = self
                    .streams
                    .get(&stream)
                    .is_some_and(|l| !l.destroyed && Streams::handle(stream) == handle);
                let unknown = || Status::INVALID_HANDLE.because(format!("{handle:#x} is no living stream"));
                living.then_some(stream).ok_or_else(unknown)
            }
        }
    }

    fn default_stream(
        &mut self,
        context: &Arc<Context>,
        kind: StreamKind,
        thread: Option<ThreadId>,
    ) -> StreamId {
        let is_it = |l: &Stream| {
            l.context.id == context.id
                && l.thread == thread
                && (kind == StreamKind::Legacy) == (l.kind == StreamKind::Legacy)
        };
        if kind == StreamKind::Legacy || thread.is_some() {
            let found = self.streams.iter().find(|(_, stream)| is_it(stream)).map(|(id, _)| *id);
            if let Some(found) = found {
                return found;
            }
        }
        let stream = self.add(context, kind, 0);
        if let Some(new) = self.streams.get_mut(&stream) {
            new.thread = thread;
        }
        stream
    }

    /// A stream that `find` or `add` gave.
    pub(crate) fn get(&mut self, id: StreamId) -> Result<&mut Stream> {
        self.streams.get_mut(&id).ok_or_else(|| Status::INVALID_HANDLE.because("the stream was destroyed"))
    }

    /// All streams.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.streams.iter().map(|(id, stream)| (*id, stream))
    }

    /// All streams, to change them.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.streams.values_mut()
    }

    /// The stream's handle is no longer valid. What is queued on it still runs, and the legacy stream still waits for
    /// it.
    pub(crate) fn destroy(&mut self, id: StreamId) -> Result<()> {
        let stream = self.get(id)?;
        stream.destroyed = true;
        let mut queue = executor().queue();
        queue.retire(stream.chain);
        self.streams.retain(|_, stream| !(stream.destroyed && queue.passed(&stream.tail)));
        Ok(())
    }

    /// Removes a context's streams.
    pub(crate) fn forget(&mut self, context: u64) {
        let mut queue = executor().queue();
        let gone = self.streams.values().filter(|stream| stream.context.id == context && !stream.destroyed);
        gone.for_each(|stream| queue.retire(stream.chain));
        self.streams.retain(|_, stream| stream.context.id != context);
    }

    /// The operations behind which new work of the stream comes.
    pub(crate) fn before(&self, id: StreamId) -> Vec<Point> {
        let Some(stream) = self.streams.get(&id) else { return Vec::new() };
        let others = self.streams.values().filter(|other| other.context.id == stream.context.id);
        let ordered = others.filter(|other| match stream.kind {
            StreamKind::NonBlocking => false,
            StreamKind::Blocking => other.kind == StreamKind::Legacy,
            StreamKind::Legacy => other.kind == StreamKind::Blocking,
        });
        std::iter::once(&stream.tail).chain(ordered.map(|other| &other.tail)).cloned().collect()
    }

    /// Queues a task on a stream, or makes it a node of what the stream is captured into.
    pub(crate) fn enqueue(&mut self, id: StreamId, task: Arc<Task>) -> Result<Point> {
        if self.get(id)?.capture.is_some() {
            self.capture_task(id, task)?;
            return Ok(Point::default());
        }
        self.check_implicit(id)?;
        let before = self.before(id);
        Ok(self.push(id, task, &before))
    }

    /// The stream's next work comes behind `point` too.
    pub(crate) fn wait_for(&mut self, id: StreamId, marker: Arc<Task>, point: Point) {
        let mut before = self.before(id);
        before.push(point);
        self.push(id, marker, &before);
    }

    fn push(&mut self, id: StreamId, task: Arc<Task>, before: &[Point]) -> Point {
        let name = self.name(id);
        let Some(stream) = self.streams.get_mut(&id) else { return Point::default() };
        stream.tail = executor().queue().push(task, &name, stream.chain, before);
        stream.tail.clone()
    }

    /// Queues the nodes of a graph behind everything in the stream and behind `before`, and the stream's next work
    /// behind them. A node is a task and the nodes before it, which come earlier in the list. `branches` are chains
    /// for the graph's branches, to be used again at its next launch.
    pub(crate) fn enqueue_graph(
        &mut self,
        id: StreamId,
        nodes: &[(Arc<Task>, Vec<usize>)],
        before: &Point,
        branches: &mut Vec<u64>,
    ) -> Result<Point> {
        self.check_implicit(id)?;
        let mut start = self.before(id);
        start.push(before.clone());
        let name = format!("{OF_A_GRAPH}{}", self.name(id));
        let (context, chain) = (self.get(id)?.context.clone(), self.get(id)?.chain);
        let mut points: Vec<Point> = Vec::with_capacity(nodes.len());
        let mut chains: Vec<u64> = Vec::with_capacity(nodes.len());
        let mut queue = executor().queue();
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
        Ok(self.push(id, Arc::new(Task::marker("the end of a graph", &context)), &start))
    }

    /// As it is called in reports.
    fn name(&self, id: StreamId) -> String {
        match self.streams.get(&id) {
            Some(stream) if stream.kind == StreamKind::Legacy => {
                format!(" on the default stream of device {}", stream.context.ordinal)
            }
            Some(stream) => format!(" on stream {id} of device {}", stream.context.ordinal),
            None => String::new(),
        }
    }

    /// The capture that a stream is part of.
    pub(crate) fn capture_of(&mut self, id: StreamId) -> Result<Option<&mut Capture>> {
        let joined = self.get(id)?.capture.clone();
        Ok(joined.and_then(|joined| self.captures.get_mut(&joined.capture)))
    }

    /// Makes a task the node behind the ends of the stream.
    pub(crate) fn capture_task(&mut self, id: StreamId, task: Arc<Task>) -> Result<()> {
        let ends = self.get(id)?.capture.as_ref().map_or(Vec::new(), |joined| joined.ends.clone());
        let Some(capture) = self.capture_of(id)? else { return Ok(()) };
        if capture.broken {
            return Err(Status::CAPTURE_INVALIDATED.into());
        }
        capture.nodes.push((task, ends));
        let node = capture.nodes.len() - 1;
        if let Some(joined) = &mut self.get(id)?.capture {
            joined.ends = vec![node];
        }
        Ok(())
    }

    /// The capture will give no graph.
    pub(crate) fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.broken = true;
        }
    }

    /// Work of the legacy default stream while a blocking stream of its context is captured is an error.
    pub(crate) fn check_implicit(&mut self, id: StreamId) -> Result<()> {
        let (kind, context) = (self.get(id)?.kind, self.get(id)?.context.id);
        if kind != StreamKind::Legacy {
            return Ok(());
        }
        let blocking = |l: &Stream| l.context.id == context && l.kind == StreamKind::Blocking;
        let captured =
            self.iter().find_map(|(_, l)| l.capture.as_ref().filter(|_| blocking(l)).map(|j| j.capture));
        let Some(capture) = captured else { return Ok(()) };
        self.invalidate(capture);
        Err(Status::CAPTURE_IMPLICIT
            .because("a stream that is ordered with the default stream is being captured"))
    }
}

/// Queues a task on a stream and lets it run.
pub(crate) fn submit(stream: usize, task: Task) -> Result<Point> {
    let mut streams = streams();
    let id = streams.find(stream)?;
    // What goes wrong with it is the stream's context's, whichever is current.
    let task = Task { context: streams.get(id)?.context.clone(), ..task };
    let point = streams.enqueue(id, Arc::new(task))?;
    drop(streams);
    executor().added();
    Ok(point)
}

/// As [`submit`], and waits until it has run; for calls that are done when they return.
pub(crate) fn submit_and_wait(task: Task) -> Result<()> {
    let context = task.context.clone();
    let point = submit(0, task)?;
    executor().wait(&point);
    context.check()
}

/// Whether work on a stream becomes nodes of a graph.
pub(crate) fn is_captured(stream: usize) -> Result<bool> {
    let mut streams = streams();
    let id = streams.find(stream)?;
    Ok(streams.get(id)?.capture.is_some())
}

/// The context that a stream belongs to.
pub(crate) fn context_of(stream: usize) -> Result<Arc<Context>> {
    let mut streams = streams();
    let id = streams.find(stream)?;
    Ok(streams.get(id)?.context.clone())
}

/// Waits for everything that is queued in a context.
pub(crate) fn synchronize_all(context: u64) {
    let tails: Vec<Point> = streams()
        .iter()
        .filter(|(_, stream)| stream.context.id == context)
        .map(|(_, l)| l.tail.clone())
        .collect();
    let rest = executor().queue().of_context(context);
    tails.iter().chain(&rest).for_each(|point| executor().wait(point));
}

/// Ends a context: runs the operations that are queued in it, then frees everything that belongs to it.
pub(crate) fn end_context(context: &Context) {
    synchronize_all(context.id);
    streams().forget(context.id);
}
