//! [`WorkerGroup`]: one job at a time, its caller, and the threads that join in time to help. [`spin`]: waiting without sleeping.
#![allow(unsafe_code)]

use std::sync::LazyLock;
use std::sync::atomic::AtomicU64 as StdAtomicU64;
use std::time::{Duration, Instant};

use crate::sync::{
    AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, UnsafeCell, fence, lock_modelled, sleep, yield_now,
};

/// The state's lowest bits: helpers that joined the job.
const JOINED: u64 = (1 << 30) - 1;
/// Set while helpers may join.
const OPEN: u64 = 1 << 30;
/// Set when the pool ends.
const CLOSING: u64 = 1 << 31;
/// The job's number is counted in the bits above.
const NUMBER: u64 = 1 << 32;

/// The state that the caller of a job shares with its helpers. Helpers are workers that wait for every job ([`WorkerGroup::work`]), or
/// threads of another pool that are invited to each job ([`WorkerGroup::invite`]).
///
/// ```text
/// caller:   publish(OPEN) ── invite ── job() ── close ── wait until left == joined
/// helper:        join (state + 1) ────── job() ────── left + 1          a helper that comes after `close` does not join
/// ```
#[derive(Default)]
pub(crate) struct WorkerGroup {
    /// The job's number, [`CLOSING`], [`OPEN`], [`JOINED`].
    state: AtomicU64,
    /// Helpers that have left the job.
    left: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    /// Invitations that no thread has followed yet.
    invited: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// The function that a job's threads call. Its lifetime is erased; [`WorkerGroup::run`] outlives every call.
type Job = &'static (dyn Fn() + Sync);

// SAFETY: `job` is written by the one caller that has the group (`Pool::busy`) while no helper can join, and read by helpers
// that have joined, after the state was stored with release and loaded with acquire.
unsafe impl Sync for WorkerGroup {}
// SAFETY: a job may be called on any thread.
unsafe impl Send for WorkerGroup {}

impl WorkerGroup {
    /// Calls `job` on this thread, and on each helper that joins before this thread's call has returned; returns when all calls
    /// have. `invite` is called as soon as helpers can join.
    ///
    /// # Safety
    /// One thread at a time may call it, and neither `job` nor `invite` may unwind.
    pub(crate) unsafe fn run(&self, job: &(dyn Fn() + Sync), invite: impl FnOnce()) {
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
        while spin(all_left).is_none() {
            let_others_run();
        }
    }

    /// Ends the workers.
    pub(crate) fn close(&self) {
        self.publish(CLOSING);
    }

    /// Publishes a new job's state.
    fn publish(&self, flags: u64) {
        let number = self.state.load(Ordering::Relaxed) / NUMBER;
        self.state.store((number.wrapping_add(1) * NUMBER) | flags, Ordering::Release);
        // A worker counts itself among the sleepers before it looks at the state for the last time, and an invited thread
        // takes its invitation before it looks. Of two threads that store and then look at the other's store, one sees the other's.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(lock_modelled(&self.lock));
            self.wake.notify_all();
        }
    }

    /// Runs a worker: it takes part in each job until the group is closed.
    pub(crate) fn work(&self) {
        let mut seen = 0;
        loop {
            let state = self.wait_for_change(seen);
            if state & CLOSING != 0 {
                return;
            }
            seen = state / NUMBER;
            self.join_job(seen);
        }
    }

    /// Invites up to `wanted` threads, less those that were invited before and have not come yet. For each it calls `invite`, which has a
    /// thread call [`WorkerGroup::follow_invitation`] at some time. Returns whether it has called `invite`.
    pub(crate) fn invite(&self, wanted: usize, invite: impl Fn()) -> bool {
        let one_more = |invited: usize| (invited < wanted).then_some(invited + 1);
        for nth in 0..wanted {
            if self.invited.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
                return nth > 0;
            }
            invite();
        }
        wanted > 0
    }

    /// Takes part in the job that is open, if one is.
    pub(crate) fn follow_invitation(&self) {
        self.invited.fetch_sub(1, Ordering::Relaxed);
        fence(Ordering::SeqCst); // see `publish`
        self.join_job(self.state.load(Ordering::Acquire) / NUMBER);
    }

    /// Takes part in job `number` unless it is closed.
    fn join_job(&self, number: u64) {
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
        if let Some(state) = spin(changed) {
            return state;
        }
        let mut guard = lock_modelled(&self.lock);
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

/// How long a thread spins before it sleeps or lets others run.
#[cfg_attr(feature = "loom", allow(dead_code))] // a model asks once
pub(crate) const SPIN_MAX: Duration = Duration::from_micros(200);
/// A spinning thread that is interrupted for longer than this was preempted: other threads want the processors.
const PREEMPTED_MIN: Duration = Duration::from_micros(400);
/// How long no thread spins after a preemption.
const BACKOFF: Duration = Duration::from_millis(50);

/// Asks until there is an answer, for at most [`SPIN_MAX`]; a few times only while other threads want the processors.
#[cfg(not(feature = "loom"))]
pub(crate) fn spin<T>(ask: impl Fn() -> Option<T>) -> Option<T> {
    let start = now();
    let (end, mut last) = (start + CONTENTION.spin_time(start), start);
    loop {
        for _ in 0..32 {
            if let Some(answer) = ask() {
                return Some(answer);
            }
            std::hint::spin_loop();
        }
        let now = now();
        CONTENTION.note(last, now);
        if now > end {
            return None;
        }
        last = now;
    }
}

/// A model asks once: spinning changes when things happen, not what.
#[cfg(feature = "loom")]
pub(crate) fn spin<T>(ask: impl Fn() -> Option<T>) -> Option<T> {
    ask()
}

/// Lets others run.
pub(crate) fn let_others_run() {
    let from = now();
    yield_now();
    CONTENTION.note(from, now());
}

/// Since the first call.
fn now() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

/// Whether other threads want the processors.
static CONTENTION: Contention = Contention { until: StdAtomicU64::new(0) };

struct Contention {
    /// Until when no thread spins, in nanoseconds of [`now`].
    until: StdAtomicU64,
}

impl Contention {
    /// Notes the times before and after something short.
    fn note(&self, before: Duration, after: Duration) {
        if after.saturating_sub(before) > PREEMPTED_MIN {
            self.until.store((after + BACKOFF).as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// How long to spin.
    #[cfg_attr(feature = "loom", allow(dead_code))]
    fn spin_time(&self, now: Duration) -> Duration {
        if now.as_nanos() < u128::from(self.until.load(Ordering::Relaxed)) {
            Duration::ZERO
        } else {
            SPIN_MAX
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_watches_for_a_while_after_a_thread_was_gone() {
        let (contention, at) = (Contention { until: StdAtomicU64::new(0) }, Duration::from_micros);
        contention.note(at(0), at(399));
        assert_eq!(contention.spin_time(at(399)), SPIN_MAX);
        contention.note(at(1000), at(1500));
        assert_eq!(
            [1500, 51_499, 51_500].map(|t| contention.spin_time(at(t))),
            [Duration::ZERO, Duration::ZERO, SPIN_MAX]
        );
    }
}
