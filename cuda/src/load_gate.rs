//! The load gate: nothing is loaded into a GPU while a collective is under way there.
//!
//! Loading a module may wait until the GPU is idle, and blocks other threads' launches meanwhile. A collective runs
//! on a GPU until the other ranks' GPUs have come to theirs. So two ranks can deadlock:
//!
//! ```text
//! rank 0:  collective 1 runs, waits for rank 1      load waits for collective 1
//! rank 1:  load waits for collective 2              collective 2 runs, waits for rank 0
//! ```
//!
//! The gate prevents it. A thread that loads first waits until no collective is under way, and holds up no other
//! thread while it waits. A thread that launches a collective waits for a load in progress; that load cannot be
//! blocked by a collective, so it ends. Devices that share a GPU share its gate.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::context::{Context, GpuEvent, lock};

/// How long a thread that waits to load sleeps before it asks again whether the collectives have ended.
const POLL: Duration = Duration::from_micros(100);

/// The gate of a GPU.
pub(crate) type LoadGate = Gate<GpuEvent>;

/// Which threads of one GPU may load or launch. `E` is the event at the end of a collective ([`GpuEvent`]; another type
/// in tests).
#[derive(Debug)]
pub(crate) struct Gate<E> {
    state: Mutex<State<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<E> {
    is_loading: bool,
    /// Threads that launch a collective at this moment.
    entering: usize,
    under_way: Vec<E>,
}

impl<E> Default for Gate<E> {
    fn default() -> Gate<E> {
        let state = State { is_loading: false, entering: 0, under_way: Vec::new() };
        Gate { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<E> Gate<E> {
    fn lock(&self) -> MutexGuard<'_, State<E>> {
        lock(&self.state)
    }

    /// Waits until nothing is being loaded; then the thread may launch a collective.
    fn enter(&self) {
        let loading = |state: &mut State<E>| state.is_loading;
        let wait = self.changed.wait_while(self.lock(), loading);
        wait.unwrap_or_else(PoisonError::into_inner).entering += 1;
    }

    /// The thread has launched its collective. `ends` is the event at its end, if one could be recorded.
    fn leave(&self, ends: Option<E>, is_over: impl Fn(&E) -> bool) {
        let mut state = self.lock();
        state.entering -= 1;
        state.under_way.retain(|work| !is_over(work));
        state.under_way.extend(ends);
    }

    /// Calls `load` when no collective is under way.
    fn load_by<T>(&self, is_over: impl Fn(&E) -> bool, load: impl FnOnce() -> T) -> T {
        let mut state = self.lock();
        loop {
            state.under_way.retain(|work| !is_over(work));
            if !state.is_loading && state.entering == 0 && state.under_way.is_empty() {
                break;
            }
            state = self.changed.wait_timeout(state, POLL).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_loading = true;
        drop(state);
        let _end = LoadGuard(self);
        load()
    }
}

impl LoadGate {
    /// Calls `load`, which may wait until the GPU is idle, when no collective is under way.
    pub(crate) fn load<T>(&self, load: impl FnOnce() -> T) -> T {
        self.load_by(is_over, load)
    }
}

/// Ends a load, also one that panics.
struct LoadGuard<'a, E>(&'a Gate<E>);

impl<E> Drop for LoadGuard<'_, E> {
    fn drop(&mut self) {
        self.0.lock().is_loading = false;
        self.0.changed.notify_all();
    }
}

/// The gate of GPU number `ordinal`.
pub(crate) fn load_gate(ordinal: usize) -> Arc<LoadGate> {
    static GATES: Mutex<BTreeMap<usize, Arc<LoadGate>>> = Mutex::new(BTreeMap::new());
    Arc::clone(lock(&GATES).entry(ordinal).or_default())
}

/// A failure means that the device is lost: there is nothing to wait for.
fn is_over(work: &GpuEvent) -> bool {
    work.is_done().unwrap_or(true)
}

/// While it lives, its thread launches a collective. See [`Gpu::enter_collective`](crate::Gpu::enter_collective).
#[derive(Debug)]
pub struct CollectiveGuard {
    context: &'static Context,
    gate: &'static LoadGate,
}

impl CollectiveGuard {
    pub(crate) fn new(context: &'static Context, gate: &'static LoadGate) -> CollectiveGuard {
        gate.enter();
        CollectiveGuard { context, gate }
    }
}

impl Drop for CollectiveGuard {
    fn drop(&mut self) {
        self.gate.leave(GpuEvent::record(self.context).ok(), is_over);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    fn is_over(ended: &Arc<AtomicBool>) -> bool {
        ended.load(Ordering::SeqCst)
    }

    #[test]
    fn a_load_waits_for_what_is_under_way_and_lets_more_be_given() {
        let (gate, loaded) = (Gate::default(), AtomicBool::new(false));
        let work = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        gate.enter();
        thread::scope(|scope| {
            scope.spawn(|| gate.load_by(is_over, || loaded.store(true, Ordering::SeqCst)));
            gate.leave(Some(work[0].clone()), is_over);
            // The load waits, but holds up no collective: the one that is under way may need the next.
            gate.enter();
            work[0].store(true, Ordering::SeqCst);
            gate.leave(Some(work[1].clone()), is_over);
            thread::sleep(10 * POLL);
            assert!(!loaded.load(Ordering::SeqCst));
            work[1].store(true, Ordering::SeqCst);
        });
        assert!(loaded.load(Ordering::SeqCst));
    }

    #[test]
    fn what_is_given_waits_for_a_load_even_one_that_panics() {
        let (gate, loading, ended) =
            (Gate::<Arc<AtomicBool>>::default(), AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let load = scope.spawn(|| {
                gate.load_by(is_over, || {
                    loading.store(true, Ordering::SeqCst);
                    thread::sleep(20 * POLL);
                    ended.store(true, Ordering::SeqCst);
                    panic!("as planned");
                });
            });
            while !loading.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            gate.enter();
            assert!(ended.load(Ordering::SeqCst));
            gate.leave(None, is_over);
            assert!(load.join().is_err());
        });
    }
}
