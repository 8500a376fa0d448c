//! [`Runner`]: the part of an engine that runs operations. [`Serial`] runs them on the caller, one after another,
//! for debugging and as the reference that the other must equal; [`Threaded`] has a pool of threads and a ready
//! queue for each lane. [`EngineCore`] is what both do with an operation.
//!
//! ```text
//! push ──► ready queue of a lane ──► worker: run, leave ──► newly ready: own lane with the next take, other lanes at once
//! ```
//! A worker adds what it made ready and takes its next operation under one lock of its queue.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::JoinHandle;

use smallvec::smallvec;

use super::error::{Error, Failure, Failures, Result};
use super::node::{FreeList, Node, NodeKind, Outcome, recycled};
use super::op::{EngineConfig, Lane};
use super::queue::{PriorityLevels, ReadyQueue};
use super::sync::{Mutex, Ordering, lock};
use super::variable::{Ready, leave};
use super::wait::Progress;

/// The state of an engine that does not depend on how it runs operations.
pub(crate) struct EngineCore {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) progress: Progress,
    pub(crate) failures: Failures,
    pub(crate) free_nodes: FreeList,
}

thread_local! {
    /// The engines whose operations this thread is running, the innermost last.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl EngineCore {
    pub(crate) fn new(id: u64, workers: usize) -> EngineCore {
        EngineCore {
            id,
            progress: Progress::new(workers),
            failures: Failures::new(),
            free_nodes: FreeList::new(),
        }
    }

    /// Whether an operation of this engine is the caller.
    pub(crate) fn inside(&self) -> bool {
        INSIDE.with_borrow(|engines| engines.contains(&self.id))
    }

    /// Runs an operation as worker number `worker`; adds to `ready` the operations that may run now.
    pub(crate) fn run(&self, node: &Node, worker: usize, ready: &mut Ready) {
        INSIDE.with_borrow_mut(|engines| engines.push(self.id));
        let ended = node.run();
        INSIDE.with_borrow_mut(|engines| engines.pop());
        let (run, failure) = match ended {
            Outcome::Done => (true, None),
            Outcome::Skipped(failure) => (false, Some(failure)),
            Outcome::Failed(reason) => {
                let failure = Failure::new(node.sequence.load(Ordering::Relaxed), &node.name, reason);
                self.failures.add(&failure);
                (true, Some(failure))
            }
        };
        leave(node, run, failure.as_ref(), ready);
        end_waits(ready);
        drop(failure); // a wait for all counts the handles
        self.progress.done(worker);
    }
}

/// Wakes the threads whose waits have been granted, and takes those waits out of `ready`.
pub(crate) fn end_waits(ready: &mut Ready) {
    while let Some(at) = ready.iter().position(|node: &Arc<Node>| node.kind == NodeKind::Wait) {
        let wait = ready.remove(at);
        wait.run();
        leave(&wait, true, None, ready);
    }
}

/// How an engine runs operations.
pub(crate) trait Runner: Send + Sync {
    /// The engine's counters and failures.
    fn core(&self) -> &EngineCore;
    /// The number of a lane, 0 for the first; or the names of the lanes there are.
    fn lane(&self, lane: Lane) -> Result<u32, String>;
    /// Runs an operation that was granted all its variables, now or later.
    fn start(&self, node: Arc<Node>);
}

/// Runs an operation before `push` returns; one that an operation pushes runs after that operation.
pub(crate) struct Serial {
    core: EngineCore,
    ready: Mutex<PriorityLevels<Arc<Node>>>,
    /// Held by the thread that runs operations.
    driver: Mutex<()>,
}

impl Serial {
    pub(crate) fn new(id: u64) -> Serial {
        Serial {
            core: EngineCore::new(id, 1),
            ready: Mutex::new(PriorityLevels::new()),
            driver: Mutex::new(()),
        }
    }

    /// Adds operations that may run, and takes the first one.
    fn exchange(&self, ready: &mut Ready) -> Option<Arc<Node>> {
        let mut levels = lock(&self.ready);
        ready.drain(..).for_each(|node| levels.push(node.priority, node));
        levels.pop()
    }
}

impl Runner for Serial {
    fn core(&self) -> &EngineCore {
        &self.core
    }

