//! The worker threads of a loader: [`ReadPlan`] says which rows a step has and deals them to workers in chunks, [`ReadJob`] reads rows and makes
//! batches, [`Workers`] are the threads, which take chunks of rows in the order of the steps.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use phalanx_tensor::{Category, Context, Tensor, panic_message, unpoisoned};

use crate::Result;
use crate::data::dataset::odd_one;
use crate::data::{HOST, Samples, wrong};

/// Which rows each step has, and how they are dealt to workers.
#[derive(Clone, Debug)]
pub(super) struct ReadPlan {
    batch: usize,
    /// Rows that this rank reads, a batch for each range.
    pieces: Vec<Range<usize>>,
    /// Samples until the end, if there is one.
    total: Option<u64>,
    /// The largest number of rows of a chunk.
    chunk_rows: usize,
}

/// Rows of one piece that a worker reads together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The piece that the rows belong to.
    pub(super) piece: usize,
    /// The number of the chunk in its piece.
    pub(super) index: usize,
    pub(super) rows: Range<usize>,
}

impl ReadPlan {
    /// Steps of `batch` rows; without pieces, the batch is one.
    pub(super) fn new(
        batch: usize,
        pieces: Option<Vec<Range<usize>>>,
        total: Option<u64>,
        workers: usize,
    ) -> Result<ReadPlan> {
        if batch == 0 {
            return Err(wrong("DataLoader", "got batches of 0 rows, wanted at least 1"));
        }
        let pieces = pieces.unwrap_or_else(|| std::iter::once(0..batch).collect());
        if let Some(rows) = pieces.iter().find(|rows| rows.is_empty() || rows.end > batch) {
            let why =
                format!("got the rows {rows:?} as a piece, wanted at least one row of a batch of {batch}");
            return Err(wrong("DataLoader", why));
        }
        let rows: usize = pieces.iter().map(Range::len).sum();
        Ok(ReadPlan { batch, pieces, total, chunk_rows: rows.div_ceil(workers.max(1)).max(1) })
    }

    /// Steps until the end.
    pub(super) fn steps(&self) -> Option<u64> {
        self.total.map(|total| total.div_ceil(self.batch as u64))
    }

    /// The number of a step's first sample.
    pub(super) fn first_sample(&self, step: u64) -> u64 {
        step * self.batch as u64
    }

    /// The rows of each piece of a step. The last step may have fewer rows, and empty pieces are left out.
    pub(super) fn pieces(&self, step: u64) -> Vec<Range<usize>> {
        let left = self.total.map_or(u64::MAX, |total| total.saturating_sub(self.first_sample(step)));
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let cut = |rows: &Range<usize>| rows.start..rows.end.min(left);
        self.pieces.iter().map(cut).filter(|rows| !rows.is_empty()).collect()
    }

    /// The chunks of these pieces, in the order of the rows.
    pub(super) fn chunks(&self, pieces: &[Range<usize>]) -> Vec<Chunk> {
        let of_piece = |(piece, rows): (usize, &Range<usize>)| {
            let (rows, most) = (rows.clone(), self.chunk_rows);
            rows.clone().step_by(most).enumerate().map(move |(index, start)| Chunk {
                piece,
                index,
                rows: start..rows.end.min(start + most),
            })
        };
        pieces.iter().enumerate().flat_map(of_piece).collect()
    }
}

/// The rows of a chunk: the tensors of each.
pub(super) type Items = Vec<Vec<Tensor>>;

/// The pieces of a step that are ready: their rows, and their batch.
pub(super) type Pieces = Vec<(Range<usize>, Result<Vec<Tensor>>)>;

/// The samples and the plan, by which any thread reads a step's rows and makes a batch of them. A panic in either becomes an error.
pub(super) struct ReadJob {
    samples: Box<dyn Samples>,
    plan: ReadPlan,
}

impl ReadJob {
    pub(super) fn new(samples: Box<dyn Samples>, plan: ReadPlan) -> ReadJob {
        ReadJob { samples, plan }
    }

    pub(super) fn plan(&self) -> &ReadPlan {
        &self.plan
    }

    /// A whole step on this thread.
    pub(super) fn step(&self, step: u64, closed: &AtomicBool) -> Pieces {
        let piece = |rows: Range<usize>| {
            let batch =
                self.read(step, rows.clone(), closed).and_then(|items| self.collate(step, &rows, items));
            (rows, batch)
        };
        self.plan.pieces(step).into_iter().map(piece).collect()
    }

    /// The items of a chunk of rows, up to the first error. It stops early if the loader has been dropped.
    pub(super) fn read(&self, step: u64, rows: Range<usize>, closed: &AtomicBool) -> Result<Items> {
        let open = |_: &usize| !closed.load(Ordering::Relaxed);
        rows.take_while(open).map(|row| self.item(self.plan.first_sample(step) + row as u64)).collect()
    }

