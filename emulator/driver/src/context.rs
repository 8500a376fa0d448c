//! Contexts: which one a thread works in, and whether it is lost.
//!
//! A fault loses the context it happened in, as on hardware: every later call in it gives the fault's status, until
//! the context is destroyed or reset.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_emulator_link::pointer::{Host, Out};

use crate::device::{Device, device};
use crate::report;
use crate::status::{Failure, Result, Status};
use crate::world::{World, world};

/// A context of a device.
#[derive(Debug)]
pub(crate) struct Context {
    /// Counts contexts.
    pub id: u64,
    pub ordinal: usize,
    world: &'static World,
    /// The fault that has ended it, with its reason.
    lost: Mutex<Option<(Status, String)>>,
    /// Contexts whose memory kernels of this one may reach.
    peers: Mutex<Vec<usize>>,
}

thread_local! {
    /// The contexts that this thread has pushed; the last is current.
    static STACK: RefCell<Vec<(usize, Arc<Context>)>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    pub(crate) fn new(world: &'static World, ordinal: usize) -> Context {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        Context { id, ordinal, world, lost: Mutex::default(), peers: Mutex::default() }
    }

    pub(crate) fn world(&self) -> &'static World {
        self.world
    }

    pub(crate) fn device(&self) -> &'static Device {
        // A context is made for a device that exists.
        &self.world.devices[self.ordinal]
    }

    /// Devices whose memory kernels may reach: its own, then its peers'.
    pub(crate) fn reachable(&self) -> Vec<&'static Device> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        std::iter::once(self.ordinal).chain(peers).map(|i| &self.world.devices[i]).collect()
    }

    fn fault(&self) -> MutexGuard<'_, Option<(Status, String)>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The status that every call gives if a fault has ended this context. Whichever thread it happened on, this one can
    /// ask for its reason now.
    pub(crate) fn lost(&self) -> Option<Status> {
        let (status, reason) = self.fault().clone()?;
        report::keep(status, &reason);
        Some(status)
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.fault().is_some()
    }

    /// A fault of `what` ends this context. Only the first is told.
    pub(crate) fn lose(&self, failure: Failure, what: &str) {
        let mut lost = self.fault();
        if lost.is_none() {
            let reason = report::explain(what, &failure);
            *lost = Some((failure.status, reason));
        }
    }

    /// The end of the context: what is queued in it runs, then nothing is left of it.
    pub(crate) fn end(&self, world: &World) {
        crate::stream::synchronize_all(world, self.id);
        world.lanes().forget(self.id, world);
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

fn push(handle: usize) -> Result<()> {
    let context = world()?.contexts.get(handle)?;
    STACK.with_borrow_mut(|stack| stack.push((handle, context)));
    Ok(())
}

fn pop() -> Option<usize> {
    STACK.with_borrow_mut(|stack| stack.pop()).map(|(handle, _)| handle)
}

fn create(out: Out<usize>, ordinal: i32) -> Result<()> {
    let (device, world) = (device(ordinal)?, world()?);
    let handle = world.contexts.add(Arc::new(Context::new(world, device.ordinal)));
    set!(out, handle)?;
    push(handle)
}

/// The primary context's device, if a lost context is to be looked at or left.
fn current_handle() -> usize {
    STACK.with_borrow(|stack| stack.last().map_or(0, |(handle, _)| *handle))
}

fn peer(handle: usize) -> Result<(Arc<Context>, usize)> {
    let (here, other) = (here()?, world()?.contexts.get(handle)?);
    if here.ordinal == other.ordinal {
        return Err(Status::INVALID_DEVICE.because("a device is no peer of itself"));
    }
    Ok((here, other.ordinal))
}

export! {
    @always {
        fn cuCtxCreate_v2(out: Out<usize>, flags: u32, ordinal: i32) { create(out, ordinal) }
        fn cuCtxCreate_v3(out: Out<usize>, affinity: Host, count: i32, flags: u32, ordinal: i32) { create(out, ordinal) }
        fn cuCtxCreate_v4(out: Out<usize>, parameters: Host, flags: u32, ordinal: i32) { create(out, ordinal) }
        fn cuCtxGetCurrent(out: Out<usize>) { set!(out, current_handle()) }
        fn cuCtxSetCurrent(handle: usize) {
            if handle != current_handle() {
                let context = if handle == 0 { None } else { Some(world()?.contexts.get(handle)?) };
                pop();
                if context.is_some() {
                    push(handle)?;
                }
            }
            Ok(())
        }
        fn cuCtxPushCurrent_v2(handle: usize) { push(handle) }
        fn cuCtxPopCurrent_v2(out: Out<usize>) {
            let handle = pop().ok_or_else(|| Status::INVALID_CONTEXT.because("no context is current to this thread"))?;
            if out.is_null() { Ok(()) } else { set!(out, handle) }
        }
        fn cuCtxDestroy_v2(handle: usize) {
            let context = world()?.contexts.remove(handle)?;
            context.end(world()?);
            STACK.with_borrow_mut(|stack| stack.retain(|(other, _)| *other != handle));
            Ok(())
        }
    }
    fn cuCtxGetDevice(out: Out<i32>) { set!(out, here()?.ordinal as i32) }
    fn cuCtxGetId(context: usize, out: Out<u64>) {
        let context = if context == 0 { here()? } else { world()?.contexts.get(context)? };
        set!(out, context.id)
    }
    fn cuCtxGetApiVersion(context: usize, version: Out<u32>) { set!(version, 3020) }
    fn cuCtxGetFlags(flags: Out<u32>) { set!(flags, 0) }
    fn cuCtxSetFlags(flags: u32) { here().map(|_| ()) }
    fn cuCtxGetCacheConfig(config: Out<i32>) { set!(config, 0) }
    fn cuCtxSetCacheConfig(config: i32) { here().map(|_| ()) }
    fn cuCtxGetLimit(bytes: Out<usize>, limit: i32) {
        here()?;
        // Stack, printf's buffer, the device's heap.
        let known = [1 << 10, 1 << 20, 8 << 20].get(usize::try_from(limit).unwrap_or(usize::MAX)).copied();
        set!(bytes, known.unwrap_or(0))
    }
    fn cuCtxSetLimit(limit: i32, bytes: usize) { here().map(|_| ()) }
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        here()?;
        if !least.is_null() {
            set!(least, crate::stream::PRIORITY_LEAST)?;
        }
        if greatest.is_null() { Ok(()) } else { set!(greatest, crate::stream::PRIORITY_GREATEST) }
    }
    fn cuCtxSynchronize() {
        let context = here()?;
        crate::capture::forbidden("cuCtxSynchronize")?;
        crate::stream::synchronize_all(context.world(), context.id);
        context.lost().map_or(Ok(()), |status| Err(status.into()))
    }
    fn cuCtxEnablePeerAccess(handle: usize, flags: u32) {
        let (here, other) = peer(handle)?;
        let mut peers = here.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.contains(&other) {
            return Err(Status::PEER_ACCESS_ALREADY_ENABLED.into());
        }
        peers.push(other);
        Ok(())
    }
    fn cuCtxDisablePeerAccess(handle: usize) {
        let (here, other) = peer(handle)?;
        let mut peers = here.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let before = peers.len();
        peers.retain(|peer| *peer != other);
        if peers.len() == before { Err(Status::PEER_ACCESS_NOT_ENABLED.into()) } else { Ok(()) }
    }
}
