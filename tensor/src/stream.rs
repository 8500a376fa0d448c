//! [`Stream`] and [`Event`]: work beside the caller's thread, so that copies and communication overlap.
//!
//! A stream is one FIFO thread of a device. (That thread and its state are a *lane*.) Streams wait for each other
//! through events:
//!
//! ```text
//! compute  ──work──record(e)──work──────────────
//!                     │
//! copies   ──────────wait(e)──to_device─────────
//! ```
//!
//! Streams cannot deadlock. A `wait` names an event recorded before it, so the items of all queues can always be run
//! in the order they were queued. Only work that itself blocks on an event could close a circle. [`Event::synchronize`] finds
//! such a circle before it blocks, and returns an error.
//!
//! On a GPU the thread gives its work to a CUDA stream of its own. The CUDA streams wait for each other, while the
//! threads go on.

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

use crate::cuda::GpuEvent;
use crate::sync::{lock, panic_message, unpoisoned};
use crate::{Context, Device, Error, Result, Tensor};

/// A stream of a device: work submitted to it runs in order, on a thread of the stream's own. Clones are handles of one
/// stream.
///
/// The thread ends after its last work once all handles are dropped; dropping them does not wait for it.
///
/// ```
/// use phalanx_tensor::{Device, Stream, Tensor};
/// # fn main() -> phalanx_tensor::Result<()> {
/// let lane = Stream::new(Device::CPU)?;
/// let x = Tensor::from_slice(&[1f32, 2.], &[2], Device::CPU)?;
/// lane.submit(move || x.to_device(Device::Cpu(1), false).map(drop));
/// lane.synchronize()
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Stream {
    device: Device,
    lane: Arc<Lane>,
    jobs: Sender<Job>,
}

type Job = Box<dyn FnOnce(&Lane) + Send>;

/// The state that a stream's thread shares with the stream's handles.
#[derive(Debug)]
struct Lane {
    id: u64,
    device: Device,
    error: Mutex<Option<Error>>,
}

impl Stream {
    /// A new stream on `device`, with a thread of its own.
    ///
    /// # Errors
    /// If the device cannot be used, or the system refuses a thread.
    pub fn new(device: Device) -> Result<Stream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        device.state()?;
        let lane =
            Arc::new(Lane { id: NEXT.fetch_add(1, Ordering::Relaxed), device, error: Mutex::new(None) });
        let (jobs, queue) = channel();
        let thread = std::thread::Builder::new().name(format!("lane {} of {device}", lane.id));
        let shared = lane.clone();
        let spawned = thread.spawn(move || run(&queue, &shared));
        spawned.map_err(|e| Error::Unsupported { op: "stream", device, why: format!("no thread: {e}") })?;
        Ok(Stream { device, lane, jobs })
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Queues work, which runs in this thread's [`Context`]. An error it returns or a panic is kept for
    /// [`Stream::synchronize`]; later work runs all the same.
    pub fn submit(&self, work: impl FnOnce() -> Result<()> + Send + 'static) {
        let context = Context::current();
        // On a GPU the stream's work comes after the work that the caller has given the GPU so far.
        let before = point(self.device);
        self.push(move |lane| {
            let entered = move || {
                let _guard = context.enter();
                if let Some(before) = before? {
                    before.order(lane.device.gpu()?)?;
                }
                work()
            };
            let outcome = catch_unwind(AssertUnwindSafe(entered));
            if let Err(error) = outcome.unwrap_or_else(|panic| Err(panicked(panic))) {
                lane.fail(error);
            }
        });
    }

    /// An event that is done when all work queued so far has run.
    pub fn record(&self) -> Event {
        let event = Event::new(self.lane.id);
        let signal = Signal(event.clone());
        self.push(move |lane| {
            match point(lane.device) {
                Ok(point) => *lock(&signal.0.0.point) = point.map(Arc::new),
                Err(error) => lane.fail(error),
            }
            signal.0.fire(lock(&lane.error).clone());
        });
        event
    }

    /// Lets work queued from now on wait until the event is done, without blocking the caller. An error of the
    /// work before the event becomes this stream's too, if it has none yet.
    pub fn wait(&self, event: &Event) {
        let event = event.clone();
        self.push(move |lane| {
            if let Err(error) = event.synchronize() {
                lane.fail(error);
            }
        });
    }

    /// Blocks until all work queued so far has run. On a GPU, blocks until it has been given to the GPU, and makes the caller's later work
    /// there wait for it.
    ///
    /// # Errors
    /// The first error (or panic, as [`Error::Panic`]) of the work since the last `synchronize`, which takes it; or
    /// as [`Event::synchronize`] when called from a stream's work.
    pub fn synchronize(&self) -> Result<()> {
        self.record().block()?;
        lock(&self.lane.error).take().map_or(Ok(()), Err)
    }

    fn push(&self, job: impl FnOnce(&Lane) + Send + 'static) {
        // The thread outlives every handle. If it were gone, this would drop the job, which fires the job's event.
        let _ = self.jobs.send(Box::new(job));
    }
}

/// Keeps the tensor's storage alive until `stream` has passed this point, even if the tensor is dropped: for work
/// on the stream that was given the tensor's bytes and not the tensor.
pub fn record_stream(tensor: &Tensor, stream: &Stream) {
    let tensor = tensor.clone();
    stream.push(move |lane| {
        // The CUDA stream may be behind the stream's thread. That thread waits for it, not the device.
        if let Ok(Some(point)) = point(lane.device)
            && let Err(error) = point.synchronize()
        {
            lane.fail(error);
        }
        drop(tensor);
    });
}

