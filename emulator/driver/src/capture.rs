//! Capturing streams into a graph: work becomes nodes, events carry the capture from stream to stream.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use phalanx_emulator_link::pointer::Out;

use crate::graph::Graph;
use crate::graph_memory::GraphMemory;
use crate::lanes::{Kind, LaneId, Lanes};
use crate::status::{Result, Status, present};
use crate::task::Task;
use crate::world::world;

/// Which calls of which threads a capture forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    fn from_number(mode: i32) -> Result<Mode> {
        let known = [Mode::Global, Mode::ThreadLocal, Mode::Relaxed];
        let found = usize::try_from(mode).ok().and_then(|i| known.get(i)).copied();
        found.ok_or_else(|| Status::INVALID_VALUE.because(format!("capture mode {mode}")))
    }
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// A graph that is being captured.
#[derive(Debug)]
pub(crate) struct Capture {
    mode: Mode,
    thread: ThreadId,
    origin: LaneId,
    nodes: Vec<(Arc<Task>, Vec<usize>)>,
    pub memory: GraphMemory,
    broken: bool,
}

/// A stream's part in a capture: the nodes that its next one comes behind.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    pub capture: u64,
    pub ends: Vec<usize>,
}

impl Lanes {
    fn begin_capture(&mut self, lane: LaneId, mode: Mode) -> Result<()> {
        let found = self.lane(lane)?;
        if found.kind == Kind::Legacy {
            return Err(Status::CAPTURE_UNSUPPORTED.because("the legacy default stream cannot be captured"));
        }
        if found.capture.is_some() {
            return Err(Status::ILLEGAL_STATE.because("the stream is being captured already"));
        }
        let memory = GraphMemory::new(found.context.clone());
        self.last_capture += 1;
        let id = self.last_capture;
        self.lane(lane)?.capture = Some(Joined { capture: id, ends: Vec::new() });
        let (nodes, thread) = (Vec::new(), thread::current().id());
        self.captures.insert(id, Capture { mode, thread, origin: lane, nodes, memory, broken: false });
        Ok(())
    }

    /// The capture that a lane is part of.
    pub(crate) fn capture_of(&mut self, lane: LaneId) -> Result<Option<&mut Capture>> {
        let joined = self.lane(lane)?.capture.clone();
        Ok(joined.and_then(|joined| self.captures.get_mut(&joined.capture)))
    }

    /// Makes a task the node behind the lane's ends.
    pub(crate) fn capture_task(&mut self, lane: LaneId, task: Arc<Task>) -> Result<()> {
        let ends = self.lane(lane)?.capture.as_ref().map_or(Vec::new(), |joined| joined.ends.clone());
        let Some(capture) = self.capture_of(lane)? else { return Ok(()) };
        if capture.broken {
            return Err(Status::CAPTURE_INVALIDATED.into());
        }
        capture.nodes.push((task, ends));
        let node = capture.nodes.len() - 1;
        if let Some(joined) = &mut self.lane(lane)?.capture {
            joined.ends = vec![node];
        }
        Ok(())
    }

    /// A lane waits for an event that was recorded in a capture: it joins it.
    pub(crate) fn join_capture(&mut self, lane: LaneId, other: &Joined) -> Result<()> {
        if !self.captures.contains_key(&other.capture) {
            return Err(
                Status::CAPTURED_EVENT.because("the capture that the event was recorded in has ended")
            );
        }
        let found = self.lane(lane)?;
        if found.kind == Kind::Legacy {
            self.invalidate(other.capture);
            return Err(Status::CAPTURE_IMPLICIT.because("the legacy default stream cannot join a capture"));
        }
        match &mut found.capture {
            None => found.capture = Some(other.clone()),
            Some(own) if own.capture == other.capture => {
                let ends: BTreeSet<usize> = own.ends.iter().chain(&other.ends).copied().collect();
                own.ends = ends.into_iter().collect();
            }
            Some(own) => {
                let own = own.capture;
                self.invalidate(own);
                self.invalidate(other.capture);
                return Err(Status::CAPTURE_MERGE.into());
            }
        }
        Ok(())
    }

