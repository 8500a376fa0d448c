//! [`Lane`]: a stream beside a device's own, to which threads give work while they have entered the lane.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::context::{Context, lock};
use crate::driver::{self, CUstream};
use crate::{Error, Result};

/// The lanes that a thread may have entered: one at each end of a copy between two GPUs.
const LANES_MAX: usize = 2;

/// A lane's stream and its device.
type Entered = Option<(u16, LaneStream)>;

thread_local! {
    /// The lanes that this thread has entered.
    static LANES: Cell<[Entered; LANES_MAX]> = const { Cell::new([None; LANES_MAX]) };
}

/// The stream of the lane of a device that this thread has entered.
#[inline]
pub(crate) fn current(index: u16) -> Option<CUstream> {
    let lanes = LANES.get();
    lanes.iter().flatten().find(|(of, _)| *of == index).map(|(_, lane)| lane.0)
}

/// Until the guard is dropped, this thread's work goes to the devices' own streams, whatever lanes it has entered.
pub fn leave_lanes() -> LeftLanes {
    LeftLanes { entered: LANES.replace([None; LANES_MAX]), thread: PhantomData }
}

/// While it lives, its thread is in no lane. See [`leave_lanes`].
#[derive(Debug)]
#[must_use = "the thread enters its lanes again when the guard is dropped"]
pub struct LeftLanes {
    entered: [Entered; LANES_MAX],
    thread: PhantomData<*const ()>,
}

impl Drop for LeftLanes {
    fn drop(&mut self) {
        LANES.set(self.entered);
    }
}

/// A stream's handle that any thread may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneStream(pub(crate) CUstream);

// SAFETY: a stream's handle may be used from any thread.
unsafe impl Send for LaneStream {}
// SAFETY: as for `Send`.
unsafe impl Sync for LaneStream {}

impl Context {
    /// A stream of its own for a lane. Threads give it work while they have [entered](Lane::enter) the lane.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn lane(&'static self) -> Result<Arc<Lane>> {
        self.bind("stream")?;
        let idle = lock(&self.idle).pop();
        let stream = match idle {
            Some(stream) => stream,
            None => LaneStream(self.called("stream", driver::stream())?),
        };
        Ok(Arc::new(Lane { context: self, stream }))
    }

    /// Gives this thread a lane until the guard is dropped.
    ///
    /// # Errors
    /// As [`Context::lane`] and [`Lane::enter`].
    pub fn enter_lane(&'static self) -> Result<LaneGuard> {
        self.lane()?.enter()
    }
}

/// A stream of a device, which the device has back when this is dropped. See [`Context::lane`].
pub struct Lane {
    context: &'static Context,
    stream: LaneStream,
}

impl Lane {
    /// Until the guard is dropped, this thread's work for the lane's device goes to the lane's stream.
    ///
    /// # Errors
    /// If the thread has entered lanes of two other devices.
    pub fn enter(self: &Arc<Lane>) -> Result<LaneGuard> {
        let (mut lanes, index) = (LANES.get(), self.context.index());
        let own = |lane: &Entered| lane.is_some_and(|(of, _)| of == index);
        let slot = lanes.iter().position(own).or_else(|| lanes.iter().position(Option::is_none));
        let Some(slot) = slot else {
            let why = format!("this thread has entered lanes of {LANES_MAX} other devices");
            return Err(Error::Unsupported { index, why });
        };
        let before = lanes[slot].replace((index, self.stream));
        LANES.set(lanes);
        Ok(LaneGuard { lane: self.clone(), before, thread: PhantomData })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Memory may still be freed in the stream's order, so streams are never destroyed.
        lock(&self.context.idle).push(self.stream);
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a lane of cuda:{}", self.context.index())
    }
}

/// While it lives, its thread gives its work to a lane. See [`Lane::enter`].
#[derive(Debug)]
pub struct LaneGuard {
    lane: Arc<Lane>,
    before: Entered,
    thread: PhantomData<*const ()>,
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        let (mut lanes, index) = (LANES.get(), self.lane.context.index());
        if let Some(own) = lanes.iter_mut().find(|lane| lane.is_some_and(|(of, _)| of == index)) {
            *own = self.before;
        }
        LANES.set(lanes);
    }
}