/// An event at the present end of this thread's work on a GPU.
fn point(device: Device) -> Result<Option<GpuEvent>> {
    if device.is_cuda() { GpuEvent::record(device.gpu()?).map(Some) } else { Ok(None) }
}

impl Lane {
    /// Keeps the first error.
    fn fail(&self, error: Error) {
        lock(&self.error).get_or_insert(error);
    }
}

/// The id of the stream whose thread this is; 0 on other threads.
fn current_lane() -> &'static std::thread::LocalKey<Cell<u64>> {
    thread_local! {
        static LANE: Cell<u64> = const { Cell::new(0) };
    }
    &LANE
}

fn run(queue: &Receiver<Job>, lane: &Lane) {
    current_lane().set(lane.id);
    // On a GPU the thread has a CUDA stream of its own.
    let gpu = if lane.device.is_cuda() { lane.device.gpu().map(Some) } else { Ok(None) };
    let entered = gpu.and_then(|gpu| gpu.map(|gpu| gpu.enter_lane()).transpose().map_err(Error::of_gpu));
    let _stream = entered.map_err(|error| lane.fail(error));
    for job in queue {
        job(lane);
    }
}

fn panicked(payload: Box<dyn Any + Send>) -> Error {
    // The drop of a payload that is no text might panic and so end the thread. Such payloads are leaked.
    let message = panic_message(&*payload).map(String::from).unwrap_or_else(|| {
        std::mem::forget(payload);
        "a payload that is no text".into()
    });
    Error::Panic { op: "stream", message }
}

/// A point in a stream's work. Clones are the same event.
#[derive(Clone, Debug)]
pub struct Event(Arc<State>);

#[derive(Debug)]
struct State {
    lane: u64,
    /// None until done; then the stream's error at that point, if any.
    done: Mutex<Option<Option<Error>>>,
    /// On a GPU: the same point in the CUDA stream.
    point: Mutex<Option<Arc<GpuEvent>>>,
    wake: Condvar,
}

impl Event {
    fn new(lane: u64) -> Event {
        Event(Arc::new(State { lane, done: Mutex::new(None), point: Mutex::new(None), wake: Condvar::new() }))
    }

    fn fire(&self, error: Option<Error>) {
        lock(&self.0.done).get_or_insert(error);
        self.0.wake.notify_all();
    }

    /// Whether the work before it has run.
    pub fn is_done(&self) -> bool {
        // `point` is set before `done`, so it is read after it.
        let is_done = lock(&self.0.done).is_some();
        let point = lock(&self.0.point).clone();
        // A point that failed counts as done: a thread that waits for it gets the failure.
        is_done && point.is_none_or(|point| point.is_done().unwrap_or(true))
    }

    /// Blocks until the work before it has run. On a GPU, blocks until that work has been given to the GPU, and makes this thread's later
    /// work there wait for it; reading elements waits for both. Does not hang if the stream is dropped: its queue still runs to the end.
    ///
    /// # Errors
    /// The error that the stream had at this point, which stays with the stream. When called from a stream's work, and
    /// the event could only come after that work has ended: [`Error::Invalid`], at once.
    pub fn synchronize(&self) -> Result<()> {
        self.block()?.map_or(Ok(()), Err)
    }

    /// Waits. The outer error is a circle of streams that was found, the inner one the stream's error.
    fn block(&self) -> Result<Option<Error>> {
        let _edge = Edge::new(current_lane().get(), self)?;
        let mut done = lock(&self.0.done);
        loop {
            if let Some(error) = &*done {
                let error = error.clone();
                drop(done);
                let point = lock(&self.0.point).clone();
                let ordered = point.map_or(Ok(()), |point| point.order_here());
                return Ok(error.or(ordered.err()));
            }
            done = unpoisoned(self.0.wake.wait(done));
        }
    }
}

/// Fires its event in any case.
struct Signal(Event);

impl Drop for Signal {
    fn drop(&mut self) {
        self.0.fire(Some(Error::invalid("stream", "the lane ended before this event")));
    }
}

/// The event that each blocked stream waits for.
static WAITING: Mutex<BTreeMap<u64, Event>> = Mutex::new(BTreeMap::new());

/// A stream's entry in [`WAITING`].
struct Edge(u64);

impl Edge {
    /// Enters that `lane` waits for `event`, unless that would close a circle. An edge whose event is done blocks no
    /// stream, so the walk stops there. The other edges never form a circle, hence the walk ends.
    fn new(lane: u64, event: &Event) -> Result<Edge> {
        let mut waiting = lock(&WAITING);
        let mut next = Some(event);
        while let Some(event) = next.filter(|e| lane != 0 && !e.is_done()) {
            if event.0.lane == lane {
                let why = "the event cannot come before this lane's work has ended; use Stream::wait";
                return Err(Error::invalid("synchronize", why));
            }
            next = waiting.get(&event.0.lane);
        }
        if lane != 0 {
            waiting.insert(lane, event.clone());
        }
        Ok(Edge(lane))
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        if self.0 != 0 {
            lock(&WAITING).remove(&self.0);
        }
    }
}
