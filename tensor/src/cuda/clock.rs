//! [`Moment`]: a point in a device's work, for its time. [`GpuClock`]: what the host's clock says of a GPU's moments.

use std::time::{Duration, Instant};

use super::{Gpu, GpuEvent};
use crate::{Device, Error, Result};

/// A point in a device's work, and when the device comes to it. Only a GPU comes to it later than the host.
///
/// ```
/// # use phalanx_tensor::{Device, cuda::Moment};
/// let begin = Moment::now(Device::CPU)?;
/// let end = Moment::now(Device::CPU)?;
/// assert!(begin.until(&end)?.as_secs() < 60);
/// # Ok::<(), phalanx_tensor::Error>(())
/// ```
#[derive(Debug)]
pub enum Moment {
    /// When a CPU was there.
    Host(Instant),
    /// Recorded in the GPU's current stream of the thread.
    Gpu(GpuEvent),
}

impl Moment {
    /// The present end of the work that this thread has given the device.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn now(device: Device) -> Result<Moment> {
        match device.is_cuda() {
            true => GpuEvent::timed(device.gpu()?).map(Moment::Gpu),
            false => Ok(Moment::Host(Instant::now())),
        }
    }

    /// The time from this moment to a later one of the same device. Blocks until a GPU has come to both.
    ///
    /// # Errors
    /// If the work between them failed, or one of them is a GPU's and the other is not.
    pub fn until(&self, later: &Moment) -> Result<Duration> {
        match (self, later) {
            (Moment::Host(begin), Moment::Host(end)) => Ok(end.saturating_duration_since(*begin)),
            (Moment::Gpu(begin), Moment::Gpu(end)) => {
                begin.synchronize()?;
                end.synchronize()?;
                Ok(Duration::from_secs_f32((begin.milliseconds_to(end)? / 1e3).max(0.0)))
            }
            _ => Err(Error::invalid("until", "got a moment of a GPU and one of another device")),
        }
    }
}

/// How often a GPU is asked for a moment: a thread may lose its core meanwhile.
const TRIES: usize = 3;

/// A moment that the host's clock and a GPU's both know.
#[derive(Debug)]
pub struct GpuClock {
    event: GpuEvent,
    at: Instant,
}

impl GpuClock {
    /// The present moment. Waits for the GPU to answer, but for none of its work.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn new(gpu: &'static Gpu) -> Result<GpuClock> {
        let _no_work = gpu.enter_lane().map_err(Error::of_gpu)?;
        let mut best = GpuClock::ask(gpu)?;
        for _ in 1..TRIES {
            let next = GpuClock::ask(gpu)?;
            best = if next.1 < best.1 { next } else { best };
        }
        Ok(best.0)
    }

    /// A moment, and how long the GPU and this thread took for it: twice as much as the two clocks may be apart.
    fn ask(gpu: &'static Gpu) -> Result<(GpuClock, Duration)> {
        let before = Instant::now();
        let event = GpuEvent::timed(gpu)?;
        event.synchronize()?;
        let took = before.elapsed();
        Ok((GpuClock { event, at: before + took / 2 }, took))
    }

    /// When the GPU came to a [timed](GpuEvent::timed) event, on the host's clock. Blocks until it has.
    ///
    /// # Errors
    /// If the work before the event failed.
    pub fn instant(&self, event: &GpuEvent) -> Result<Instant> {
        event.synchronize()?;
        let ms = self.event.milliseconds_to(event)?;
        let apart = Duration::from_secs_f32(ms.abs() / 1e3);
        Ok(if ms < 0.0 { self.at.checked_sub(apart).unwrap_or(self.at) } else { self.at + apart })
    }
}
