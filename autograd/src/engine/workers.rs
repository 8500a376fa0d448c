//! The engine over several devices: one worker thread a device, each with its own ready queue.

use std::cell::Cell;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use phalanx_tensor::Device;

use super::job::Job;
use super::pending::Waiting;
use super::plan::Plan;
use super::task::{Arrival, Origin, Scheduler, Task};
use crate::node::{Edge, Node};
use crate::{Error, Result, anomaly};

thread_local! {
    static ON_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a worker: a backward pass inside a backward function runs inline there.
pub(super) fn on_worker() -> bool {
    ON_WORKER.get()
}

/// What the workers share.
struct Shared<'a> {
    job: &'a Job,
    queues: Mutex<Queues>,
    changed: Condvar,
}

struct Queues {
    plan: Plan,
    waiting: Waiting,
    ready: Vec<(Device, BinaryHeap<Task>)>,
    /// Nodes that are ready or running.
    active: usize,
    error: Option<Error>,
}

/// Runs a pass to its end, or to the first error, after which every worker stops.
pub(super) fn run(job: &Job, plan: Plan, roots: Vec<Task>) -> Result<()> {
    let devices = plan.devices.clone();
    let ready = devices.iter().map(|&d| (d, BinaryHeap::new())).collect();
    let waiting = Waiting::new(false, job.create_graph());
    let mut queues = Queues { plan, waiting, ready, active: 0, error: None };
    for root in roots {
        match queues.plan.waits(&root.node) {
            0 => queues.push(root),
            _ => queues.waiting.hold(root),
        }
    }
    let shared = Shared { job, queues: Mutex::new(queues), changed: Condvar::new() };
    std::thread::scope(|scope| {
        for &device in &devices {
            let shared = &shared;
            let name = format!("backward {device}");
            let started =
                std::thread::Builder::new().name(name).spawn_scoped(scope, move || shared.work(device));
            if let Err(error) = started {
                shared.fail(Error::Custom(format!("backward: cannot start the worker of {device}: {error}")));
            }
        }
    });
    let mut queues = shared.lock();
    queues.error.take().map_or(Ok(()), Err)
}

impl Queues {
    fn push(&mut self, task: Task) {
        let device = task.node.device();
        // A graph that was recorded during the pass may have come to a device without a worker.
        let queue = self.ready.iter().position(|q| q.0 == device).unwrap_or(0);
        self.ready[queue].1.push(task);
        self.active += 1;
    }

    fn pop(&mut self, device: Device) -> Option<Task> {
        self.ready.iter_mut().find(|q| q.0 == device)?.1.pop()
    }
}

impl Shared<'_> {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// A worker's life: run what is ready on its device until nothing is left anywhere.
    fn work(&self, device: Device) {
        ON_WORKER.set(true);
        let _context = self.job.context.enter();
        let _anomaly = anomaly::set(self.job.anomaly);
        while let Some(task) = self.next(device) {
            match self.job.run_node(task, &mut &*self) {
                Ok(()) => self.lock().active -= 1,
                Err(error) => self.fail(error),
            }
            self.changed.notify_all();
        }
    }

    fn next(&self, device: Device) -> Option<Task> {
        let mut queues = self.lock();
        loop {
            if queues.error.is_some() || queues.active == 0 {
                return None;
            }
            if let Some(task) = queues.pop(device) {
                return Some(task);
            }
            queues = self.changed.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Scheduler for &Shared<'_> {
    fn is_sole(&mut self, to: &Arc<Node>) -> bool {
        let queues = self.lock();
        queues.plan.waits(to) == 1 && !queues.waiting.holds(to)
    }

    fn send(&mut self, to: &Edge, from: Origin, grad: Arrival) -> Result<()> {
        let complete = {
            let Queues { plan, waiting, .. } = &mut *self.lock();
            waiting.take(plan, to, from, grad)?
        };
        // Summed outside the lock.
        if let Some(complete) = complete {
            let task = complete.finish(self.job.create_graph())?;
            self.lock().push(task);
            self.changed.notify_all();
        }
        Ok(())
    }

    fn extend(&mut self, entries: &[Edge]) {
        self.lock().plan.extend(self.job, entries);
    }
}
