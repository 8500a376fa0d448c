//! [`Gpu::quietly`] and [`Gpu::meet`]: nothing is loaded into a GPU while work there waits for other GPUs.
//!
//! Loading a program may wait until a GPU is idle, and keep other threads from giving it work meanwhile. A collective runs on a
//! GPU until the other ranks' GPUs have come to theirs. If two ranks load while each has given one that the other has not,
//! neither ever ends. So who loads waits first, hindering nobody, until no such work is under way; who has such work to give
//! waits for loads, which then end by themselves. Devices that share a GPU share all this.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Gpu, GpuEvent};

/// Between two looks at what is under way.
const LOOK: Duration = Duration::from_micros(100);

/// Who may go on, on one GPU; `E` tells when work has ended.
#[derive(Debug)]
pub(super) struct Gate<E> {
    state: Mutex<State<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<E> {
    is_loading: bool,
    /// Threads that give work at this moment.
    giving: usize,
    under_way: Vec<E>,
}

impl<E> Default for Gate<E> {
    fn default() -> Gate<E> {
        let state = State { is_loading: false, giving: 0, under_way: Vec::new() };
        Gate { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<E> Gate<E> {
    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something is about to be given, when nothing is being loaded.
    fn enter(&self) {
        let loading = |state: &mut State<E>| state.is_loading;
        let wait = self.changed.wait_while(self.lock(), loading);
        wait.unwrap_or_else(PoisonError::into_inner).giving += 1;
    }

    /// It was given: when it ends, if that can be known.
    fn leave(&self, ends: Option<E>, is_over: impl Fn(&E) -> bool) {
        let mut state = self.lock();
        state.giving -= 1;
        state.under_way.retain(|work| !is_over(work));
        state.under_way.extend(ends);
    }

    /// Loads when nothing is under way.
    fn quietly<T>(&self, is_over: impl Fn(&E) -> bool, load: impl FnOnce() -> T) -> T {
        let mut state = self.lock();
        loop {
            state.under_way.retain(|work| !is_over(work));
            if !state.is_loading && state.giving == 0 && state.under_way.is_empty() {
                break;
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_loading = true;
        drop(state);
        let _end = Loaded(self);
        load()
    }
}

/// Ends a load, whatever became of it.
struct Loaded<'a, E>(&'a Gate<E>);

impl<E> Drop for Loaded<'_, E> {
    fn drop(&mut self) {
        self.0.lock().is_loading = false;
        self.0.changed.notify_all();
    }
}

/// The gate of GPU number `ordinal`.
pub(super) fn gate(ordinal: usize) -> Arc<Gate<GpuEvent>> {
    static GATES: Mutex<BTreeMap<usize, Arc<Gate<GpuEvent>>>> = Mutex::new(BTreeMap::new());
    let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(gates.entry(ordinal).or_default())
}

/// A failure means that the device is lost: there is nothing to wait for.
fn is_over(work: &GpuEvent) -> bool {
    work.is_done().unwrap_or(true)
}

/// While this is there, its thread gives work that waits on the GPU for other GPUs.
#[derive(Debug)]
pub struct Meeting(&'static Gpu);

impl Gpu {
    /// Before work is given to this thread's stream that does not end before other GPUs have come to theirs; until the guard is
    /// dropped. Nothing is loaded meanwhile, and until the work has ended, so the thread must not use a kernel for
    /// the first time.
    pub fn meet(&'static self) -> Meeting {
        self.gate.enter();
        Meeting(self)
    }

    /// Runs `load`, which may wait until the GPU is idle, when nothing there waits for other GPUs.
    pub(super) fn quietly<T>(&self, load: impl FnOnce() -> T) -> T {
        self.gate.quietly(is_over, load)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.0.gate.leave(GpuEvent::record(self.0).ok(), is_over);
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
            scope.spawn(|| gate.quietly(is_over, || loaded.store(true, Ordering::SeqCst)));
            gate.leave(Some(work[0].clone()), is_over);
            // The load waits, but holds nobody up: what is under way may need this.
            gate.enter();
            work[0].store(true, Ordering::SeqCst);
            gate.leave(Some(work[1].clone()), is_over);
            thread::sleep(10 * LOOK);
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
                gate.quietly(is_over, || {
                    loading.store(true, Ordering::SeqCst);
                    thread::sleep(20 * LOOK);
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
