//! [`Completion`]: the end of an operation that goes on after its closure has returned, as a copy on a stream does.
//!
//! ```text
//! worker:  start(completion) ── returns ──► the worker takes its next operation
//!               └─ queues a copy, and completion.after(device)
//! stream:            copy ──► completion ──► the variables are released, operations that waited become ready
//! ```
//!
//! The operation ends when the closure has returned *and* the completion has come. So what the closure holds (guards of
//! resources) is released before another operation is granted the variables.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx_tensor::Device;

use super::error::{Cause, Reason};
use super::node::{Node, Outcome};
use super::runner::Runner;
use super::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::catch_panic::panic_text;

/// Ends the operation that [`Engine::push_async`](super::Engine::push_async) started, from any thread.
///
/// An operation whose completion is dropped fails, so that its dependents do not wait for ever.
#[must_use = "an operation whose completion is dropped fails"]
pub struct Completion {
    /// `None` once it has been called.
    started: Option<Arc<Started>>,
}

/// An operation whose closure has been called and that has not ended.
pub(crate) struct Started {
    node: Arc<Node>,
    runner: Arc<dyn Runner>,
    /// What has not come yet: the closure's return, the completion.
    pending: AtomicU32,
    /// The first failure of the two. That the completion was dropped counts if there is no other: an error that the closure
    /// returns before it has passed the completion on drops it too.
    reason: Mutex<Option<Reason>>,
    dropped: AtomicU32,
}

impl Completion {
    /// Ends the operation; with an error it fails, as if its closure had returned the error.
    pub fn complete(mut self, outcome: Result<(), Cause>) {
        if let Some(started) = self.started.take() {
            started.party_ends(outcome.err().map(Reason::Error));
        }
    }

    /// Ends the operation when the device has done the work that this thread has given it so far. On a GPU its driver calls
    /// back when the thread's stream comes to this point, and no thread waits. Other devices work in their operations, so
    /// there the operation ends at once. The operation fails if the device is lost.
    pub fn after(self, device: Device) {
        self.after_all(&[device]);
    }

    /// [`Completion::after`], of several devices.
    pub fn after_all(self, devices: &[Device]) {
        let shared = Arc::new(AfterAll { completion: Some(self), failure: Mutex::new(None) });
        for device in devices.iter().filter(|device| device.is_cuda()) {
            let shared = shared.clone();
            let done = move |outcome: phalanx_tensor::Result<()>| {
                if let Err(error) = outcome {
                    lock(&shared.failure).get_or_insert(error.into());
                }
            };
            match device.gpu() {
                Ok(gpu) => gpu.when_done(done),
                Err(error) => done(Err(error)),
            }
        }
    }
}

/// Calls a completion when its last handle is dropped.
struct AfterAll {
    /// `None` once it has been called.
    completion: Option<Completion>,
    failure: Mutex<Option<Cause>>,
}

impl Drop for AfterAll {
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            completion.complete(lock(&self.failure).take().map_or(Ok(()), Err));
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(started) = self.started.take() {
            started.dropped.store(1, Ordering::Relaxed);
            started.party_ends(None);
        }
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl Started {
    /// Calls an operation's closure with its completion.
    pub(crate) fn begin(
        node: &Arc<Node>,
        runner: Arc<dyn Runner>,
        start: impl FnOnce(Completion) -> Result<(), Cause>,
    ) {
        let (pending, reason, dropped) = (AtomicU32::new(2), Mutex::new(None), AtomicU32::new(0));
        let started = Arc::new(Started { node: node.clone(), runner, pending, reason, dropped });
        let completion = Completion { started: Some(started.clone()) };
        let reason = match catch_unwind(AssertUnwindSafe(|| start(completion))) {
            Ok(outcome) => outcome.err().map(Reason::Error),
            Err(panic) => Some(Reason::Panic(panic_text(panic.as_ref()))),
        };
        started.party_ends(reason);
    }

    /// Either of the two that an operation consists of has ended. The second ends the operation.
    fn party_ends(&self, reason: Option<Reason>) {
        if let Some(reason) = reason {
            lock(&self.reason).get_or_insert(reason);
        }
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            let dropped = (self.dropped.load(Ordering::Relaxed) == 1)
                .then(|| Reason::Error("its completion was dropped before it was called".into()));
            let outcome = lock(&self.reason).take().or(dropped).map_or(Outcome::Done, Outcome::Failed);
            self.runner.ended(self.node.clone(), outcome);
        }
    }
}
