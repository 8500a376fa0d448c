//! Events: places in the order of a stream's work that others wait for.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use phalanx_emulator_link::pointer::Out;

use crate::capture::Joined;
use crate::context::{Context, here};
use crate::queue::Point;
use crate::status::{Result, Status};
use crate::task::{Progress, Task};
use crate::world::world;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    timed: bool,
    state: Mutex<State>,
}

/// What it was recorded behind.
#[derive(Debug, Clone, Default)]
enum State {
    #[default]
    Nothing,
    Work(Point, Arc<OnceLock<Instant>>),
    Captured(Joined),
}

impl Event {
    fn state(&self) -> State {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// The work that it was recorded behind, if any.
    fn work(&self) -> Result<Option<Point>> {
        match self.state() {
            State::Nothing => Ok(None),
            State::Work(point, _) => Ok(Some(point)),
            State::Captured(joined) => {
                world()?.lanes().invalidate(joined.capture);
                Err(Status::CAPTURED_EVENT
                    .because("the event was last recorded in a stream that was captured"))
            }
        }
    }

    fn time(&self) -> Result<Instant> {
        match self.state() {
            State::Work(point, time) if world()?.executor.query(&point) => {
                time.get().copied().ok_or(Status::NOT_READY.into())
            }
            State::Work(..) => Err(Status::NOT_READY.into()),
            State::Nothing => Err(Status::INVALID_HANDLE.because("the event was never recorded")),
            State::Captured(_) => Err(Status::CAPTURED_EVENT.into()),
        }
    }
}

fn record(handle: usize, stream: usize) -> Result<()> {
    let world = world()?;
    let event = world.events.get(handle)?;
    let mut lanes = world.lanes();
    let lane = lanes.find(stream)?;
    let found = lanes.lane(lane)?;
    if found.context.ordinal != event.context.ordinal {
        return Err(Status::INVALID_HANDLE.because("the event and the stream are of different devices"));
    }
    if let Some(joined) = found.capture.clone() {
        event.set(State::Captured(joined));
        return Ok(());
    }
    let time = Arc::new(OnceLock::new());
    let (context, passed) = (found.context.clone(), time.clone());
    let run = move |_| {
        passed.get_or_init(Instant::now);
        Progress::Done(Vec::new())
    };
    let point = lanes.enqueue(world, lane, Arc::new(Task::new("an event", &context, run)))?;
    event.set(State::Work(point, time));
    drop(lanes);
    world.executor.added();
    Ok(())
}

fn wait(stream: usize, handle: usize) -> Result<()> {
    let world = world()?;
    let event = world.events.get(handle)?;
    let mut lanes = world.lanes();
    let lane = lanes.find(stream)?;
    match event.state() {
        State::Nothing => Ok(()),
        State::Captured(joined) => lanes.join_capture(lane, &joined),
        State::Work(point, _) => {
            if let Some(joined) = lanes.lane(lane)?.capture.clone() {
                lanes.invalidate(joined.capture);
                return Err(
                    Status::CAPTURE_ISOLATION.because("the event was recorded outside of the capture")
                );
            }
            let context = lanes.lane(lane)?.context.clone();
            lanes.wait_for(world, lane, Arc::new(Task::marker("a wait for an event", &context)), point);
            drop(lanes);
            world.executor.added();
            Ok(())
        }
    }
}

fn elapsed(milliseconds: Out<f32>, start: usize, end: usize) -> Result<()> {
    let world = world()?;
    let (start, end) = (world.events.get(start)?, world.events.get(end)?);
    if !(start.timed && end.timed) {
        return Err(Status::INVALID_HANDLE.because("an event was made without timing"));
    }
    let (start, end) = (start.time()?, end.time()?);
    let forwards = end.saturating_duration_since(start).as_secs_f32();
    set!(milliseconds, (forwards - start.saturating_duration_since(end).as_secs_f32()) * 1e3)
}

export! {
    fn cuEventCreate(out: Out<usize>, flags: u32) {
        if flags > 7 {
            return Err(Status::INVALID_VALUE.because(format!("event flags {flags:#x}")));
        }
        let (context, timed) = (here()?, flags & DISABLE_TIMING == 0);
        set!(out, world()?.events.add(Arc::new(Event { context, timed, state: Mutex::default() })))
    }
    fn cuEventDestroy_v2(event: usize) { world()?.events.remove(event).map(|_| ()) }
    fn cuEventRecord(event: usize, stream: usize) { record(event, stream) }
    fn cuEventRecordWithFlags(event: usize, stream: usize, flags: u32) {
        if flags != 0 {
            return Err(Status::NOT_SUPPORTED.because("events outside of a graph are not emulated as its nodes"));
        }
        record(event, stream)
    }
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32) {
        if flags != 0 {
            return Err(Status::NOT_SUPPORTED.because("events outside of a graph are not emulated as its nodes"));
        }
        wait(stream, event)
    }
    fn cuEventQuery(event: usize) {
        let event = world()?.events.get(event)?;
        let passed = event.work()?.is_none_or(|point| event.context.world().executor.query(&point));
        if let Some(status) = event.context.lost() {
            return Err(status.into());
        }
        if passed { Ok(()) } else { Err(Status::NOT_READY.into()) }
    }
    fn cuEventSynchronize(event: usize) {
        let event = world()?.events.get(event)?;
        if let Some(point) = event.work()? {
            event.context.world().executor.wait(&point);
        }
        event.context.lost().map_or(Ok(()), |status| Err(status.into()))
    }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) { elapsed(milliseconds, start, end) }
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) { elapsed(milliseconds, start, end) }
}
