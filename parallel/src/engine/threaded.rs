//! [`Threaded`]: runs operations on a pool of threads for each lane, which has a ready queue.
//!
//! ```text
//! push ──► ready queue of a lane ──► worker: run, leave ──► newly ready: own lane with the next take, other lanes at once
//! ```
//! A worker adds what it made ready and takes its next operation under one lock of its queue.

use std::sync::Arc;
use std::thread::JoinHandle;

use phalanx_tensor::Stream;

use super::error::{Error, Result};
use super::node::{Node, Outcome, recycled};
use super::op::{EngineConfig, Lane, ReadyOrder};
use super::queue::ReadyQueue;
use super::runner::{Ender, EngineCore, Runner};
use super::sync::{Mutex, lock};
use super::variable::Ready;

/// How many nodes a worker gives back at once.
const BATCH: usize = 64;

/// The lanes of an engine, and their threads.
pub(crate) struct Threaded {
    core: EngineCore,
    lanes: Vec<(Lane, ReadyQueue<Arc<Node>>)>,
    /// The first lane runs the operations of every lane.
    is_pooled: bool,
    threads: Mutex<Vec<Thread>>,
}

/// A worker's thread.
enum Thread {
    Own(JoinHandle<()>),
    /// That of a stream, whose work it runs on.
    OfStream(Stream),
}

impl Thread {
    /// Runs `work` on a new thread for `lane`.
    fn spawn(lane: Lane, work: impl FnOnce() + Send + 'static) -> Result<Thread> {
        let refused = |why: String| Error::Thread { lane: lane.to_string(), why };
        if let Lane::Copies(device) = lane {
            let stream = Stream::new(device).map_err(|e| refused(e.to_string()))?;
            stream.submit(move || {
                work();
                Ok(())
            });
            return Ok(Thread::OfStream(stream));
        }
        let thread = std::thread::Builder::new().name(format!("engine: {lane}"));
        thread.spawn(work).map(Thread::Own).map_err(|e| refused(format!("{e}")))
    }

    /// Waits for its end. Panics of operations are caught, so there is no error to return.
    fn join(self) {
        match self {
            Thread::Own(thread) => drop(thread.join()),
            Thread::OfStream(stream) => drop(stream.synchronize()),
        }
    }
}

impl Threaded {
    pub(crate) fn new(id: u64, config: &EngineConfig) -> Result<Arc<Threaded>> {
        let (is_pooled, has_priorities) = (config.is_pooled(), config.order() == ReadyOrder::Priority);
        let config = config.lanes();
        let workers = config.iter().map(|(_, threads)| threads).sum();
        let core = EngineCore { has_priorities, ..EngineCore::new(id, workers) };
        let lanes = config.iter().map(|&(lane, _)| (lane, ReadyQueue::new())).collect();
        let threaded = Arc::new(Threaded { core, lanes, is_pooled, threads: Mutex::new(Vec::new()) });
        for (at, &(lane, threads)) in config.iter().enumerate() {
            for _ in 0..threads {
                let (pool, worker) = (threaded.clone(), lock(&threaded.threads).len());
                let spawned = Thread::spawn(lane, move || pool.work(at, worker));
                let thread = spawned.inspect_err(|_| threaded.shut_down())?;
                lock(&threaded.threads).push(thread);
            }
        }
        Ok(threaded)
    }

    /// The loop of worker number `worker`, until the lane is closed.
    fn work(&self, lane: usize, worker: usize) {
        let (queue, mut ready) = (&self.lanes[lane].1, Ready::new());
        let mut empty = Vec::with_capacity(BATCH);
        loop {
            let own = ready.drain(..).map(|node| (node.priority, node));
            let Some(node) = queue.exchange(own, || self.core.progress.idle()) else { return };
            self.core.run(&node, Ender::Worker(worker), &mut ready);
            empty.extend(recycled(node));
            if empty.len() == BATCH {
                self.core.free_nodes.keep(empty.drain(..));
            }
            while let Some(at) = ready.iter().position(|node| node.lane as usize != lane) {
                self.start(ready.remove(at));
            }
        }
    }
}

impl Runner for Threaded {
    fn core(&self) -> &EngineCore {
        &self.core
    }

    fn lane(&self, lane: Lane) -> Result<u32, String> {
        if self.is_pooled {
            return Ok(0);
        }
        let known = || self.lanes.iter().map(|(lane, _)| lane.to_string()).collect::<Vec<_>>().join(" and ");
        self.lanes.iter().position(|(l, _)| *l == lane).map(|at| at as u32).ok_or_else(known)
    }

    /// Gives an operation to the workers of its lane.
    fn start(&self, node: Arc<Node>) {
        self.lanes[node.lane as usize].1.push(node.priority, node);
    }

    fn ended(&self, node: Arc<Node>, outcome: Outcome) {
        let mut ready = Ready::new();
        self.core.end(&node, outcome, Ender::Other, &mut ready);
        ready.into_iter().for_each(|node| self.start(node));
        self.core.free_nodes.keep(recycled(node));
        self.core.progress.idle();
    }

    /// Runs all that was pushed, then ends the threads.
    fn shut_down(&self) {
        self.core.progress.wait();
        self.lanes.iter().for_each(|(_, queue)| queue.close());
        let threads = std::mem::take(&mut *lock(&self.threads));
        threads.into_iter().for_each(Thread::join);
    }
}
