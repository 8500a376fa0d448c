//! A device's thread pool: runs the pieces of one operation, the calling thread among its workers.

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
}

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
}
