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
//! threads go on. A stream [between](Stream::between) two GPUs has a CUDA stream on each, so that a copy stands in the way of
//! neither GPU's other work:
//!
//! ```text
//! cuda:0   compute     ──kernels─┐──kernels──────────────────────
//!          the copy's            └─>┐                ┌──
//! cuda:1   the copy's               └─copy──┬────────┘
//!          compute     ──kernels────────────└─>adopt──kernels────
//! ```

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

use phalanx_cuda::{Lane as GpuLane, LaneGuard};

use crate::cuda::{DeviceBlock, GpuEvent};
use crate::sync::{lock, panic_message, unpoisoned};
use crate::{Context, DType, Device, Error, Result, Tensor};

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
    /// The device to which it copies; `device` if it does not copy between devices.
    target: Device,
    /// Its CUDA streams: of `device`, and of `target`.
    ends: [Option<Arc<GpuLane>>; 2],
    error: Mutex<Option<Error>>,
}

impl Stream {
    /// A new stream on `device`, with a thread of its own.
    ///
    /// # Errors
    /// If the device cannot be used, or the system refuses a thread.
    pub fn new(device: Device) -> Result<Stream> {
        Stream::between(device, device)
    }

    /// A new stream for copies from one device to another. It belongs to `device`, and what it records is done when the copies
    /// are. On GPUs a copy waits for what its submitter has given `device` so far, and for nothing of `target`: it writes memory
    /// that [`Stream::empty`] gives, which the target's other work [adopts](adopt) when it has waited for the copy.
    ///
    /// # Errors
    /// If a device cannot be used, or the system refuses a thread.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Stream, Tensor, adopt};
    /// # fn main() -> phalanx_tensor::Result<()> {
    /// let copies = Stream::between(Device::CPU, Device::Cpu(1))?;
    /// let x = Tensor::from_slice(&[1f32, 2.], &[2], Device::CPU)?;
    /// let y = copies.empty(&[2], DType::F32)?;
    /// let mut target = y.clone();
    /// copies.submit(move || target.copy_from(&x));
    /// copies.record().synchronize()?;
    /// adopt(&y);
    /// assert_eq!(y.to_vec::<f32>()?, [1., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn between(device: Device, target: Device) -> Result<Stream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let end = |device: Device| match device.is_cuda() {
            true => device.gpu()?.lane().map(Some).map_err(Error::of_gpu),
            false => device.state().map(|_| None),
        };
        let ends = [end(device)?, if target == device { None } else { end(target)? }];
        let (id, error) = (NEXT.fetch_add(1, Ordering::Relaxed), Mutex::new(None));
        let lane = Arc::new(Lane { id, device, target, ends, error });
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

    /// Until the guard is dropped, what this thread gives the stream's GPUs goes to the stream, and the memory of tensors that are made
    /// there is the stream's until it is [adopted](adopt). The stream's thread may give it work meanwhile. On a CPU this does nothing.
    ///
    /// # Errors
    /// If this thread has entered streams of two other devices.
    pub fn enter(&self) -> Result<StreamGuard> {
        Ok(StreamGuard { _ends: self.lane.enter()? })
    }

    /// Memory on the device to which it copies, for its work alone until that memory is [adopted](adopt).
    ///
    /// # Errors
    /// If the device has no room.
    pub fn empty(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let _ends = self.lane.enter()?;
        Tensor::empty(shape, dtype, self.lane.target)
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
            match lane.points() {
                Ok(points) => *lock(&signal.0.0.points) = points.into(),
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

/// While it lives, this thread's work goes to a stream. See [`Stream::enter`].
#[must_use = "the thread leaves the stream when the guard is dropped"]
#[derive(Debug)]
pub struct StreamGuard {
    _ends: [Option<LaneGuard>; 2],
}

/// Keeps the tensor's storage alive until `stream` has passed this point, even if the tensor is dropped: for work
/// on the stream that was given the tensor's bytes and not the tensor.
pub fn record_stream(tensor: &Tensor, stream: &Stream) {
    let tensor = tensor.clone();
    stream.push(move |lane| {
        if let Err(error) = record_use(&tensor) {
            lane.fail(error);
        }
    });
}

/// Keeps a GPU tensor's memory until this thread's current stream of its device has passed this point, even if the tensor is
/// dropped. Neither the thread nor a stream waits. It is [`record_stream`] for work of a stream that runs now.
///
/// # Errors
/// If the device is lost.
pub fn record_use(tensor: &Tensor) -> Result<()> {
    if let (Some(block), Some(event)) = (tensor.storage().device_block(), point(tensor.device())?) {
        block.used_until(event.into_inner());
    }
    Ok(())
}

/// Makes a tensor's memory that of this thread's current stream of its device, in whose order it will be freed. That stream has
/// been made to wait for the last work of other streams on it, as by [`Event::synchronize`]. See [`Stream::between`].
pub fn adopt(tensor: &Tensor) {
    tensor.storage().device_block().into_iter().for_each(DeviceBlock::adopt);
}

/// An event at the present end of this thread's work on a GPU.
fn point(device: Device) -> Result<Option<GpuEvent>> {
    if device.is_cuda() { GpuEvent::record(device.gpu()?).map(Some) } else { Ok(None) }
}

impl Lane {
    /// Makes its CUDA streams this thread's, until the guards are dropped.
    fn enter(&self) -> Result<[Option<LaneGuard>; 2]> {
        let enter = |end: &Option<Arc<GpuLane>>| end.as_ref().map(GpuLane::enter).transpose();
        let [device, target] = self.ends.each_ref().map(enter);
        Ok([device.map_err(Error::of_gpu)?, target.map_err(Error::of_gpu)?])
    }

    /// Events at the present ends of its CUDA streams.
    fn points(&self) -> Result<Vec<GpuEvent>> {
        let devices = [Some(self.device), Some(self.target).filter(|target| *target != self.device)];
        devices.into_iter().flatten().filter_map(|device| point(device).transpose()).collect()
    }

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
    let _ends = lane.enter().map_err(|error| lane.fail(error));
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
    /// On GPUs: the same point in the CUDA streams.
    points: Mutex<Arc<[GpuEvent]>>,
    wake: Condvar,
}

impl Event {
    fn new(lane: u64) -> Event {
        let (done, points, wake) = Default::default();
        Event(Arc::new(State { lane, done, points, wake }))
    }

    fn fire(&self, error: Option<Error>) {
        lock(&self.0.done).get_or_insert(error);
        self.0.wake.notify_all();
    }

    /// Whether the work before it has run.
    pub fn is_done(&self) -> bool {
        // `points` is set before `done`, so it is read after it.
        let is_done = lock(&self.0.done).is_some();
        let points = lock(&self.0.points).clone();
        // A point that failed counts as done: a thread that waits for it gets the failure.
        is_done && points.iter().all(|point| point.is_done().unwrap_or(true))
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
                let points = lock(&self.0.points).clone();
                let ordered = points.iter().try_for_each(GpuEvent::order_here);
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
