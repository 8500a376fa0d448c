//! Streams, events, captures and graphs.

use std::sync::{Arc, Mutex};

use phalanx_emulator_link::lock;
use phalanx_emulator_link::pointer::{Host, Out};

use super::call::as_host_function;
use crate::capture::{capture_status, exchange_mode};
use crate::context::{Context, here};
use crate::device::devices;
use crate::event::{EVENTS, Event, elapsed, record, wait};
use crate::executor::executor;
use crate::graph::{CaptureMode, EXECUTABLES, Executable, GRAPHS, NODES, Node};
use crate::ledger::{self, Kind};
use crate::queue::{Point, Progress, Task};
use crate::status::{Result, Status, present};
use crate::streams::{
    PRIORITY_GREATEST, PRIORITY_LEAST, StreamKind, Streams, context_of, is_captured, streams, submit,
};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

fn synchronize(stream: usize) -> Result<()> {
    let (tail, context) = tail(stream)?;
    tail.iter().for_each(|point| executor().wait(point));
    context.check()
}

/// The operations that have to have run for a stream to be idle.
fn tail(stream: usize) -> Result<(Vec<Point>, Arc<Context>)> {
    let mut streams = streams();
    let id = streams.find(stream)?;
    if let Some(joined) = streams.get(id)?.capture.clone() {
        streams.invalidate(joined.capture);
        return Err(
            Status::CAPTURE_UNSUPPORTED.because("a stream that is being captured cannot be waited for")
        );
    }
    streams.check_implicit(id)?;
    let found = streams.get(id)?;
    let (context, is_legacy, own) =
        (found.context.clone(), found.kind == StreamKind::Legacy, found.tail.clone());
    Ok((if is_legacy { streams.before(id) } else { vec![own] }, context))
}

fn create(out: Out<usize>, flags: u32, priority: i32) -> Result<()> {
    if flags > NON_BLOCKING {
        return Err(Status::INVALID_VALUE.because(format!("stream flags {flags:#x}")));
    }
    let context = here()?;
    let kind = if flags == NON_BLOCKING { StreamKind::NonBlocking } else { StreamKind::Blocking };
    let priority = priority.clamp(PRIORITY_GREATEST, PRIORITY_LEAST);
    let handle = Streams::handle(streams().add(&context, kind, priority));
    ledger::made(Kind::Stream, handle, 0, "cuStreamCreate");
    set!(out, handle)
}

/// A C function that a stream calls.
type HostFunction = extern "C" fn(Host);
/// As [`HostFunction`], with the stream and a status before the data.
type Callback = extern "C" fn(usize, i32, Host);

fn capture_info(stream: usize, status: Out<i32>, id: Out<u64>) -> Result<()> {
    let mut streams = streams();
    let stream = streams.find(stream)?;
    let found = capture_status(&mut streams, stream)?;
    set!(status, found)?;
    let number = streams.get(stream)?.capture.as_ref().map_or(0, |joined| joined.capture);
    if id.is_null() { Ok(()) } else { set!(id, number) }
}

fn instantiate(out: Out<usize>, graph: usize, flags: u64) -> Result<()> {
    // 1: free on launch, 2: upload, 4: from the device, 8: with the nodes' priorities.
    if flags & !0b1011 != 0 {
        return Err(Status::INVALID_VALUE.because(format!("flags of a graph {flags:#x}")));
    }
    let graph = GRAPHS.get(graph)?;
    let (nodes, memory) = (Mutex::new(graph.nodes.clone()), Mutex::new(graph.memory.clone()));
    let (last, frees_first) = (Mutex::default(), flags & 1 != 0);
    let handle = EXECUTABLES.add(Arc::new(Executable { nodes, last, memory, frees_first }));
    ledger::made(Kind::ExecutableGraph, handle, 0, "cuGraphInstantiate");
    set!(out, handle)
}

