//! How a pipeline's observer hears of the phases of cells: [`PassObserver`], [`CellObserver`].
//!
//! A CPU's phase is reported by the thread that computes it. A GPU computes a phase after its thread has gone on, so the thread
//! records events in the stream at the phase's begin and end, and a thread of the process waits for these and reports the phase
//! with the device's times. No other thread waits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use phalanx_tensor::Device;
use phalanx_tensor::cuda::{GpuClock, GpuEvent, Moment};

use super::clock::{Observer, Phase, Span};
use super::{Cell, Partition};
use crate::catch_panic::catch_panic;
use crate::{Error, Result};

/// The observer of a forward pass and of its backward passes.
pub(super) struct PassObserver {
    observer: Observer,
    /// The host's time of each GPU.
    clocks: BTreeMap<Device, GpuClock>,
}

impl PassObserver {
    /// # Errors
    /// If a GPU is lost.
    pub(super) fn new(observer: &Observer, partition: &Partition) -> Result<Arc<PassObserver>> {
        let gpus: BTreeSet<Device> =
            partition.devices().into_iter().filter(|device| device.is_cuda()).collect();
        let clock = |device: Device| Ok((device, GpuClock::new(device.gpu()?)?));
        let clocks = gpus.into_iter().map(clock).collect::<Result<_>>()?;
        Ok(Arc::new(PassObserver { observer: observer.clone(), clocks }))
    }
}

/// Reports the phases of one cell to the pipeline's observer, if there is one.
#[derive(Clone)]
pub(super) struct CellObserver {
    pub(super) pass: Option<Arc<PassObserver>>,
    pub(super) device: Device,
    pub(super) cell: Cell,
}

impl CellObserver {
    /// The present moment of the cell's device, if there is an observer.
    ///
    /// # Errors
    /// If the device is lost.
    pub(super) fn now(&self) -> phalanx_tensor::Result<Option<Moment>> {
        self.pass.as_ref().map(|_| Moment::now(self.device)).transpose()
    }

    /// Reports a phase that began at `begin` and ends at this thread's present end of the device's work.
    ///
    /// # Errors
    /// If the device is lost.
    pub(super) fn report(&self, phase: Phase, begin: Option<Moment>) -> phalanx_tensor::Result<()> {
        let (Some(pass), Some(begin), Some(end)) = (&self.pass, begin, self.now()?) else { return Ok(()) };
        let span = |begin, end| Span { device: self.device, cell: self.cell, phase, begin, end };
        match (begin, end) {
            (Moment::Host(begin), Moment::Host(end)) => (pass.observer)(span(begin, end)),
            (Moment::Gpu(begin), Moment::Gpu(end)) => {
                let unknown = Instant::now();
                let (pass, span) = (pass.clone(), span(unknown, unknown));
                // The thread ends with the process.
                let _ = reporter().send(Message::Phase(GpuPhase { pass, span, begin, end }));
            }
            _ => {}
        }
        Ok(())
    }
}

/// A phase that a GPU has begun or will begin. The times of its span are not known yet.
struct GpuPhase {
    pass: Arc<PassObserver>,
    span: Span,
    begin: GpuEvent,
    end: GpuEvent,
}

impl GpuPhase {
    /// Waits for the phase's end and reports it.
    fn report(self) -> Result<()> {
        let GpuPhase { pass, span, begin, end } = self;
        let Some(clock) = pass.clocks.get(&span.device) else { return Ok(()) };
        let span = Span { begin: clock.instant(&begin)?, end: clock.instant(&end)?, ..span };
        (pass.observer)(span);
        Ok(())
    }
}

enum Message {
    Phase(GpuPhase),
    /// To be answered when all phases sent before are reported.
    Reported(SyncSender<()>),
}

static REPORTER: OnceLock<Sender<Message>> = OnceLock::new();

/// The thread that reports the phases of GPUs.
fn reporter() -> &'static Sender<Message> {
    REPORTER.get_or_init(|| {
        let (messages, queue) = channel();
        // Without a thread nothing is reported.
        let _ = std::thread::Builder::new().name("gpipe observer".into()).spawn(move || run(&queue));
        messages
    })
}

fn run(queue: &Receiver<Message>) {
    for message in queue {
        match message {
            Message::Phase(phase) => {
                // A lost device's phases have no times; the pipeline's own calls return the error. An observer that panics
                // keeps no phase of another pipeline from being reported.
                let _ = catch_panic(|| Ok::<_, Error>(phase.report()));
            }
            Message::Reported(answer) => drop(answer.send(())),
        }
    }
}

/// Blocks until all phases so far are reported: until the GPUs have come to their ends.
pub(super) fn await_reports() {
    let Some(reporter) = REPORTER.get() else { return };
    let (answer, answered) = sync_channel(1);
    if reporter.send(Message::Reported(answer)).is_ok() {
        let _ = answered.recv();
    }
}
