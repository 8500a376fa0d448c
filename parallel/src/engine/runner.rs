//! (engine/core.rs)
//! [`Core`]: what every engine does with an operation, whoever runs it.
//!
//! (engine/runner.rs)
//! [`Runner`]: who runs the operations that tracking says may run.
//!
//! (engine/serial.rs)
//! [`Serial`]: everything on the caller, one operation after another. For debugging, and to hold the threads against.
//!
//! (engine/threaded.rs)
//! [`Threaded`]: a pool of threads for each lane, each with a queue of its own.
//!
//! ```text
//! push ──> lane queue ──> worker: run, leave ──> newly ready: own lane (with the next pop), other lanes
//! ```
//! A worker hands over what it made ready and takes its next operation in one visit to its queue.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::JoinHandle;

use smallvec::smallvec;

use super::error::{Error, Failure, Failures, Result};
use super::node::{Ended, Kind, Node, Spare, emptied};
use super::op::{EngineConfig, Lane};
use super::queue::{Levels, Queue};
use super::sync::{Mutex, Ordering, lock};
use super::variable::{Ready, leave};
use super::wait::Progress;

/// The state of an engine that does not depend on how it runs operations.
pub(crate) struct Core {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) progress: Progress,
    pub(crate) failures: Failures,
    pub(crate) spare: Spare,
}

thread_local! {
    /// The engines whose operations this thread is running, the innermost last.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl Core {
    pub(crate) fn new(id: u64, workers: usize) -> Core {
        Core { id, progress: Progress::new(workers), failures: Failures::new(), spare: Spare::new() }
    }

    /// Whether the caller is an operation of this engine.
    pub(crate) fn inside(&self) -> bool {
        INSIDE.with_borrow(|engines| engines.contains(&self.id))
    }

    /// Runs an operation for `worker`; adds to `ready` those that may run now.
    pub(crate) fn run(&self, node: &Node, worker: usize, ready: &mut Ready) {
        INSIDE.with_borrow_mut(|engines| engines.push(self.id));
        let ended = node.run();
        INSIDE.with_borrow_mut(|engines| engines.pop());
        let (run, failure) = match ended {
            Ended::Done => (true, None),
            Ended::Skipped(failure) => (false, Some(failure)),
            Ended::Failed(reason) => {
                let failure = Failure::new(node.sequence.load(Ordering::Relaxed), &node.name, reason);
                self.failures.add(&failure);
                (true, Some(failure))
            }
        };
        leave(node, run, failure.as_ref(), ready);
        end_waits(ready);
        drop(failure); // a wait for all counts who holds it
        self.progress.done(worker);
    }
}

/// Ends those waits whose turn has come.
pub(crate) fn end_waits(ready: &mut Ready) {
    while let Some(at) = ready.iter().position(|node: &Arc<Node>| node.kind == Kind::Wait) {
        let wait = ready.remove(at);
        wait.run();
        leave(&wait, true, None, ready);
    }
}

/// The part of an engine that has threads, or none.
pub(crate) trait Runner: Send + Sync {
    /// What it tells about what it ran.
    fn core(&self) -> &Core;
    /// The number of a lane, which is 0 for the first, or a list of those there are.
    fn lane(&self, lane: Lane) -> Result<u32, String>;
    /// Runs an operation that holds all it uses, now or later.
    fn start(&self, node: Arc<Node>);
}

/// Runs an operation before `push` returns; one that an operation pushes runs after that operation.
pub(crate) struct Serial {
    core: Core,
    ready: Mutex<Levels<Arc<Node>>>,
    /// Held by the thread that runs operations.
    driver: Mutex<()>,
}

impl Serial {
    pub(crate) fn new(id: u64) -> Serial {
        Serial { core: Core::new(id, 1), ready: Mutex::new(Levels::new()), driver: Mutex::new(()) }
    }

