//! [`Crew`]: one job at a time, its caller, and whoever comes in time to help.
#![allow(unsafe_code)]

use super::watch::{give_way, watch};
use crate::sync::{AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, UnsafeCell, fence, lock, sleep};

/// The state's lowest bits: helpers that joined the job.
const JOINED: u64 = (1 << 30) - 1;
/// Set while helpers may join.
const OPEN: u64 = 1 << 30;
/// Set when the pool ends.
const CLOSING: u64 = 1 << 31;
/// The job's number is counted in the bits above.
const NUMBER: u64 = 1 << 32;

/// What the caller of a job and its helpers share. Helpers are threads that wait for every job ([`Crew::work`]), or
/// threads of somebody else's that are invited to each ([`Crew::invite`]).
#[derive(Default)]
pub(super) struct Crew {
    /// The job's number, [`CLOSING`], [`OPEN`], [`JOINED`].
    state: AtomicU64,
    /// Helpers that have left the job.
    left: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    /// Invitations whose threads have not come yet.
    invited: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// What a job's threads call, its lifetime forgotten; [`Crew::run`] outlives every call.
type Job = &'static (dyn Fn() + Sync);

// SAFETY: `job` is written by the one caller that has the crew (`Pool::busy`) while nobody can join, and read by helpers
// that have joined, after the state was stored with release and loaded with acquire.
unsafe impl Sync for Crew {}
// SAFETY: a job may be called on any thread.
unsafe impl Send for Crew {}

impl Crew {
    /// Calls `job` on this thread, and on each helper that joins before this thread's call has returned; returns when all calls
    /// have. `invite` is called as soon as helpers can join.
    ///
    /// # Safety
    /// One thread at a time may call it, and neither `job` nor `invite` may unwind.
    pub(super) unsafe fn run(&self, job: &(dyn Fn() + Sync), invite: impl FnOnce()) {
        self.left.store(0, Ordering::Relaxed);
        // SAFETY: helpers call it only between joining and leaving. None can join once the job is closed, below, and this
        // function returns when all that joined have left: within the lifetime.
        let job_of_all = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), Job>(job) };
        // SAFETY: no helper reads the cell: those of the last job have left it, and this one is not open yet.
        self.job.with_mut(|place| unsafe { *place = Some(job_of_all) });
        self.publish(OPEN);
        invite();
        job();
        let joined = self.state.fetch_and(!OPEN, Ordering::AcqRel) & JOINED;
        let all_left = || (self.left.load(Ordering::Acquire) == joined).then_some(());
        while watch(all_left).is_none() {
            give_way();
        }
    }

    /// Ends the workers' lives.
    pub(super) fn close(&self) {
        self.publish(CLOSING);
    }

    /// Makes a new job's state known.
    fn publish(&self, flags: u64) {
        let number = self.state.load(Ordering::Relaxed) / NUMBER;
        self.state.store((number.wrapping_add(1) * NUMBER) | flags, Ordering::Release);
        // A worker counts itself among the sleepers before it looks at the state for the last time, and a guest takes
        // its invitation before it looks: of two that store and then look at the other's, one sees the other's.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
    }

    /// A worker's life.
    pub(super) fn work(&self) {
        let mut seen = 0;
        loop {
            let state = self.wait_for_change(seen);
            if state & CLOSING != 0 {
                return;
            }
            seen = state / NUMBER;
            self.take_part(seen);
        }
    }

    /// Invites up to `wanted` threads, less those that were invited before and have not come yet. `invite` is called for each and
    /// has some thread call [`Crew::come`], at whatever time.
    pub(super) fn invite(&self, wanted: usize, invite: impl Fn()) {
        let one_more = |invited: usize| (invited < wanted).then_some(invited + 1);
        for _ in 0..wanted {
            if self.invited.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
                break;
            }
            invite();
        }
    }

    /// Takes part in the job that is open, if one is.
    pub(super) fn come(&self) {
        self.invited.fetch_sub(1, Ordering::Relaxed);
        fence(Ordering::SeqCst); // see `publish`
        self.take_part(self.state.load(Ordering::Acquire) / NUMBER);
    }

    /// Does job `number` with the others unless it is closed.
    fn take_part(&self, number: u64) {
        let joined = |state: u64| (state / NUMBER == number && state & OPEN != 0).then_some(state + 1);
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, joined).is_ok() {
            // SAFETY: written before the state this thread joined at; stays until it has left.
            if let Some(job) = self.job.with(|job| unsafe { *job }) {
                job();
            }
            self.left.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits for a state whose number is not `seen`.
    fn wait_for_change(&self, seen: u64) -> u64 {
        let changed = || Some(self.state.load(Ordering::Acquire)).filter(|state| state / NUMBER != seen);
        if let Some(state) = watch(changed) {
            return state;
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst); // see `publish`
        let state = loop {
            match changed() {
                Some(state) => break state,
                None => guard = sleep(&self.wake, guard),
            }
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        state
    }
}
