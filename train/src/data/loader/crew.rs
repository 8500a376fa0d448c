//! The worker threads: they take runs of rows in the order of the steps, and put them together by their places.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use phalanx_tensor::{Category, Context, Tensor};

use super::super::wrong;
use super::job::{Items, Job, Pieces};
use super::plan::Run;
use crate::Result;

/// Worker threads that are at work.
pub(super) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the workers and the loader share.
struct Shared {
    job: Arc<Job>,
    /// Steps in the queue at most.
    ahead: usize,
    /// The loader is gone. Workers ask between two items, without the lock.
    closed: AtomicBool,
    queue: Mutex<Queue>,
    /// There may be a run to take.
    work: Condvar,
    /// The first step may be ready.
    ready: Condvar,
}

/// The steps that are being read, in order.
struct Queue {
    /// The number of the first.
    first: u64,
    steps: VecDeque<Step>,
    /// A worker has died.
    failed: bool,
}

/// A step that is being read.
struct Step {
    /// Runs that no worker has taken yet.
    runs: VecDeque<Run>,
    pieces: Vec<Piece>,
    /// Pieces that are not ready.
    left: usize,
}

struct Piece {
    rows: Range<usize>,
    /// The runs' items, by their place.
    read: Vec<Option<Result<Items>>>,
    /// Runs that are not read.
    left: usize,
    batch: Option<Result<Vec<Tensor>>>,
}

impl Crew {
    /// Threads that read from step `first` on.
    pub(super) fn start(job: &Arc<Job>, workers: usize, ahead: usize, first: u64) -> Result<Crew> {
        let shared = Arc::new(Shared {
            job: Arc::clone(job),
            ahead,
            closed: AtomicBool::new(false),
            queue: Mutex::new(Queue { first, steps: VecDeque::new(), failed: false }),
            work: Condvar::new(),
            ready: Condvar::new(),
        });
        // Made first, so that a thread which cannot be started ends those before it.
        let mut crew = Crew { shared, threads: Vec::new() };
        let context = Context { category: Category::Buffers, ..Context::current() };
        for number in 0..workers {
            let shared = Arc::clone(&crew.shared);
            let name = format!("data-{number}");
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                let _context = context.enter();
                shared.work();
            });
            crew.threads.push(
                thread.map_err(|e| wrong("DataLoader", format!("no thread for worker {number}: {e}")))?,
            );
        }
        Ok(crew)
    }

    /// Waits for the next step.
    pub(super) fn next(&self) -> Result<Pieces> {
        let shared = &*self.shared;
        let mut queue = shared.lock();
        while queue.steps.front().is_none_or(|step| step.left > 0) {
            if queue.failed {
                return Err(wrong("DataLoader", "a worker thread has died of a panic outside of its items"));
            }
            queue = shared.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.first += 1;
        let step = queue.steps.pop_front();
        shared.work.notify_all();
        let ready = |piece: Piece| piece.batch.map(|batch| (piece.rows, batch));
        Ok(step.into_iter().flat_map(|step| step.pieces).filter_map(ready).collect())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        // A worker that has found nothing to do waits by now, or finds the loader closed before it does.
        drop(self.shared.lock());
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // Its errors were for a loader that is gone.
            let _ = thread.join();
        }
    }
}

/// Tells the loader of a worker that unwinds, which would otherwise wait for it.
struct Alarm<'a>(&'a Shared);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().failed = true;
            self.0.ready.notify_all();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A worker that panics with the lock raises the alarm.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// A worker's life.
    fn work(&self) {
        let _alarm = Alarm(self);
        let mut queue = self.lock();
        while !self.closed() {
            match queue.claim(&self.job, self.ahead) {
                Some((step, run)) => {
                    drop(queue);
                    let items = self.job.read(step, run.rows.clone(), &self.closed);
                    self.put(step, &run, items);
                    queue = self.lock();
                }
                None => {
                    // Steps without rows are ready as soon as they are in the queue.
                    self.ready.notify_all();
                    queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Lays a run's items by; the last of a piece makes its batch.
    fn put(&self, step: u64, run: &Run, items: Result<Items>) {
        let mut queue = self.lock();
        let piece = queue.piece(step, run.piece);
        piece.read[run.place] = Some(items);
        piece.left -= 1;
        if piece.left > 0 || self.closed() {
            return;
        }
        let (rows, read) = (piece.rows.clone(), std::mem::take(&mut piece.read));
        drop(queue);
        // In the order of the rows, so that the first error wins.
        let items: Result<Vec<Items>> = read.into_iter().flatten().collect();
        let batch =
            items.and_then(|items| self.job.collate(step, &rows, items.into_iter().flatten().collect()));
        let mut queue = self.lock();
        queue.piece(step, run.piece).batch = Some(batch);
        let step = queue.step(step);
        step.left -= 1;
        if step.left == 0 {
            self.ready.notify_all();
        }
    }
}

impl Queue {
    /// A step that is being read. The loader takes none before its last piece is ready.
    fn step(&mut self, number: u64) -> &mut Step {
        let place = (number - self.first) as usize;
        &mut self.steps[place]
    }

    fn piece(&mut self, step: u64, piece: usize) -> &mut Piece {
        &mut self.step(step).pieces[piece]
    }

    /// The next run to read, and its step.
    fn claim(&mut self, job: &Job, ahead: usize) -> Option<(u64, Run)> {
        loop {
            let waiting = self.steps.iter_mut().zip(self.first..);
            let run = waiting.filter_map(|(step, number)| Some((number, step.runs.pop_front()?))).next();
            let next = self.first + self.steps.len() as u64;
            if run.is_some()
                || self.steps.len() >= ahead
                || job.plan().steps().is_some_and(|steps| next >= steps)
            {
                return run;
            }
            self.steps.push_back(Step::new(job, next));
        }
    }
}

impl Step {
    fn new(job: &Job, number: u64) -> Step {
        let rows = job.plan().pieces(number);
        let runs = job.plan().runs(&rows);
        let piece = |(piece, rows): (usize, Range<usize>)| {
            let left = runs.iter().filter(|run| run.piece == piece).count();
            Piece { rows, read: (0..left).map(|_| None).collect(), left, batch: None }
        };
        let pieces: Vec<Piece> = rows.into_iter().enumerate().map(piece).collect();
        Step { left: pieces.len(), pieces, runs: runs.into() }
    }
}