    fn lane(&self, _: Lane) -> Result<u32, String> {
        Ok(0)
    }

    fn start(&self, node: Arc<Node>) {
        if self.core.inside() {
            // The thread that runs the pushing operation runs this one afterwards.
            return lock(&self.ready).push(node.priority, node);
        }
        let _driver = lock(&self.driver);
        let mut ready: Ready = smallvec![node];
        while let Some(node) = self.exchange(&mut ready) {
            self.core.run(&node, 0, &mut ready);
            self.core.free_nodes.keep(recycled(node));
        }
        self.core.progress.idle();
    }
}

/// How many nodes a worker gives back at once.
const BATCH: usize = 64;

/// The threads of an engine.
pub(crate) struct Threaded {
    pool: Arc<WorkerPool>,
    threads: Vec<JoinHandle<()>>,
}

/// What the threads share.
struct WorkerPool {
    core: EngineCore,
    lanes: Vec<(Lane, ReadyQueue<Arc<Node>>)>,
}

impl Threaded {
    pub(crate) fn new(id: u64, config: &EngineConfig) -> Result<Threaded> {
        let config = config.lanes();
        let workers = config.iter().map(|(_, threads)| threads).sum();
        let core = EngineCore::new(id, workers);
        let lanes = config.iter().map(|&(lane, _)| (lane, ReadyQueue::new())).collect();
        let mut threaded = Threaded { pool: Arc::new(WorkerPool { core, lanes }), threads: Vec::new() };
        for (at, &(lane, threads)) in config.iter().enumerate() {
            for _ in 0..threads {
                let (pool, worker) = (threaded.pool.clone(), threaded.threads.len());
                let thread = std::thread::Builder::new().name(format!("engine: {lane}"));
                let spawned = thread.spawn(move || pool.work(at, worker));
                let refused = |e| Error::Thread { lane: lane.to_string(), why: format!("{e}") };
                threaded.threads.push(spawned.map_err(refused)?);
            }
        }
        Ok(threaded)
    }
}

impl Runner for Threaded {
    fn core(&self) -> &EngineCore {
        &self.pool.core
    }

    fn lane(&self, lane: Lane) -> Result<u32, String> {
        let lanes = &self.pool.lanes;
        let known = || lanes.iter().map(|(lane, _)| lane.to_string()).collect::<Vec<_>>().join(" and ");
        lanes.iter().position(|(l, _)| *l == lane).map(|at| at as u32).ok_or_else(known)
    }

    fn start(&self, node: Arc<Node>) {
        self.pool.hand_over(node);
    }
}

impl WorkerPool {
    /// The loop of worker number `worker`, until the lane is closed.
    fn work(&self, lane: usize, worker: usize) {
        let (queue, mut ready) = (&self.lanes[lane].1, Ready::new());
        let mut empty = Vec::with_capacity(BATCH);
        loop {
            let own = ready.drain(..).map(|node| (node.priority, node));
            let Some(node) = queue.exchange(own, || self.core.progress.idle()) else { return };
            self.core.run(&node, worker, &mut ready);
            empty.extend(recycled(node));
            if empty.len() == BATCH {
                self.core.free_nodes.keep(empty.drain(..));
            }
            while let Some(at) = ready.iter().position(|node| node.lane as usize != lane) {
                self.hand_over(ready.remove(at));
            }
        }
    }

    /// Gives an operation to the workers of its lane.
    fn hand_over(&self, node: Arc<Node>) {
        self.lanes[node.lane as usize].1.push(node.priority, node);
    }
}

impl Drop for Threaded {
    /// Runs all that was pushed, then ends the threads.
    fn drop(&mut self) {
        let (pool, threads) = (self.pool.clone(), std::mem::take(&mut self.threads));
        let inside = pool.core.inside();
        let end = move || {
            pool.core.progress.wait();
            pool.lanes.iter().for_each(|(_, queue)| queue.close());
            // Panics of operations are caught, so joining a thread returns no error.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        };
        if inside {
            // An operation held the last handle; it cannot wait for itself, so a thread waits. If there is no thread for that,
            // the workers run what was pushed and then sleep.
            let _ = std::thread::Builder::new().name("engine: end".into()).spawn(end);
        } else {
            end();
        }
    }
}
