//! The capture of a stream's work into a graph: what differs while it lasts.
//!
//! - Kernels that draw random numbers read the step's number from memory, where each launch puts its own.
//! - The driver refuses to free on the captured stream what was allocated before the capture. Such a free waits for the
//!   capture's end, whatever thread asks for it.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::context::{Context, GpuEvent, lock};
use crate::driver::{self, CUgraphExec, CUstream};
use crate::lane::LaneStream;
use crate::vendor::Called;

/// The capture that a thread makes.
#[derive(Clone, Copy)]
struct Capturing {
    number: u64,
    /// The step whose random draws are captured, and the address where each launch puts its own step.
    step: (u64, u64),
    stream: LaneStream,
}

thread_local! {
    static CAPTURING: Cell<Option<Capturing>> = const { Cell::new(None) };
}

/// A stream that is being captured.
pub(crate) struct Capture {
    number: u64,
    stream: LaneStream,
    /// Frees that wait for its end.
    deferred: Vec<Free>,
}

/// Memory to be freed in the order of `home`, once other streams have come so far too.
pub(crate) struct Free {
    pub(crate) address: u64,
    pub(crate) home: LaneStream,
    pub(crate) others: Vec<GpuEvent>,
    /// The capture in which it was allocated; 0 for none.
    pub(crate) capture: u64,
}

pub(crate) fn is_capturing() -> bool {
    CAPTURING.get().is_some()
}

/// The capture that this thread makes of a stream; 0 for none.
pub(crate) fn capture_of(stream: CUstream) -> u64 {
    CAPTURING.get().filter(|capturing| capturing.stream.0 == stream).map_or(0, |capturing| capturing.number)
}

/// Where a kernel finds the number of the step that it is launched in, while this thread captures `step`; else 0.
pub fn captured_step(step: u64) -> u64 {
    CAPTURING.get().filter(|capturing| capturing.step.0 == step).map_or(0, |capturing| capturing.step.1)
}

impl Context {
    /// Begins to capture what this thread gives to its current stream. The number of the captured step will be at `address`.
    pub(crate) fn begin_capture(&self, op: &'static str, step: u64, address: u64) -> Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let (number, stream) = (NUMBER.fetch_add(1, Ordering::Relaxed), self.stream());
        let mut captures = lock(&self.captures);
        // SAFETY: the stream exists.
        self.called(op, unsafe { driver::begin_capture(stream) })?;
        let stream = LaneStream(stream);
        captures.push(Capture { number, stream, deferred: Vec::new() });
        CAPTURING.set(Some(Capturing { number, step: (step, address), stream }));
        Ok(())
    }

    /// Ends what [`Context::begin_capture`] began.
    pub(crate) fn end_capture(&self) -> Called<CUgraphExec> {
        let stream = self.stream();
        let number = CAPTURING.take().map_or(0, |capturing| capturing.number);
        let mut captures = lock(&self.captures);
        // SAFETY: the stream exists.
        let ended = unsafe { driver::end_capture(stream) };
        let at = captures.iter().position(|capture| capture.number == number);
        let deferred = at.map_or(Vec::new(), |at| captures.swap_remove(at).deferred);
        drop(captures);
        deferred.into_iter().for_each(|free| self.free(free));
        ended
    }

    /// Frees memory, or has it freed at the end of the capture of its stream. The first refusal is kept, and printed.
    pub(crate) fn free(&self, free: Free) {
        // Held until the driver has been asked, so that no capture of the stream begins in between.
        let mut captures = lock(&self.captures);
        let is_own = |capture: &Capture| capture.number == free.capture;
        let capture = captures.iter_mut().find(|c| is_own(c) || c.stream.0 == free.home.0);
        let is_captured = capture.as_ref().is_some_and(|c| is_own(c));
        if let Some(capture) = capture.filter(|c| !is_own(c)) {
            return capture.deferred.push(free);
        }
        // SAFETY: the memory came from this device's pool. Work of other streams that uses it was noted, or keeps the block
        // until it is done.
        let freed = unsafe {
            match free.others.is_empty() || is_captured {
                // A captured stream waits itself: the stream of frees would join the capture, and not come back to it.
                true => {
                    let waited = free.others.iter().try_for_each(|e| driver::wait(free.home.0, e.event));
                    waited.and_then(|()| driver::free(free.address, free.home.0))
                }
                false => self.free_after(free.address, free.home.0, &free.others),
            }
        };
        drop(captures);
        // Memory of a capture that has failed was never there, and the failure is reported.
        if let (Err(failure), 0) = (freed, free.capture) {
            self.refused_free.get_or_init(|| {
                let why = format!("cuda:{}: memory was not freed: {}", self.index(), failure.text);
                eprintln!("{why}");
                why
            });
        }
    }

    /// Why the driver has refused to free memory, if it has: the first time. The memory is lost, and a capture may be broken.
    pub fn refused_free(&self) -> Option<&str> {
        self.refused_free.get().map(String::as_str)
    }
}
