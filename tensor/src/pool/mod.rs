//! A device's thread pool: runs the pieces of one operation, the calling thread among its workers.
//!
//! An operation of a training step lasts some ten microseconds to some milliseconds, and the next follows at once. To wake a sleeping
//! thread costs more than a short operation. So workers spin for a while before they sleep, and a job is published by one store and
//! joined by one exchange. The caller does not wait for a worker that comes too late. While other threads want the processors no worker
//! spins, because it would use up the time that it needs for its next piece.
//!
//! A program that uses rayon can have rayon's workers help instead. Then the pool has no threads, and no thread waits for a job.
#![allow(unsafe_code)]

pub(crate) mod workers;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use workers::WorkerGroup;

use crate::sync::lock;

/// Threads that share the pieces of an operation. The caller of [`Pool::for_each`] takes part, so a pool of
/// `n` threads keeps `n - 1` workers, and one of a single thread keeps none.
pub struct Pool {
    group: Arc<WorkerGroup>,
    helpers: Helpers,
    /// Whether an operation has the helpers.
    busy: AtomicBool,
}

/// The threads that help a caller.
enum Helpers {
    /// Threads of the pool's own.
    Own(Vec<JoinHandle<()>>),
    /// The workers of a rayon pool: the named one, else the one that the caller is in.
    Rayon(Option<Arc<rayon_core::ThreadPool>>),
}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 counts as 1.
    ///
    /// If the system refuses to start workers the pool has fewer.
    pub fn new(threads: usize) -> Pool {
        let group = Arc::new(WorkerGroup::default());
        let start = |_| {
            let group = Arc::clone(&group);
            std::thread::Builder::new().name("phalanx".into()).spawn(move || group.work()).ok()
        };
        let workers = (1..threads).map_while(start).collect();
        Pool { group, helpers: Helpers::Own(workers), busy: AtomicBool::new(false) }
    }

    /// A pool that has no threads of its own and asks the workers of a rayon pool for help, for programs that use rayon
    /// themselves ([`Device::set_pool`](crate::Device::set_pool)). `None` stands for the pool that the caller is in, as
    /// rayon's own functions have it: that of `ThreadPool::install`, the global one elsewhere. As many threads work on an
    /// operation as the rayon pool has, the caller included, which may be one of its workers or not.
    ///
    /// A worker that has something else to do is not waited for, and a caller that waits for the last pieces takes on nothing
    /// of rayon's meanwhile, so an operation cannot meet another on its own stack.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Pool};
    ///
    /// let pool = rayon_core::ThreadPoolBuilder::new().num_threads(2).build()?;
    /// let device = Device::Cpu(7);
    /// device.set_pool(Pool::on_rayon(Some(pool.into())))?;
    /// assert_eq!(device.pool()?.threads(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn on_rayon(pool: Option<Arc<rayon_core::ThreadPool>>) -> Pool {
        Pool { group: Arc::default(), helpers: Helpers::Rayon(pool), busy: AtomicBool::new(false) }
    }

    /// How many threads work on an operation.
    pub fn threads(&self) -> usize {
        match &self.helpers {
            Helpers::Own(workers) => workers.len() + 1,
            Helpers::Rayon(Some(pool)) => pool.current_num_threads(),
            Helpers::Rayon(None) => rayon_core::current_num_threads(),
        }
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
        let helpers = pieces.min(self.threads()).saturating_sub(1);
        if helpers == 0 || self.busy.swap(true, Ordering::Acquire) {
            return (0..pieces).for_each(f);
        }
        let (next, panicked) = (AtomicUsize::new(0), Mutex::new(None));
        let job = || {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    break;
                }
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(piece))) {
                    lock(&panicked).get_or_insert(panic);
                }
            }
        };
        // SAFETY: `busy` lets one caller in at a time. Pieces' panics are caught, and rayon's `spawn` panics only where there
        // is no global pool, which `threads` has asked for its size.
        unsafe { self.group.run(&job, || self.invite(helpers)) };
        self.busy.store(false, Ordering::Release);
        let panicked: Option<Box<dyn Any + Send>> = lock(&panicked).take();
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
    }

    /// Invites that many of rayon's workers to a job. The pool's own workers look for jobs themselves.
    fn invite(&self, helpers: usize) {
        let Helpers::Rayon(pool) = &self.helpers else { return };
        let worker =
            pool.as_ref().map_or_else(rayon_core::current_thread_index, |pool| pool.current_thread_index());
        let spawn = |group| match pool {
            Some(pool) => pool.spawn(|| follow(group)),
            None => rayon_core::spawn(|| follow(group)),
        };
        let invited = self.group.invite(helpers, || spawn(Some(Arc::clone(&self.group))));
        // What a worker spawns may wake no other, as rayon says of its `new_internal_jobs`: if one falls asleep meanwhile, the spawning worker is to
        // take the job itself. It is busy here, perhaps for hours, and as long as the invitation stands there is no second. One more job, spawned
        // after a fence, does wake one: of that worker's look for jobs and this thread's look for sleepers, one sees the other.
        if invited && worker.is_some() {
            fence(Ordering::SeqCst);
            spawn(None);
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
        self.group.close();
        if let Helpers::Own(workers) = &mut self.helpers {
            for worker in workers.drain(..) {
                // Jobs catch their pieces' panics, so `join` returns no panic.
                let _ = worker.join();
            }
        }
    }
}

