//! A device's thread pool: runs the pieces of one operation, the calling thread among its workers.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that share the pieces of an operation. The caller of [`Pool::for_each`] takes part, so a pool of
/// `n` threads keeps `n - 1` workers, and one of a single thread keeps none.
pub struct Pool {
    workers: Option<rayon::ThreadPool>,
    threads: usize,
}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 counts as 1.
    ///
    /// If the system refuses to start workers the pool runs everything on the caller.
    pub fn new(threads: usize) -> Pool {
        let workers = (threads > 1)
            .then(|| rayon::ThreadPoolBuilder::new().num_threads(threads - 1).build().ok())
            .flatten();
        Pool { threads: if workers.is_some() { threads } else { 1 }, workers }
    }

    /// How many threads work on an operation.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f(0) .. f(pieces - 1)`, each once, on whichever thread is free, and returns when all are done.
    /// A panic in a piece is passed on to the caller after the others have finished.
    pub fn for_each(&self, pieces: usize, f: impl Fn(usize) + Sync) {
        let Some(workers) = self.workers.as_ref().filter(|_| pieces > 1) else {
            return (0..pieces).for_each(f);
        };
        let next = AtomicUsize::new(0);
        let claim = || {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    break;
                }
                f(piece);
            }
        };
        workers.in_place_scope(|scope| {
            for _ in 1..self.threads.min(pieces) {
                scope.spawn(|_| claim());
            }
            claim();
        });
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
        assert!(chunk > 0, "for_each_chunk: chunks of 0 elements");
        let (start, length) = (Shared(data.as_mut_ptr()), data.len());
        self.for_each(length.div_ceil(chunk), |i| {
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