    /// Adds what may run and takes the first of all.
    fn exchange(&self, ready: &mut Ready) -> Option<Arc<Node>> {
        let mut levels = lock(&self.ready);
        ready.drain(..).for_each(|node| levels.push(node.priority, node));
        levels.pop()
    }
}

impl Runner for Serial {
    fn core(&self) -> &Core {
        &self.core
    }

    fn lane(&self, _: Lane) -> Result<u32, String> {
        Ok(0)
    }

    fn start(&self, node: Arc<Node>) {
        if self.core.inside() {
            // Whoever runs the operation that pushed this comes to it.
            return lock(&self.ready).push(node.priority, node);
        }
        let _driver = lock(&self.driver);
        let mut ready: Ready = smallvec![node];
        while let Some(node) = self.exchange(&mut ready) {
            self.core.run(&node, 0, &mut ready);
            self.core.spare.keep(emptied(node));
        }
        self.core.progress.idle();
    }
}

/// Nodes that a worker brings back at once.
const BATCH: usize = 64;

/// The threads of an engine.
pub(crate) struct Threaded {
    crew: Arc<Crew>,
    threads: Vec<JoinHandle<()>>,
}

/// What they share.
struct Crew {
    core: Core,
    lanes: Vec<(Lane, Queue<Arc<Node>>)>,
}

impl Threaded {
    pub(crate) fn new(id: u64, config: &EngineConfig) -> Result<Threaded> {
        let config = config.lanes();
        let workers = config.iter().map(|(_, threads)| threads).sum();
        let core = Core::new(id, workers);
        let lanes = config.iter().map(|&(lane, _)| (lane, Queue::new())).collect();
        let mut threaded = Threaded { crew: Arc::new(Crew { core, lanes }), threads: Vec::new() };
        for (at, &(lane, threads)) in config.iter().enumerate() {
            for _ in 0..threads {
                let (crew, worker) = (threaded.crew.clone(), threaded.threads.len());
                let thread = std::thread::Builder::new().name(format!("engine: {lane}"));
                let spawned = thread.spawn(move || crew.work(at, worker));
                let refused = |e| Error::Thread { lane: lane.to_string(), why: format!("{e}") };
                threaded.threads.push(spawned.map_err(refused)?);
            }
        }
        Ok(threaded)
    }
}

impl Runner for Threaded {
    fn core(&self) -> &Core {
        &self.crew.core
    }

    fn lane(&self, lane: Lane) -> Result<u32, String> {
        let lanes = &self.crew.lanes;
        let known = || lanes.iter().map(|(lane, _)| lane.to_string()).collect::<Vec<_>>().join(" and ");
        lanes.iter().position(|(l, _)| *l == lane).map(|at| at as u32).ok_or_else(known)
    }

    fn start(&self, node: Arc<Node>) {
        self.crew.hand_over(node);
    }
}

impl Crew {
    /// A worker's life.
    fn work(&self, lane: usize, worker: usize) {
        let (queue, mut ready) = (&self.lanes[lane].1, Ready::new());
        let mut empty = Vec::with_capacity(BATCH);
        loop {
            let own = ready.drain(..).map(|node| (node.priority, node));
            let Some(node) = queue.exchange(own, || self.core.progress.idle()) else { return };
            self.core.run(&node, worker, &mut ready);
            empty.extend(emptied(node));
            if empty.len() == BATCH {
                self.core.spare.keep(empty.drain(..));
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
        let (crew, threads) = (self.crew.clone(), std::mem::take(&mut self.threads));
        let inside = crew.core.inside();
        let end = move || {
            crew.core.progress.wait();
            crew.lanes.iter().for_each(|(_, queue)| queue.close());
            // Operations' panics are caught, so a thread has nothing to tell.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        };
        if inside {
            // The last handle was an operation's, which cannot wait for itself. Without a thread to wait instead, the
            // workers run what there is and then sleep.
            let _ = std::thread::Builder::new().name("engine: end".into()).spawn(end);
        } else {
            end();
        }
    }
}
