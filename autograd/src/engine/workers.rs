//! The engine over several devices: one worker thread a device, each with its own ready queue.

use std::cell::Cell;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use phalanx_tensor::Device;

use super::job::{Job, guarded};
use super::plan::{Plan, Step};
use super::task::{Arrival, Origin, Place, Ready, Scheduler, Targets, Task};
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
struct Shared<'a, 'g> {
    job: &'a Job,
    queues: Mutex<Queues<'g>>,
    changed: Condvar,
}

struct Queues<'g> {
    plan: Plan<'g>,
    ready: Vec<(Device, BinaryHeap<Ready>)>,
    /// Nodes that are ready or running.
    active: usize,
    error: Option<Error>,
}

/// Runs a pass to its end, or to the first error, after which every worker stops.
pub(super) fn run(job: &Job, mut plan: Plan<'_>, ready: Vec<Ready>) -> Result<()> {
    plan.expect_disorder();
    let devices = plan.devices.clone();
    let queue = devices.iter().map(|&d| (d, BinaryHeap::new())).collect();
    let mut queues = Queues { plan, ready: queue, active: 0, error: None };
    ready.into_iter().for_each(|ready| queues.push(ready));
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

impl<'g> Queues<'g> {
    fn push(&mut self, ready: Ready) {
        let device = self.plan.device(ready.place);
        // A graph that was recorded during the pass may have come to a device without a worker.
        let queue = self.ready.iter().position(|q| q.0 == device).unwrap_or(0);
        self.ready[queue].1.push(ready);
        self.active += 1;
    }

    fn pop(&mut self, device: Device) -> Option<Task<'g>> {
        let ready = self.ready.iter_mut().find(|q| q.0 == device)?.1.pop()?;
        Some(self.plan.start(ready.place))
    }
}

impl<'g> Shared<'_, 'g> {
    fn lock(&self) -> MutexGuard<'_, Queues<'g>> {
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
            let op = Cell::new(task.node.name);
            match guarded(&op, || self.job.run_node(task, &mut &*self)) {
                Ok(()) => self.lock().active -= 1,
                Err(error) => self.fail(error),
            }
            self.changed.notify_all();
        }
    }

    fn next(&self, device: Device) -> Option<Task<'g>> {
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

impl Scheduler for &Shared<'_, '_> {
    fn is_sole(&mut self, to: Place) -> bool {
        self.lock().plan.is_sole(to)
    }

    fn send(&mut self, to: Place, output: usize, from: Origin, grad: Arrival) -> Result<()> {
        let mut queues = self.lock();
        let mut step = queues.plan.deposit(to, output, from, grad);
        // Sums are computed while others go on.
        while let Step::Sum(mut pending, parts) = step {
            drop(queues);
            for (output, grad) in parts {
                pending.add(output, grad, self.job.create_graph())?;
            }
            queues = self.lock();
            step = queues.plan.settle(to, pending);
        }
        if let Step::Ready(ready) = step {
            queues.push(ready);
            drop(queues);
            self.changed.notify_all();
        }
        Ok(())
    }

    fn extend(&mut self, node: &Node, entries: &[Edge]) -> Targets {
        self.lock().plan.extend(self.job, node, entries)
    }
}