    fn item(&self, number: u64) -> Result<Vec<Tensor>> {
        let read = catch_unwind(AssertUnwindSafe(|| self.samples.sample(number)));
        let why = match read {
            Ok(Ok(tensors)) => return Ok(tensors),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("its reading panicked: {}", message(&*panic)),
        };
        Err(wrong(self.samples.name(number), why))
    }

    /// The batch of a piece's items, on the host.
    pub(super) fn collate(&self, step: u64, rows: &Range<usize>, items: Items) -> Result<Vec<Tensor>> {
        let odd = odd_one(&items);
        let made = catch_unwind(AssertUnwindSafe(|| -> Result<Vec<Tensor>> {
            let tensors = self.samples.collate(items)?.into_iter().map(|t| t.to_device(HOST, false));
            Ok(tensors.collect::<Result<_, _>>()?)
        }));
        let why = match made {
            Ok(Ok(tensors)) => return Ok(tensors),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("collate panicked: {}", message(&*panic)),
        };
        let names = odd.map(|(row, _)| {
            let name =
                |row: usize| self.samples.name(self.plan.first_sample(step) + (rows.start + row) as u64);
            format!("; item {row} is {}, item 0 is {}", name(row), name(0))
        });
        Err(wrong(format!("rows {rows:?} of step {step}"), why + &names.unwrap_or_default()))
    }
}

/// A panic's message.
fn message(panic: &(dyn Any + Send)) -> &str {
    panic_message(panic).unwrap_or("without a message")
}

/// A loader's worker threads.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// The state that the workers and the loader share.
struct Shared {
    job: Arc<ReadJob>,
    /// Steps in the queue at most.
    ahead: usize,
    /// Whether the loader was dropped. Workers read it between two items, without the lock.
    closed: AtomicBool,
    queue: Mutex<Queue>,
    /// Wakes workers: there may be a chunk to take.
    work: Condvar,
    /// Wakes the loader: the first step may be ready.
    ready: Condvar,
}

/// The steps that are being read, in order.
struct Queue {
    /// The number of the first.
    first: u64,
    steps: VecDeque<QueuedStep>,
    /// A worker has died.
    failed: bool,
}

/// A step that is being read.
struct QueuedStep {
    /// Runs that no worker has taken yet.
    chunks: VecDeque<Chunk>,
    pieces: Vec<QueuedPiece>,
    /// Pieces that are not ready.
    left: usize,
}

/// A piece of a step that is being read.
struct QueuedPiece {
    rows: Range<usize>,
    /// The chunks' items, by the number of the chunk.
    read: Vec<Option<Result<Items>>>,
    /// Runs that are not read.
    left: usize,
    batch: Option<Result<Vec<Tensor>>>,
}

impl Workers {
    /// Threads that read from step `first` on.
    pub(super) fn start(job: &Arc<ReadJob>, workers: usize, ahead: usize, first: u64) -> Result<Workers> {
        let shared = Arc::new(Shared {
            job: Arc::clone(job),
            ahead,
            closed: AtomicBool::new(false),
            queue: Mutex::new(Queue { first, steps: VecDeque::new(), failed: false }),
            work: Condvar::new(),
            ready: Condvar::new(),
        });
        // It is made first, so that dropping it ends the started threads if a later one cannot be started.
        let mut started = Workers { shared, threads: Vec::new() };
        let context = Context { category: Category::Buffers, ..Context::current() };
        for number in 0..workers {
            let shared = Arc::clone(&started.shared);
            let name = format!("data-{number}");
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                let _context = context.enter();
                shared.work();
            });
            started.threads.push(
                thread.map_err(|e| wrong("DataLoader", format!("no thread for worker {number}: {e}")))?,
            );
        }
        Ok(started)
    }

    /// Waits for the next step.
    pub(super) fn next(&self) -> Result<Pieces> {
        let shared = &*self.shared;
        let mut queue = shared.lock();
        while queue.steps.front().is_none_or(|step| step.left > 0) {
            if queue.failed {
                return Err(wrong("DataLoader", "a worker thread has died of a panic outside of its items"));
            }
            queue = unpoisoned(shared.ready.wait(queue));
        }
        queue.first += 1;
        let step = queue.steps.pop_front();
        shared.work.notify_all();
        let ready = |piece: QueuedPiece| piece.batch.map(|batch| (piece.rows, batch));
        Ok(step.into_iter().flat_map(|step| step.pieces).filter_map(ready).collect())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        // Once the lock was free, each idle worker either waits, and is woken below, or sees that the loader is closed.
        drop(self.shared.lock());
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // The loader that would report a worker's panic is being dropped.
            let _ = thread.join();
        }
    }
}

/// Wakes the loader when a worker unwinds. Without it the loader would wait forever.
struct PanicAlarm<'a>(&'a Shared);