    /// The capture gives no graph any more.
    pub(crate) fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.broken = true;
        }
    }

    /// Work of the legacy default stream while a blocking stream of its context is captured is an error.
    pub(crate) fn check_implicit(&mut self, lane: LaneId) -> Result<()> {
        let (kind, context) = (self.lane(lane)?.kind, self.lane(lane)?.context.id);
        if kind != Kind::Legacy {
            return Ok(());
        }
        let blocking = |l: &crate::lanes::Lane| l.context.id == context && l.kind == Kind::Blocking;
        let captured =
            self.iter().find_map(|(_, l)| l.capture.as_ref().filter(|_| blocking(l)).map(|j| j.capture));
        let Some(capture) = captured else { return Ok(()) };
        self.invalidate(capture);
        Err(Status::CAPTURE_IMPLICIT
            .because("a stream that is ordered with the default stream is being captured"))
    }

    fn end_capture(&mut self, lane: LaneId) -> Result<Graph> {
        let Some(joined) = self.lane(lane)?.capture.clone() else {
            return Err(Status::ILLEGAL_STATE.because("the stream is not being captured"));
        };
        let Some(capture) = self.captures.get_mut(&joined.capture) else {
            return Err(Status::CAPTURE_INVALIDATED.into());
        };
        if capture.origin != lane {
            capture.broken = true;
            return Err(Status::CAPTURE_UNMATCHED.into());
        }
        if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
            return Err(Status::CAPTURE_WRONG_THREAD.into());
        }
        let ended = self.captures.remove(&joined.capture);
        for other in
            self.iter_mut().filter(|l| l.capture.as_ref().is_some_and(|j| j.capture == joined.capture))
        {
            other.capture = None;
        }
        let ended = ended.filter(|capture| !capture.broken).ok_or(Status::CAPTURE_INVALIDATED)?;
        let reached = reached(&ended.nodes, &joined.ends);
        let lost = ended.nodes.iter().enumerate().find(|(i, _)| !reached.contains(i));
        match lost {
            Some((_, (task, _))) => Err(Status::CAPTURE_UNJOINED
                .because(format!("{task:?} is on a stream that the captured one does not wait for"))),
            None => Ok(Graph::new(ended.nodes, ended.memory)),
        }
    }
}

fn reached(nodes: &[(Arc<Task>, Vec<usize>)], ends: &[usize]) -> BTreeSet<usize> {
    let (mut reached, mut waiting) = (BTreeSet::new(), ends.to_vec());
    while let Some(node) = waiting.pop() {
        if reached.insert(node) {
            waiting.extend(&nodes[node].1);
        }
    }
    reached
}

/// Refuses a call that could reach into work that is being captured, and breaks that capture.
pub(crate) fn forbidden(call: &str) -> Result<()> {
    let (mode, thread) = (MODE.get(), thread::current().id());
    let mut lanes = world()?.lanes();
    let forbids = |c: &Capture| match mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => c.thread == thread && c.mode != Mode::Relaxed,
        Mode::Global => c.mode == Mode::Global || c.thread == thread && c.mode != Mode::Relaxed,
    };
    let Some(capture) = lanes.captures.values_mut().find(|c| forbids(c)) else { return Ok(()) };
    capture.broken = true;
    Err(Status::CAPTURE_UNSUPPORTED
        .because(format!("{call} is not allowed while a stream is being captured")))
}

fn capture_status(lanes: &mut Lanes, lane: LaneId) -> Result<i32> {
    lanes.check_implicit(lane)?;
    Ok(lanes.capture_of(lane)?.map_or(0, |capture| if capture.broken { 2 } else { 1 }))
}

fn capture_info(stream: usize, status: Out<i32>, id: Out<u64>) -> Result<()> {
    let mut lanes = world()?.lanes();
    let lane = lanes.find(stream)?;
    let found = capture_status(&mut lanes, lane)?;
    set!(status, found)?;
    let number = lanes.lane(lane)?.capture.as_ref().map_or(0, |joined| joined.capture);
    if id.is_null() { Ok(()) } else { set!(id, number) }
}

export! {
    fn cuStreamBeginCapture_v2(stream: usize, mode: i32) {
        let mut lanes = world()?.lanes();
        let lane = lanes.find(stream)?;
        lanes.begin_capture(lane, Mode::from_number(mode)?)
    }
    fn cuStreamEndCapture(stream: usize, graph: Out<usize>) {
        let world = world()?;
        set!(graph, 0)?;
        let mut lanes = world.lanes();
        let lane = lanes.find(stream)?;
        let captured = lanes.end_capture(lane)?;
        set!(graph, world.graphs.add(Arc::new(captured)))
    }
    fn cuStreamIsCapturing(stream: usize, status: Out<i32>) {
        let mut lanes = world()?.lanes();
        let lane = lanes.find(stream)?;
        let found = capture_status(&mut lanes, lane)?;
        set!(status, found)
    }
    fn cuStreamGetCaptureInfo(stream: usize, status: Out<i32>, id: Out<u64>) { capture_info(stream, status, id) }
    fn cuStreamGetCaptureInfo_v2(
        stream: usize, status: Out<i32>, id: Out<u64>, graph: Out<usize>, nodes: Out<usize>, count: Out<usize>,
    ) {
        if !(graph.is_null() && nodes.is_null() && count.is_null()) {
            return Err(Status::NOT_SUPPORTED.because("a graph cannot be looked at while it is captured"));
        }
        capture_info(stream, status, id)
    }
    fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) {
        let wanted = Mode::from_number(present(mode.get(), "mode")?)?;
        set!(mode, MODE.replace(wanted) as i32)
    }
}