fn launch_graph(executable: usize, stream: usize) -> Result<()> {
    let executable = EXECUTABLES.get(executable)?;
    let mut streams = streams();
    let id = streams.find(stream)?;
    if let Some(joined) = streams.get(id)?.capture.clone() {
        streams.invalidate(joined.capture);
        return Err(Status::NOT_SUPPORTED.because("a graph within a graph is not emulated"));
    }
    lock(&executable.memory).launched(executable.frees_first)?;
    let nodes = lock(&executable.nodes).clone();
    let mut last = lock(&executable.last);
    let (end, branches) = &mut *last;
    *end = streams.enqueue_graph(id, &nodes, end, branches)?;
    drop((last, streams));
    executor().added();
    Ok(())
}

/// What an update of an executable graph says about its end.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct UpdateInfo {
    result: i32,
    node: usize,
    from: usize,
}

fn update(executable: usize, graph: usize) -> Result<i32> {
    const TOPOLOGY_CHANGED: i32 = 2;
    let (executable, graph) = (EXECUTABLES.get(executable)?, GRAPHS.get(graph)?);
    let mut nodes = lock(&executable.nodes);
    let same = nodes.len() == graph.nodes.len() && nodes.iter().zip(&graph.nodes).all(|(a, b)| a.1 == b.1);
    if !same {
        return Ok(TOPOLOGY_CHANGED);
    }
    nodes.clone_from(&graph.nodes);
    *lock(&executable.memory) = graph.memory.clone();
    Ok(0)
}