impl Drop for PanicAlarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().failed = true;
            self.0.ready.notify_all();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A worker that panics with the lock sets `failed`, so the lock's poison is not needed.
        unpoisoned(self.queue.lock())
    }

    fn closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// The loop of a worker thread.
    fn work(&self) {
        let _alarm = PanicAlarm(self);
        let mut queue = self.lock();
        while !self.closed() {
            match queue.claim(&self.job, self.ahead) {
                Some((step, chunk)) => {
                    drop(queue);
                    let items = self.job.read(step, chunk.rows.clone(), &self.closed);
                    self.put(step, &chunk, items);
                    queue = self.lock();
                }
                None => {
                    // Steps without rows are ready as soon as they are in the queue.
                    self.ready.notify_all();
                    queue = unpoisoned(self.work.wait(queue));
                }
            }
        }
    }

    /// Stores a chunk's items. The worker that stores the last chunk of a piece makes the batch.
    fn put(&self, step: u64, chunk: &Chunk, items: Result<Items>) {
        let mut queue = self.lock();
        let piece = queue.piece(step, chunk.piece);
        piece.read[chunk.index] = Some(items);
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
        queue.piece(step, chunk.piece).batch = Some(batch);
        let step = queue.step(step);
        step.left -= 1;
        if step.left == 0 {
            self.ready.notify_all();
        }
    }
}

impl Queue {
    /// A step that is being read. The loader takes a step only when its last piece is ready.
    fn step(&mut self, number: u64) -> &mut QueuedStep {
        &mut self.steps[(number - self.first) as usize]
    }

    fn piece(&mut self, step: u64, piece: usize) -> &mut QueuedPiece {
        &mut self.step(step).pieces[piece]
    }

    /// The next chunk to read, and its step.
    fn claim(&mut self, job: &ReadJob, ahead: usize) -> Option<(u64, Chunk)> {
        loop {
            let waiting = self.steps.iter_mut().zip(self.first..);
            let chunk = waiting.filter_map(|(step, number)| Some((number, step.chunks.pop_front()?))).next();
            let next = self.first + self.steps.len() as u64;
            if chunk.is_some()
                || self.steps.len() >= ahead
                || job.plan().steps().is_some_and(|steps| next >= steps)
            {
                return chunk;
            }
            self.steps.push_back(QueuedStep::new(job, next));
        }
    }
}

impl QueuedStep {
    fn new(job: &ReadJob, number: u64) -> QueuedStep {
        let rows = job.plan().pieces(number);
        let chunks = job.plan().chunks(&rows);
        let piece = |(piece, rows): (usize, Range<usize>)| {
            let left = chunks.iter().filter(|chunk| chunk.piece == piece).count();
            QueuedPiece { rows, read: (0..left).map(|_| None).collect(), left, batch: None }
        };
        let pieces: Vec<QueuedPiece> = rows.into_iter().enumerate().map(piece).collect();
        QueuedStep { left: pieces.len(), pieces, chunks: chunks.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(batch: usize, pieces: &[Range<usize>], total: Option<u64>, workers: usize) -> ReadPlan {
        ReadPlan::new(batch, Some(pieces.to_vec()), total, workers).unwrap()
    }

    #[test]
    fn a_step_is_dealt_in_runs_of_equal_size() {
        let chunks = |pieces: &[Range<usize>], workers: usize| -> Vec<(usize, usize, Range<usize>)> {
            let chunks = plan(8, pieces, None, workers).chunks(pieces);
            chunks.into_iter().map(|chunk| (chunk.piece, chunk.index, chunk.rows)).collect()
        };
        let whole = std::slice::from_ref(&(0..8));
        assert_eq!(chunks(whole, 1), [(0, 0, 0..8)]);
        assert_eq!(chunks(whole, 3), [(0, 0, 0..3), (0, 1, 3..6), (0, 2, 6..8)]);
        assert_eq!(chunks(&[2..4, 4..7], 2), [(0, 0, 2..4), (1, 0, 4..7)]);
        assert_eq!(
            chunks(&[2..4, 4..7], 9),
            [(0, 0, 2..3), (0, 1, 3..4), (1, 0, 4..5), (1, 1, 5..6), (1, 2, 6..7)]
        );
        assert_eq!(chunks(&[], 2), []);
    }

    #[test]
    fn the_last_step_of_an_evaluation_has_what_is_left() {
        let plan = plan(4, &[0..2, 2..4], Some(9), 1);
        assert_eq!(plan.steps(), Some(3));
        assert_eq!(plan.pieces(1), [0..2, 2..4]);
        assert_eq!(plan.pieces(2), std::slice::from_ref(&(0..1)));
        assert!(plan.pieces(7).is_empty());
        assert_eq!(plan.first_sample(2), 8);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let error = |batch, rows: Range<usize>| {
            ReadPlan::new(batch, Some(vec![rows]), None, 1).unwrap_err().to_string()
        };
        assert_eq!(error(0, 0..1), "DataLoader: got batches of 0 rows, wanted at least 1");
        for rows in [2..5, 1..1, 0..usize::MAX] {
            assert!(error(4, rows.clone()).contains(&format!("got the rows {rows:?} as a piece")));
        }
        assert_eq!(ReadPlan::new(3, None, None, 1).unwrap().pieces(5).len(), 1);
    }
}
