//! [`Threaded`]: a pool of threads for each lane, each with a queue of its own.
//!
//! ```text
//! push ──> lane queue ──> worker: run, leave ──> newly ready: own lane (with the next pop), other lanes
//! ```
//! A worker hands over what it made ready and takes its next operation in one visit to its queue.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::config::EngineConfig;
use super::core::Core;
use super::error::{Error, Result};
use super::node::Node;
use super::op::Lane;
use super::queue::Queue;
use super::runner::Runner;
use super::spare;
use super::track::Ready;

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
            empty.extend(spare::empty(node));
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
