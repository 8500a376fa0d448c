//! Points in a GPU stream's work, and the streams of lanes.
#![allow(unsafe_code)]

use super::Gpu;
use super::calls::count_wait;
use super::driver::{self, CUevent};
use crate::{Device, Result};

/// A point in the work of one of a GPU's streams.
#[derive(Debug)]
pub struct GpuEvent {
    gpu: &'static Gpu,
    event: CUevent,
}

// SAFETY: an event's handle may be used from any thread.
unsafe impl Send for GpuEvent {}
// SAFETY: as for `Send`: nothing changes through a shared reference but the driver's own state.
unsafe impl Sync for GpuEvent {}

impl GpuEvent {
    /// Now, in the stream that is this thread's current one.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn record(gpu: &'static Gpu) -> Result<GpuEvent> {
        GpuEvent::new(gpu, false)
    }

    /// [`GpuEvent::record`], to be measured by [`GpuEvent::milliseconds_to`].
    ///
    /// # Errors
    /// If the device is lost.
    pub fn timed(gpu: &'static Gpu) -> Result<GpuEvent> {
        GpuEvent::new(gpu, true)
    }

    fn new(gpu: &'static Gpu, timing: bool) -> Result<GpuEvent> {
        gpu.bind("event")?;
        let event = GpuEvent { gpu, event: gpu.called("event", driver::event(timing))? };
        // SAFETY: event and stream exist.
        gpu.called("event", unsafe { driver::record(event.event, gpu.stream()) })?;
        Ok(event)
    }

    /// Lets what this thread gives to `gpu` from now on wait for this point, without blocking the thread.
    ///
    /// # Errors
    /// If a device is lost.
    pub fn order(&self, gpu: &'static Gpu) -> Result<()> {
        gpu.bind("event")?;
        // SAFETY: stream and event exist.
        gpu.called("event", unsafe { driver::wait(gpu.stream(), self.event) })
    }

    /// [`GpuEvent::order`] for the event's own device.
    pub(crate) fn order_here(&self) -> Result<()> {
        self.order(self.gpu)
    }

    /// Whether the work before it has run.
    ///
    /// # Errors
    /// If that work failed.
    pub fn is_done(&self) -> Result<bool> {
        self.gpu.bind("event")?;
        // SAFETY: the event exists.
        match unsafe { driver::query(self.event) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.is_not_ready() => Ok(false),
            Err(failure) => Err(self.gpu.failed("event", &failure)),
        }
    }

    /// Blocks until the work before it has run.
    ///
    /// # Errors
    /// If that work failed.
    pub fn synchronize(&self) -> Result<()> {
        self.gpu.bind("event")?;
        count_wait();
        // SAFETY: the event exists.
        self.gpu.called("event", unsafe { driver::event_synchronize(self.event) })
    }

    /// The time from this point to a later one, both [`GpuEvent::timed`] and done.
    ///
    /// # Errors
    /// If they are not.
    pub fn milliseconds_to(&self, later: &GpuEvent) -> Result<f32> {
        self.gpu.bind("event")?;
        // SAFETY: both events exist; the driver refuses those that measure no time.
        self.gpu.called("event", unsafe { driver::elapsed_ms(self.event, later.event) })
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        if self.gpu.bind("event").is_ok() {
            // SAFETY: nobody else has the handle; the driver keeps what waiting streams need.
            let _ = unsafe { driver::event_destroy(self.event) };
        }
    }
}

/// Makes this thread a lane of a device, with a stream of its own if it is a GPU, until the guard is dropped.
pub(crate) fn lane_stream(device: Device) -> Result<LaneStream> {
    let gpu = if device.is_cuda() { Some(device.gpu()?) } else { None };
    if let Some(gpu) = gpu {
        gpu.enter_lane()?;
    }
    Ok(LaneStream(gpu))
}

/// Gives the stream back.
pub(crate) struct LaneStream(Option<&'static Gpu>);

impl Drop for LaneStream {
    fn drop(&mut self) {
        if let Some(gpu) = self.0 {
            gpu.leave_lane();
        }
    }
}
