//! Streams: making them, waiting for them, and host functions on them.

use std::sync::Arc;

use phalanx_emulator_link::pointer::{Host, Out};

use crate::call::as_host_function;
use crate::capture::forbidden;
use crate::context::{Context, here};
use crate::lanes::{Kind, Lanes};
use crate::queue::Point;
use crate::status::{Result, Status};
use crate::task::{Progress, Task};
use crate::world::{World, world};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// Larger numbers are less urgent.
pub(crate) const PRIORITY_LEAST: i32 = 0;
/// See [`PRIORITY_LEAST`].
pub(crate) const PRIORITY_GREATEST: i32 = -5;

/// Queues a task on a stream and lets it run.
pub(crate) fn submit(stream: usize, task: Task) -> Result<Point> {
    let world = world()?;
    let mut lanes = world.lanes();
    let lane = lanes.find(stream)?;
    // What goes wrong with it is the stream's context's, whichever is current.
    let task = Task { context: lanes.lane(lane)?.context.clone(), ..task };
    let point = lanes.enqueue(world, lane, Arc::new(task))?;
    drop(lanes);
    world.executor.added();
    Ok(point)
}

/// As [`submit`], and waits until it has run; for calls that are done when they return.
pub(crate) fn submit_and_wait(call: &str, task: Task) -> Result<()> {
    forbidden(call)?;
    let context = task.context.clone();
    let point = submit(0, task)?;
    world()?.executor.wait(&point);
    context.lost().map_or(Ok(()), |status| Err(status.into()))
}

/// Whether work on a stream becomes nodes of a graph.
pub(crate) fn is_captured(stream: usize) -> Result<bool> {
    let mut lanes = world()?.lanes();
    let lane = lanes.find(stream)?;
    Ok(lanes.lane(lane)?.capture.is_some())
}

/// The context that a stream belongs to.
pub(crate) fn context_of(stream: usize) -> Result<Arc<Context>> {
    let mut lanes = world()?.lanes();
    let lane = lanes.find(stream)?;
    Ok(lanes.lane(lane)?.context.clone())
}

/// Waits for everything that is queued in a context.
pub(crate) fn synchronize_all(world: &World, context: u64) {
    let tails: Vec<Point> = world
        .lanes()
        .iter()
        .filter(|(_, lane)| lane.context.id == context)
        .map(|(_, l)| l.tail.clone())
        .collect();
    let rest = world.executor.queue().of_context(context);
    tails.iter().chain(&rest).for_each(|point| world.executor.wait(point));
}

fn synchronize(stream: usize) -> Result<()> {
    let world = world()?;
    let (tail, context) = tail(stream)?;
    tail.iter().for_each(|point| world.executor.wait(point));
    context.lost().map_or(Ok(()), |status| Err(status.into()))
}

/// What has to have run for a stream to be idle.
fn tail(stream: usize) -> Result<(Vec<Point>, Arc<Context>)> {
    let mut lanes = world()?.lanes();
    let lane = lanes.find(stream)?;
    if let Some(joined) = lanes.lane(lane)?.capture.clone() {
        lanes.invalidate(joined.capture);
        return Err(
            Status::CAPTURE_UNSUPPORTED.because("a stream that is being captured cannot be waited for")
        );
    }
    lanes.check_implicit(lane)?;
    let found = lanes.lane(lane)?;
    let (context, is_legacy, own) = (found.context.clone(), found.kind == Kind::Legacy, found.tail.clone());
    Ok((if is_legacy { lanes.before(lane) } else { vec![own] }, context))
}

fn create(out: Out<usize>, flags: u32, priority: i32) -> Result<()> {
    if flags > NON_BLOCKING {
        return Err(Status::INVALID_VALUE.because(format!("stream flags {flags:#x}")));
    }
    let context = here()?;
    let kind = if flags == NON_BLOCKING { Kind::NonBlocking } else { Kind::Blocking };
    let priority = priority.clamp(PRIORITY_GREATEST, PRIORITY_LEAST);
    let lane = context.world().lanes().add(&context, kind, priority);
    set!(out, Lanes::handle(lane))
}

/// A C function that a stream calls.
type HostFunction = extern "C" fn(Host);
/// As [`HostFunction`], with the stream and a status before the data.
type Callback = extern "C" fn(usize, i32, Host);

export! {
    fn cuStreamCreate(out: Out<usize>, flags: u32) { create(out, flags, 0) }
    fn cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: i32) { create(out, flags, priority) }
    fn cuStreamDestroy_v2(stream: usize) {
        let world = world()?;
        let mut lanes = world.lanes();
        let lane = lanes.find(stream)?;
        if lanes.lane(lane)?.kind == Kind::Legacy {
            return Err(Status::INVALID_HANDLE.because("the default stream cannot be destroyed"));
        }
        if let Some(joined) = lanes.lane(lane)?.capture.take() {
            lanes.invalidate(joined.capture);
        }
        lanes.destroy(lane, world)
    }
    fn cuStreamSynchronize(stream: usize) { synchronize(stream) }
    fn cuStreamQuery(stream: usize) {
        let (tail, context) = tail(stream)?;
        let passed = tail.iter().all(|point| context.world().executor.query(point));
        if let Some(status) = context.lost() {
            return Err(status.into());
        }
        if passed { Ok(()) } else { Err(Status::NOT_READY.into()) }
    }
    fn cuStreamGetPriority(stream: usize, priority: Out<i32>) {
        let mut lanes = world()?.lanes();
        let lane = lanes.find(stream)?;
        set!(priority, lanes.lane(lane)?.priority)
    }
    fn cuStreamGetFlags(stream: usize, flags: Out<u32>) {
        let mut lanes = world()?.lanes();
        let lane = lanes.find(stream)?;
        set!(flags, if lanes.lane(lane)?.kind == Kind::NonBlocking { NON_BLOCKING } else { 0 })
    }
    fn cuStreamGetId(stream: usize, id: Out<u64>) { set!(id, world()?.lanes().find(stream)?) }
    fn cuStreamGetDevice(stream: usize, device: Out<i32>) {
        let mut lanes = world()?.lanes();
        let lane = lanes.find(stream)?;
        set!(device, lanes.lane(lane)?.context.ordinal as i32)
    }
    fn cuStreamAttachMemAsync(stream: usize, address: u64, bytes: usize, flags: u32) {
        Err(Status::NOT_SUPPORTED.because("managed memory is not emulated"))
    }
    fn cuLaunchHostFunc(stream: usize, function: Option<HostFunction>, data: Host) {
        let function = crate::status::present(function, "function")?;
        let run = move |_| {
            as_host_function(|| function(data));
            Progress::Done(Vec::new())
        };
        submit(stream, Task::new("a host function", &here()?, run)).map(|_| ())
    }
    fn cuStreamAddCallback(stream: usize, callback: Option<Callback>, data: Host, flags: u32) {
        let callback = crate::status::present(callback, "callback")?;
        let run = move |_| {
            as_host_function(|| callback(stream, 0, data));
            Progress::Done(Vec::new())
        };
        submit(stream, Task::new("a callback", &here()?, run)).map(|_| ())
    }
}
