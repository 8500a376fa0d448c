//! Events: places in the order of a stream's work that others wait for.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::lock;

use crate::context::{Context, here};
use crate::executor::executor;
use crate::graph::Joined;
use crate::queue::{Point, Progress, Task};
use crate::status::{Result, Status};
use crate::streams::streams;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub context: Arc<Context>,
    timed: bool,
    recording: Mutex<Recording>,
}

/// What it was recorded behind.
#[derive(Debug, Clone, Default)]
enum Recording {
    #[default]
    Nothing,
    Work(Point, Arc<OnceLock<Instant>>),
    Captured(Joined),
}

/// All events.
pub(crate) static EVENTS: Handles<Arc<Event>> = Handles::new("event", 3);

impl Event {
    /// An event of the current context.
    pub(crate) fn new(timed: bool) -> Result<Event> {
        Ok(Event { context: here()?, timed, recording: Mutex::default() })
    }

    fn recording(&self) -> Recording {
        lock(&self.recording).clone()
    }

    fn set(&self, recording: Recording) {
        *lock(&self.recording) = recording;
    }

    /// The work that it was recorded behind, if any.
    pub(crate) fn work(&self) -> Result<Option<Point>> {
        match self.recording() {
            Recording::Nothing => Ok(None),
            Recording::Work(point, _) => Ok(Some(point)),
            Recording::Captured(joined) => {
                streams().invalidate(joined.capture);
                Err(Status::CAPTURED_EVENT
                    .because("the event was last recorded in a stream that was captured"))
            }
        }
    }

    fn time(&self) -> Result<Instant> {
        match self.recording() {
            Recording::Work(point, time) if executor().query(&point) => {
                time.get().copied().ok_or(Status::NOT_READY.into())
            }
            Recording::Work(..) => Err(Status::NOT_READY.into()),
            Recording::Nothing => Err(Status::INVALID_HANDLE.because("the event was never recorded")),
            Recording::Captured(_) => Err(Status::CAPTURED_EVENT.into()),
        }
    }
}

/// Records an event behind what is queued on a stream.
pub(crate) fn record(handle: usize, stream: usize) -> Result<()> {
    let event = EVENTS.get(handle)?;
    let mut streams = streams();
    let id = streams.find(stream)?;
    let found = streams.get(id)?;
    if found.context.ordinal != event.context.ordinal {
        return Err(Status::INVALID_HANDLE.because("the event and the stream are of different devices"));
    }
    if let Some(joined) = found.capture.clone() {
        event.set(Recording::Captured(joined));
        return Ok(());
    }
    let time = Arc::new(OnceLock::new());
    let (context, passed) = (found.context.clone(), time.clone());
    let run = move |_| {
        passed.get_or_init(Instant::now);
        Progress::Done(Vec::new())
    };
    let point = streams.enqueue(id, Arc::new(Task::new("an event", &context, run)))?;
    event.set(Recording::Work(point, time));
    drop(streams);
    executor().added();
    Ok(())
}

/// Lets what is queued on a stream from now on wait for an event.
pub(crate) fn wait(stream: usize, handle: usize) -> Result<()> {
    let event = EVENTS.get(handle)?;
    let mut streams = streams();
    let id = streams.find(stream)?;
    match event.recording() {
        Recording::Nothing => Ok(()),
        Recording::Captured(joined) => streams.join_capture(id, &joined),
        Recording::Work(point, _) => {
            if let Some(joined) = streams.get(id)?.capture.clone() {
                streams.invalidate(joined.capture);
                return Err(
                    Status::CAPTURE_ISOLATION.because("the event was recorded outside of the capture")
                );
            }
            let context = streams.get(id)?.context.clone();
            streams.wait_for(id, Arc::new(Task::marker("a wait for an event", &context)), point);
            drop(streams);
            executor().added();
            Ok(())
        }
    }
}

/// Milliseconds between two events.
pub(crate) fn elapsed(start: usize, end: usize) -> Result<f32> {
    let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
    if !(start.timed && end.timed) {
        return Err(Status::INVALID_HANDLE.because("an event was made without timing"));
    }
    let (start, end) = (start.time()?, end.time()?);
    let forwards = end.saturating_duration_since(start).as_secs_f32();
    Ok((forwards - start.saturating_duration_since(end).as_secs_f32()) * 1e3)
}
