//! Capturing streams into a graph: work becomes nodes, events carry the capture from stream to stream.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

use crate::graph::{Capture, CaptureMode, Graph, GraphMemory, Joined};
use crate::queue::Task;
use crate::status::{Result, Status};
use crate::streams::{StreamId, StreamKind, Streams, streams};

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

/// Sets which calls captures forbid this thread, and gives what was set before.
pub(crate) fn exchange_mode(mode: CaptureMode) -> CaptureMode {
    MODE.replace(mode)
}

impl Streams {
    /// Begins the capture of a stream.
    pub(crate) fn begin_capture(&mut self, id: StreamId, mode: CaptureMode) -> Result<()> {
        let found = self.get(id)?;
        if found.kind == StreamKind::Legacy {
            return Err(Status::CAPTURE_UNSUPPORTED.because("the legacy default stream cannot be captured"));
        }
        if found.capture.is_some() {
            return Err(Status::ILLEGAL_STATE.because("the stream is being captured already"));
        }
        let memory = GraphMemory::new(found.context.clone());
        self.last_capture += 1;
        let capture = self.last_capture;
        self.get(id)?.capture = Some(Joined { capture, ends: Vec::new() });
        let (nodes, thread) = (Vec::new(), thread::current().id());
        self.captures.insert(capture, Capture { mode, thread, origin: id, nodes, memory, broken: false });
        Ok(())
    }

    /// A stream waits for an event that was recorded in a capture: it joins it.
    pub(crate) fn join_capture(&mut self, id: StreamId, other: &Joined) -> Result<()> {
        if !self.captures.contains_key(&other.capture) {
            return Err(
                Status::CAPTURED_EVENT.because("the capture that the event was recorded in has ended")
            );
        }
        let found = self.get(id)?;
        if found.kind == StreamKind::Legacy {
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

    /// Ends the capture that began on a stream.
    pub(crate) fn end_capture(&mut self, id: StreamId) -> Result<Graph> {
        let Some(joined) = self.get(id)?.capture.clone() else {
            return Err(Status::ILLEGAL_STATE.because("the stream is not being captured"));
        };
        let Some(capture) = self.captures.get_mut(&joined.capture) else {
            return Err(Status::CAPTURE_INVALIDATED.into());
        };
        if capture.origin != id {
            capture.broken = true;
            return Err(Status::CAPTURE_UNMATCHED.into());
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != thread::current().id() {
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
    let mut streams = streams();
    let forbids = |c: &Capture| match mode {
        CaptureMode::Relaxed => false,
        CaptureMode::ThreadLocal => c.thread == thread && c.mode != CaptureMode::Relaxed,
        CaptureMode::Global => {
            c.mode == CaptureMode::Global || c.thread == thread && c.mode != CaptureMode::Relaxed
        }
    };
    let Some(capture) = streams.captures.values_mut().find(|c| forbids(c)) else { return Ok(()) };
    capture.broken = true;
    Err(Status::CAPTURE_UNSUPPORTED
        .because(format!("{call} is not allowed while a stream is being captured")))
}

/// 0: the stream is not captured, 1: it is, 2: its capture gives no graph any more.
pub(crate) fn capture_status(streams: &mut Streams, id: StreamId) -> Result<i32> {
    streams.check_implicit(id)?;
    Ok(streams.capture_of(id)?.map_or(0, |capture| if capture.broken { 2 } else { 1 }))
}