/// A job for one of rayon's workers: it follows an invitation, or has only been woken.
fn follow(group: Option<Arc<WorkerGroup>>) {
    if let Some(group) = group {
        group.follow_invitation();
    }
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
    use std::time::{Duration, Instant};

    use super::*;

    fn rayon(threads: usize) -> Arc<rayon_core::ThreadPool> {
        Arc::new(rayon_core::ThreadPoolBuilder::new().num_threads(threads).build().unwrap())
    }

    #[test]
    fn every_piece_runs_once_at_any_thread_count() {
        let most = if cfg!(miri) { 3 } else { 8 };
        let own = [0, 1, 2, most].map(Pool::new);
        let rayons = [1, 2, most].map(|threads| Pool::on_rayon(Some(rayon(threads))));
        for pool in own.into_iter().chain(rayons).chain([Pool::on_rayon(None)]) {
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(100, |i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn callers_at_once_and_pieces_that_call_again_lose_nothing() {
        for pool in [Pool::new(3), Pool::on_rayon(Some(rayon(3)))] {
            let total = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| call_again_and_again(&pool, &total));
                }
            });
            assert_eq!(total.into_inner(), 2 * ROUNDS * 15);
        }
    }

    /// Miri's rounds are few.
    const ROUNDS: usize = if cfg!(miri) { 30 } else { 3000 };

    /// Runs two pieces, each of which waits for the other to begin: one thread alone would wait in vain.
    fn two_at_once(pool: &Pool) {
        let (begun, end) = (AtomicUsize::new(0), Instant::now() + Duration::from_secs(10));
        pool.for_each(2, |_| {
            begun.fetch_add(1, Ordering::Relaxed);
            while begun.load(Ordering::Relaxed) < 2 {
                assert!(Instant::now() < end, "no other thread took a piece in time");
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn helpers_come_to_a_pool_that_is_idle() {
        let rayon = rayon(2);
        let (named, callers) = (Pool::on_rayon(Some(rayon.clone())), Pool::on_rayon(None));
        for _ in 0..3 {
            two_at_once(&Pool::new(2));
            two_at_once(&named);
            rayon.install(|| two_at_once(&named));
            rayon.install(|| two_at_once(&callers));
        }
    }

    fn call_again_and_again(pool: &Pool, total: &AtomicUsize) {
        for round in 0..ROUNDS {
            pool.for_each(3, |i| {
                pool.for_each(2, |j| {
                    total.fetch_add(1 + i + j, Ordering::Relaxed);
                });
            });
            if round % (ROUNDS / 3) == 0 {
                std::thread::sleep(2 * workers::SPIN_MAX); // the workers go to sleep
            }
        }
    }

    #[test]
    fn rayons_workers_call_as_well_and_help_each_other() {
        let (rayon, total) = (rayon(3), AtomicUsize::new(0));
        let pool = Pool::on_rayon(Some(rayon.clone()));
        rayon.scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|_| call_again_and_again(&pool, &total));
            }
        });
        assert_eq!(total.into_inner(), 6 * ROUNDS * 15);
    }

    #[test]
    fn a_pool_of_the_callers_goes_where_the_caller_is_and_takes_no_more_than_it_asks_for() {
        let (rayon, pool) = (rayon(3), Pool::on_rayon(None));
        let threads = Mutex::new(std::collections::HashSet::new());
        rayon.install(|| {
            assert_eq!(pool.threads(), 3);
            for _ in 0..100 {
                pool.for_each(3, |_| {
                    let index = rayon_core::current_thread_index();
                    threads.lock().unwrap().insert(index.expect("a worker of rayon's"));
                });
            }
        });
        assert!((1..=3).contains(&threads.into_inner().unwrap().len()));
    }

    #[test]
    fn rayons_workers_that_are_busy_are_not_waited_for_and_asked_once() {
        let (rayon, done) = (rayon(2), AtomicUsize::new(0));
        let pool = Pool::on_rayon(Some(rayon.clone()));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for _ in 0..2 {
            let held = held.clone();
            rayon.spawn(move || held.lock().unwrap().recv().unwrap());
        }
        for _ in 0..50 {
            pool.for_each(4, |_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(done.load(Ordering::Relaxed), 200);
        assert!(Arc::strong_count(&pool.group) <= 2, "one invitation, and no second while it stands");
        (0..2).for_each(|_| release.send(()).unwrap());
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