export! {
    @always {
        fn cuGraphDestroy(graph: usize) {
            devices()?;
            ledger::gone(Kind::Graph, graph);
            Ok(GRAPHS.remove(graph).map(drop)?)
        }
        fn cuGraphExecDestroy(executable: usize) {
            devices()?;
            ledger::gone(Kind::ExecutableGraph, executable);
            let executable = EXECUTABLES.remove(executable)?;
            // What is queued of it still runs, and may use its memory.
            let last = lock(&executable.last).0.clone();
            executor().wait(&last);
            Ok(())
        }
    }
    fn cuStreamCreate(out: Out<usize>, flags: u32) { create(out, flags, 0) }
    fn cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: i32) { create(out, flags, priority) }
    fn cuStreamDestroy_v2(stream: usize) {
        let mut streams = streams();
        let id = streams.find(stream)?;
        if streams.get(id)?.kind == StreamKind::Legacy {
            return Err(Status::INVALID_HANDLE.because("the default stream cannot be destroyed"));
        }
        if let Some(joined) = streams.get(id)?.capture.take() {
            streams.invalidate(joined.capture);
        }
        ledger::gone(Kind::Stream, stream);
        streams.destroy(id)
    }
    fn cuStreamSynchronize(stream: usize) { synchronize(stream) }
    fn cuStreamQuery(stream: usize) {
        let (tail, context) = tail(stream)?;
        let passed = tail.iter().all(|point| executor().query(point));
        context.check()?;
        if passed { Ok(()) } else { Err(Status::NOT_READY.into()) }
    }
    fn cuStreamGetPriority(stream: usize, priority: Out<i32>) {
        let mut streams = streams();
        let id = streams.find(stream)?;
        set!(priority, streams.get(id)?.priority)
    }
    fn cuStreamGetFlags(stream: usize, flags: Out<u32>) {
        let mut streams = streams();
        let id = streams.find(stream)?;
        set!(flags, if streams.get(id)?.kind == StreamKind::NonBlocking { NON_BLOCKING } else { 0 })
    }
    fn cuStreamGetId(stream: usize, id: Out<u64>) { set!(id, streams().find(stream)?) }
    fn cuStreamGetDevice(stream: usize, device: Out<i32>) {
        let mut streams = streams();
        let id = streams.find(stream)?;
        set!(device, streams.get(id)?.context.ordinal as i32)
    }
    fn cuStreamAttachMemAsync(stream: usize, address: u64, bytes: usize, flags: u32) {
        Err(Status::NOT_SUPPORTED.because("managed memory is not emulated"))
    }
    fn cuLaunchHostFunc(stream: usize, function: Option<HostFunction>, data: Host) {
        let function = present(function, "function")?;
        let run = move |ticket| {
            executor().queue().tells_host(ticket);
            as_host_function(|| function(data));
            Progress::Done(Vec::new())
        };
        submit(stream, Task::new("a host function", &here()?, run)).map(|_| ())
    }
    fn cuStreamAddCallback(stream: usize, callback: Option<Callback>, data: Host, flags: u32) {
        let callback = present(callback, "callback")?;
        if is_captured(stream)? {
            return Err(Status::CAPTURE_UNSUPPORTED.because("a callback cannot be captured"));
        }
        let context = context_of(stream)?;
        let called = context.clone();
        let run = move |ticket| {
            executor().queue().tells_host(ticket);
            as_host_function(|| callback(stream, called.status_number(), data));
            Progress::Done(Vec::new())
        };
        let task = Task { even_if_lost: true, ..Task::new("a callback", &context, run) };
        executor().drive(submit(stream, task)?);
        Ok(())
    }
    fn cuStreamBeginCapture_v2(stream: usize, mode: i32) {
        let mut streams = streams();
        let id = streams.find(stream)?;
        streams.begin_capture(id, CaptureMode::from_number(mode)?)
    }
    fn cuStreamEndCapture(stream: usize, graph: Out<usize>) {
        set!(graph, 0)?;
        let mut streams = streams();
        let id = streams.find(stream)?;
        let captured = streams.end_capture(id)?;
        let handle = GRAPHS.add(Arc::new(captured));
        ledger::made(Kind::Graph, handle, 0, "cuStreamEndCapture");
        set!(graph, handle)
    }
    fn cuStreamIsCapturing(stream: usize, status: Out<i32>) {
        let mut streams = streams();
        let id = streams.find(stream)?;
        let found = capture_status(&mut streams, id)?;
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
        let wanted = CaptureMode::from_number(present(mode.get(), "mode")?)?;
        set!(mode, exchange_mode(wanted) as i32)
    }
    fn cuEventCreate(out: Out<usize>, flags: u32) {
        if flags > 7 {
            return Err(Status::INVALID_VALUE.because(format!("event flags {flags:#x}")));
        }
        let handle = EVENTS.add(Arc::new(Event::new(flags & DISABLE_TIMING == 0)?));
        ledger::made(Kind::Event, handle, 0, "cuEventCreate");
        set!(out, handle)
    }
    fn cuEventDestroy_v2(event: usize) {
        ledger::gone(Kind::Event, event);
        Ok(EVENTS.remove(event).map(drop)?)
    }
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
        let event = EVENTS.get(event)?;
        let passed = event.work()?.is_none_or(|point| executor().query(&point));
        event.context.check()?;
        if passed { Ok(()) } else { Err(Status::NOT_READY.into()) }
    }
    fn cuEventSynchronize(event: usize) {
        let event = EVENTS.get(event)?;
        if let Some(point) = event.work()? {
            executor().wait(&point);
        }
        event.context.check()
    }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) { set!(milliseconds, elapsed(start, end)?) }
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) { set!(milliseconds, elapsed(start, end)?) }
    fn cuGraphInstantiateWithFlags(out: Out<usize>, graph: usize, flags: u64) { instantiate(out, graph, flags) }
    fn cuGraphInstantiate_v2(out: Out<usize>, graph: usize, node: Out<usize>, log: Host, bytes: usize) {
        instantiate(out, graph, 0)
    }
    fn cuGraphUpload(executable: usize, stream: usize) {
        EXECUTABLES.get(executable)?;
        streams().find(stream).map(|_| ())
    }
    fn cuGraphLaunch(executable: usize, stream: usize) { launch_graph(executable, stream) }
    fn cuGraphExecUpdate_v2(executable: usize, graph: usize, info: Out<UpdateInfo>) {
        let result = update(executable, graph)?;
        present(info.set(UpdateInfo { result, node: 0, from: 0 }), "info")?;
        if result == 0 {
            return Ok(());
        }
        Err(Status::GRAPH_UPDATE_FAILURE.because("the graph has other nodes or edges than the executable one"))
    }
    fn cuGraphGetNodes(graph: usize, nodes: Out<usize>, count: Out<usize>) {
        let graph = GRAPHS.get(graph)?;
        if nodes.is_null() {
            return set!(count, graph.nodes.len());
        }
        let room = present(count.get(), "count")?.min(graph.nodes.len());
        for i in 0..room {
            present(nodes.set_at(i, NODES.add(Arc::new(Node))), "nodes")?;
        }
        set!(count, room)
    }
}
