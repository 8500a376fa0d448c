//! Contexts: which one a thread works in, and whether it is lost.
//!
//! A fault loses the context it happened in, as on hardware: every later call in it gives the fault's status, until
//! the context is destroyed or reset.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::lock;
use phalanx_emulator_link::status::StatusCode;

use crate::device::{Device, devices};
use crate::status::{self, Failure, Result, Status};

/// A context of a device.
#[derive(Debug)]
pub(crate) struct Context {
    /// A number that no other context has.
    pub id: u64,
    pub ordinal: usize,
    devices: &'static [Device],
    /// The fault that has ended the context, with its reason.
    lost: Mutex<Option<(Status, String)>>,
    /// Ordinals of the other devices whose memory this context's kernels may reach.
    peers: Mutex<Vec<usize>>,
}

/// All contexts.
pub(crate) static CONTEXTS: Handles<Arc<Context>> = Handles::new("context", 1);

/// A device's primary context.
#[derive(Debug)]
struct Primary {
    handle: usize,
    context: Arc<Context>,
    /// How often it is retained.
    count: usize,
}

/// The primary context of each device that has one.
static PRIMARY: Mutex<BTreeMap<usize, Primary>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The contexts that this thread has pushed; the last is current.
    static STACK: RefCell<Vec<(usize, Arc<Context>)>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    pub(crate) fn new(devices: &'static [Device], ordinal: usize) -> Context {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        Context { id, ordinal, devices, lost: Mutex::default(), peers: Mutex::default() }
    }

    pub(crate) fn device(&self) -> &'static Device {
        // A context is made for a device that exists.
        &self.devices[self.ordinal]
    }

    /// Devices whose memory kernels may reach: its own, then its peers'.
    pub(crate) fn reachable(&self) -> Vec<&'static Device> {
        let peers = lock(&self.peers).clone();
        std::iter::once(self.ordinal).chain(peers).map(|i| &self.devices[i]).collect()
    }

    fn fault(&self) -> MutexGuard<'_, Option<(Status, String)>> {
        lock(&self.lost)
    }

    /// The status that every call gives if a fault has ended this context. Whichever thread it happened on, this one
    /// can ask for its reason now.
    fn lost(&self) -> Option<Status> {
        let (status, reason) = self.fault().clone()?;
        status::keep(status, &reason);
        Some(status)
    }

    /// Whether the context still works.
    ///
    /// # Errors
    /// The status of the fault that ended it, without a reason: that was reported when it happened.
    pub(crate) fn check(&self) -> Result<()> {
        self.lost().map_or(Ok(()), |status| Err(status.into()))
    }

    /// The status of the fault that ended it, as C has it; 0 if it works. It keeps no reason for this thread.
    pub(crate) fn status_number(&self) -> i32 {
        self.fault().as_ref().map_or(0, |(status, _)| status.number())
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.fault().is_some()
    }

    /// A fault of the operation `what` ends this context. Only the first one is reported.
    pub(crate) fn lose(&self, failure: Failure, what: &str) {
        let mut lost = self.fault();
        if lost.is_none() {
            let reason = status::explain(what, &failure);
            *lost = Some((failure.status, reason));
        }
    }

    /// Lets kernels reach the memory of another device; `false` if they could already.
    pub(crate) fn add_peer(&self, ordinal: usize) -> bool {
        let mut peers = lock(&self.peers);
        let is_new = !peers.contains(&ordinal);
        if is_new {
            peers.push(ordinal);
        }
        is_new
    }

    /// Takes [`add_peer`](Context::add_peer) back; `false` if there is nothing to take back.
    pub(crate) fn remove_peer(&self, ordinal: usize) -> bool {
        let mut peers = lock(&self.peers);
        let before = peers.len();
        peers.retain(|peer| *peer != ordinal);
        peers.len() != before
    }
}

/// The context that this thread works in.
pub(crate) fn current() -> Option<Arc<Context>> {
    STACK.with_borrow(|stack| stack.last().map(|(_, context)| context.clone()))
}

/// The context that this thread works in.
///
/// # Errors
/// There is none.
pub(crate) fn here() -> Result<Arc<Context>> {
    current().ok_or_else(|| Status::INVALID_CONTEXT.because("no context is current to this thread"))
}

/// Makes a context current to this thread.
pub(crate) fn push(handle: usize) -> Result<()> {
    devices()?;
    let context = CONTEXTS.get(handle)?;
    STACK.with_borrow_mut(|stack| stack.push((handle, context)));
    Ok(())
}

/// Makes the context current that was before this thread's current one, whose handle it gives.
pub(crate) fn pop() -> Option<usize> {
    STACK.with_borrow_mut(|stack| stack.pop()).map(|(handle, _)| handle)
}

/// The current context's handle; 0 if there is none.
pub(crate) fn current_handle() -> usize {
    STACK.with_borrow(|stack| stack.last().map_or(0, |(handle, _)| *handle))
}

/// Removes a context that is destroyed from those that this thread has pushed.
pub(crate) fn unstack(handle: usize) {
    STACK.with_borrow_mut(|stack| stack.retain(|(other, _)| *other != handle));
}

fn primary() -> MutexGuard<'static, BTreeMap<usize, Primary>> {
    lock(&PRIMARY)
}

/// The handle of a device's primary context, which exists from now on.
pub(crate) fn retain_primary(device: &Device) -> Result<usize> {
    let (devices, ordinal) = (devices()?, device.ordinal);
    let mut primary = primary();
    let found = primary.entry(ordinal).or_insert_with(|| {
        let context = Arc::new(Context::new(devices, ordinal));
        Primary { handle: CONTEXTS.add(context.clone()), context, count: 0 }
    });
    found.count += 1;
    Ok(found.handle)
}

/// Takes one `retain` back, or all of them. Gives the context and its handle if they were the last.
///
/// # Errors
/// No primary context is retained; with `all` that is no error.
pub(crate) fn release_primary(device: &Device, all: bool) -> Result<Option<(usize, Arc<Context>)>> {
    let mut primary = primary();
    let Some(found) = primary.get_mut(&device.ordinal) else {
        return if all {
            Ok(None)
        } else {
            Err(Status::INVALID_CONTEXT.because("no primary context is retained"))
        };
    };
    found.count -= 1;
    let is_last = found.count == 0 || all;
    let gone = if is_last { primary.remove(&device.ordinal) } else { None };
    Ok(gone.map(|primary| (primary.handle, primary.context)))
}

/// Whether the device's primary context exists.
pub(crate) fn is_primary_active(device: &Device) -> bool {
    primary().contains_key(&device.ordinal)
}
