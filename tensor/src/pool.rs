//! A device's thread pool: runs the pieces of one operation, the calling thread among its workers.
//!
//! An operation of a training step lasts some ten microseconds to some milliseconds, and the next follows at once. So
//! workers watch for a while before they sleep, and a job is published by one store and joined by one exchange: waking
//! a sleeping thread costs more than many an operation. A worker that comes too late is not waited for. Where others want
//! the processors too nobody watches: a thread that spins uses up the time that it will want for its next piece.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread watches for a change, keeping its processor, before it sleeps or lets others run.
const WATCH: Duration = Duration::from_micros(200);
/// A thread that asks for nothing longer than this was not running: others want the processors.
const GONE: Duration = Duration::from_micros(400);
/// How long nobody watches after that.
const CROWDED: Duration = Duration::from_millis(50);

/// Threads that share the pieces of an operation. The caller of [`Pool::for_each`] takes part, so a pool of
/// `n` threads keeps `n - 1` workers, and one of a single thread keeps none.
pub struct Pool {
    crew: Arc<Crew>,
    workers: Vec<JoinHandle<()>>,
    /// Whether an operation has the workers.
    busy: AtomicBool,
}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 counts as 1.
    ///
    /// If the system refuses to start workers the pool has fewer.
    pub fn new(threads: usize) -> Pool {
        let crew = Arc::new(Crew::default());
        let start = |_| {
            let crew = Arc::clone(&crew);
            std::thread::Builder::new().name("phalanx".into()).spawn(move || crew.work()).ok()
        };
        let workers = (1..threads).map_while(start).collect();
        Pool { crew, workers, busy: AtomicBool::new(false) }
    }

    /// How many threads work on an operation.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0) .. f(pieces - 1)`, each once, on whichever thread is free, and returns when all are done.
    /// A panic in a piece is passed on to the caller after the others have finished.
    ///
    /// While one operation has the workers, others (of other threads, or inside a piece) run on their callers.
    pub fn for_each(&self, pieces: usize, f: impl Fn(usize) + Sync) {
        self.run(pieces, &f);
    }

    /// [`Pool::for_each`], compiled once for all of its callers.
    fn run(&self, pieces: usize, f: &(dyn Fn(usize) + Sync)) {
        if pieces < 2 || self.workers.is_empty() || self.busy.swap(true, Ordering::Acquire) {
            return (0..pieces).for_each(f);
        }
        let (next, panicked) = (AtomicUsize::new(0), Mutex::new(None));
        self.crew.run(&|| {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    break;
                }
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(piece))) {
                    lock(&panicked).get_or_insert(panic);
                }
            }
        });
        self.busy.store(false, Ordering::Release);
        let panicked: Option<Box<dyn Any + Send>> = lock(&panicked).take();
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
    }

    /// Calls `f(i, data[i * chunk ..][.. chunk])` for every `i`, each once, on whichever thread is free; the last
    /// chunk is shorter where `chunk` does not divide the length, and without data there is none. Returns when all
    /// are done. A panic in a chunk is passed on to the caller after the others have finished.
    ///
    /// # Panics
    /// If `chunk` is 0.
    ///
    /// ```
    /// let (pool, mut data) = (phalanx_tensor::Pool::new(2), [0; 5]);
    /// pool.for_each_chunk(&mut data, 2, |i, chunk| chunk.fill(i));
    /// assert_eq!(data, [0, 0, 1, 1, 2]);
    /// ```
    pub fn for_each_chunk<T: Send>(&self, data: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        self.run_chunks(data, chunk, &f);
    }

    /// [`Pool::for_each_chunk`], compiled once for each type.
    fn run_chunks<T: Send>(&self, data: &mut [T], chunk: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        assert!(chunk > 0, "for_each_chunk: chunks of 0 elements");
        let (start, length) = (Shared(data.as_mut_ptr()), data.len());
        self.run(length.div_ceil(chunk), &|i| {
            let at = i * chunk;
            // SAFETY: `i` is below `length.div_ceil(chunk)`, so `at < length` and the slice ends inside `data`.
            // Every `i` comes once, so no two slices share an element; `data` is borrowed mutably by this call,
            // which `for_each` leaves only after the last piece has ended, in a panic too.
            let piece =
                unsafe { std::slice::from_raw_parts_mut(start.pointer().add(at), chunk.min(length - at)) };
            f(i, piece);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.crew.publish(CLOSING);
        for worker in self.workers.drain(..) {
            // Jobs catch their pieces' panics, so there is nothing to hear.
            let _ = worker.join();
        }
    }
}

/// The state's lowest bits: workers that joined the job.
const JOINED: u64 = (1 << 30) - 1;
/// Set while workers may join.
const OPEN: u64 = 1 << 30;
/// Set when the pool ends.
const CLOSING: u64 = 1 << 31;
/// The job's number is counted in the bits above.
const NUMBER: u64 = 1 << 32;

/// What the caller and the workers share.
#[derive(Default)]
struct Crew {
    /// The job's number, [`CLOSING`], [`OPEN`], [`JOINED`].
    state: AtomicU64,
    /// Workers that have left the job.
    left: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// What a job's threads call, its lifetime forgotten; [`Crew::run`] outlives every call.
type Job = &'static (dyn Fn() + Sync);

// SAFETY: `job` is written by the one caller that has the pool (`Pool::busy`) while nobody can join, and read by workers
// that have joined, after the state was stored with release and loaded with acquire.
unsafe impl Sync for Crew {}

impl Crew {
    /// Calls `job` on this thread and on every worker that comes before it is done here.
    fn run(&self, job: &(dyn Fn() + Sync)) {
        self.left.store(0, Ordering::Relaxed);
        // SAFETY: nobody has joined: the last job was closed and all that had joined have left. The lifetime ends
        // after the wait below, and `job` cannot unwind past it: pieces' panics are caught inside.
        unsafe { *self.job.get() = Some(std::mem::transmute::<&(dyn Fn() + Sync), Job>(job)) };
        self.publish(OPEN);
        job();
        let joined = self.state.fetch_and(!OPEN, Ordering::AcqRel) & JOINED;
        let all_left = || (self.left.load(Ordering::Acquire) == joined).then_some(());
        while watch(all_left).is_none() {
            let from = now();
            std::thread::yield_now();
            CROWD.note(from, now());
        }
    }

    /// Makes a new job's state known.
    fn publish(&self, flags: u64) {
        let number = self.state.load(Ordering::Relaxed) / NUMBER;
        self.state.store((number.wrapping_add(1) * NUMBER) | flags, Ordering::SeqCst);
        // A worker counts itself among the sleepers before it looks at the state for the last time.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
    }

    /// A worker's life.
    fn work(&self) {
        let mut seen = 0;
        loop {
            let state = self.wait_for_change(seen);
            if state & CLOSING != 0 {
                return;
            }
            seen = state / NUMBER;
            if self.join(seen) {
                // SAFETY: written before the state this thread joined at; stays until it has left.
                if let Some(job) = unsafe { *self.job.get() } {
                    job();
                }
                self.left.fetch_add(1, Ordering::Release);
            }
        }
    }

    /// Joins job `number` unless it is closed.
    fn join(&self, number: u64) -> bool {
        let joined = |state: u64| (state / NUMBER == number && state & OPEN != 0).then_some(state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, joined).is_ok()
    }

    /// Waits for a state whose number is not `seen`.
    fn wait_for_change(&self, seen: u64) -> u64 {
        let changed = || Some(self.state.load(Ordering::SeqCst)).filter(|state| state / NUMBER != seen);
        if let Some(state) = watch(changed) {
            return state;
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            match changed() {
                Some(state) => break state,
                None => guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner),
            }
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        state
    }
}

/// Asks again and again for a while; once, in a crowd.
fn watch<T>(ask: impl Fn() -> Option<T>) -> Option<T> {
    let start = now();
    let (end, mut last) = (start + CROWD.patience(start), start);
    loop {
        for _ in 0..32 {
            if let Some(answer) = ask() {
                return Some(answer);
            }
            std::hint::spin_loop();
        }
        let now = now();
        CROWD.note(last, now);
        if now > end {
            return None;
        }
        last = now;
    }
}

/// Since the first call.
fn now() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

/// Whether others want the processors.
static CROWD: Crowd = Crowd { until: AtomicU64::new(0) };

struct Crowd {
    /// In nanoseconds of [`now`].
    until: AtomicU64,
}

impl Crowd {
    /// Takes note of the times before and after something short.
    fn note(&self, before: Duration, after: Duration) {
        if after.saturating_sub(before) > GONE {
            self.until.store((after + CROWDED).as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// How long to watch.
    fn patience(&self, now: Duration) -> Duration {
        if now.as_nanos() < u128::from(self.until.load(Ordering::Relaxed)) { Duration::ZERO } else { WATCH }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pointer that the workers of one operation share.
struct Shared<T>(*mut T);

impl<T> Shared<T> {
    /// A method, so that closures capture the whole and not the pointer inside.
    fn pointer(&self) -> *mut T {
        self.0
    }
}

// SAFETY: `for_each_chunk` makes disjoint slices from it, each used by one thread, and `T: Send` lets them go there.
unsafe impl<T: Send> Sync for Shared<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once_at_any_thread_count() {
        for threads in [0, 1, 2, 8] {
            let pool = Pool::new(threads);
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(100, |i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn callers_at_once_and_pieces_that_call_again_lose_nothing() {
        let (pool, total) = (Pool::new(3), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for round in 0..3000 {
                        pool.for_each(3, |i| {
                            pool.for_each(2, |j| {
                                total.fetch_add(1 + i + j, Ordering::Relaxed);
                            });
                        });
                        if round % 1000 == 999 {
                            std::thread::sleep(2 * WATCH); // the workers go to sleep
                        }
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 2 * 3000 * 15);
    }

    #[test]
    fn nobody_watches_for_a_while_after_a_thread_was_gone() {
        let (crowd, at) = (Crowd { until: AtomicU64::new(0) }, Duration::from_micros);
        crowd.note(at(0), at(399));
        assert_eq!(crowd.patience(at(399)), WATCH);
        crowd.note(at(1000), at(1500));
        assert_eq!(
            [1500, 51_499, 51_500].map(|t| crowd.patience(at(t))),
            [Duration::ZERO, Duration::ZERO, WATCH]
        );
    }

    #[test]
    fn chunks_cover_the_data_once_and_the_last_is_shorter() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for (length, chunk) in [(0, 1), (1, 5), (10, 3), (12, 4), (1000, 1)] {
                let mut data = vec![(0, usize::MAX); length];
                pool.for_each_chunk(&mut data, chunk, |i, piece| {
                    assert!(piece.len() == chunk || (i + 1) * chunk > length);
                    piece.iter_mut().for_each(|x| *x = (x.0 + 1, i));
                });
                assert!(data.iter().enumerate().all(|(at, &x)| x == (1, at / chunk)));
            }
        }
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller_after_the_others_have_run() {
        let (pool, mut data) = (Pool::new(2), [0; 8]);
        let run = std::panic::AssertUnwindSafe(|| {
            pool.for_each_chunk(&mut data, 1, |i, piece| {
                piece[0] = 1;
                assert!(i != 7, "the last one fails");
            });
        });
        assert!(std::panic::catch_unwind(run).is_err());
        assert_eq!(data, [1; 8]);
    }
}
