//! The threads of a pass: the calling one if the graph lives on one device, else one worker a device, each with its own
//! queue of ready nodes.

use std::cell::Cell;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, MutexGuard};

use phalanx_tensor::{Device, unpoisoned};

use super::graph_task::{GraphTask, NodeIndex, NodeTask, Ready, Scheduler, Targets, guarded};
use super::input_buffer::{Arrival, Sender};
use super::plan::{Plan, Step};
use crate::graph::node::{Edge, Node};
use crate::mode::with_grad;
use crate::{Error, Result, anomaly};

/// Runs a pass to its end.
pub(super) fn run(graph_task: &GraphTask, plan: Plan<'_>, ready: Vec<Ready>) -> Result<()> {
    if plan.devices.len() > 1 && !on_worker() {
        run_workers(graph_task, plan, ready)
    } else {
        run_inline(graph_task, plan, ready)
    }
}

/// Runs a pass to its end on this thread.
fn run_inline(graph_task: &GraphTask, plan: Plan<'_>, ready: Vec<Ready>) -> Result<()> {
    let _context = with_grad(graph_task.create_graph());
    let _anomaly = anomaly::set(graph_task.anomaly);
    let mut inline = Inline { graph_task, plan, next: None, later: BinaryHeap::new() };
    ready.into_iter().for_each(|ready| inline.push(ready));
    let op = Cell::new("");
    guarded(&op, || {
        while let Some(ready) = inline.pop() {
            let task = inline.plan.start(ready.index);
            op.set(task.node.name);
            graph_task.run_node(task, &mut inline)?;
        }
        Ok(())
    })
}

struct Inline<'a, 'g> {
    graph_task: &'a GraphTask,
    plan: Plan<'g>,
    /// The ready node with the highest priority, kept outside the heap because usually only one node is ready.
    next: Option<Ready>,
    later: BinaryHeap<Ready>,
}

impl Inline<'_, '_> {
    #[inline(always)]
    fn push(&mut self, ready: Ready) {
        match self.next {
            None => self.next = Some(ready),
            Some(next) => {
                self.later.push(next.min(ready));
                self.next = Some(next.max(ready));
            }
        }
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<Ready> {
        let next = self.next.take();
        if !self.later.is_empty() {
            self.next = self.later.pop();
        }
        next
    }
}

impl Scheduler for Inline<'_, '_> {
    fn is_sole(&mut self, to: NodeIndex) -> bool {
        self.plan.is_sole(to)
    }

    #[inline(always)]
    fn send(&mut self, to: NodeIndex, output: usize, _: Sender, arrival: Arrival) -> Result<()> {
        if let Some(ready) = self.plan.arrive(to, output, arrival)? {
            self.push(ready);
        }
        Ok(())
    }

    fn extend(&mut self, node: &Node, entries: &[Edge]) -> Targets {
        self.plan.extend(self.graph_task, node, entries)
    }
}

thread_local! {
    static ON_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a worker: a backward pass inside a backward function runs inline there.
fn on_worker() -> bool {
    ON_WORKER.get()
}

/// State shared by the workers of a pass.
struct Shared<'a, 'g> {
    graph_task: &'a GraphTask,
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

/// Runs a pass to its end on a worker for each device, or to the first error, after which every worker stops.
fn run_workers(graph_task: &GraphTask, mut plan: Plan<'_>, ready: Vec<Ready>) -> Result<()> {
    plan.expect_several_threads();
    let devices = plan.devices.clone();
    let queue = devices.iter().map(|&d| (d, BinaryHeap::new())).collect();
    let mut queues = Queues { plan, ready: queue, active: 0, error: None };
    ready.into_iter().for_each(|ready| queues.push(ready));
    let shared = Shared { graph_task, queues: Mutex::new(queues), changed: Condvar::new() };
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
        let device = self.plan.device(ready.index);
        // A graph that was recorded during the pass may have come to a device without a worker.
        let queue = self.ready.iter().position(|q| q.0 == device).unwrap_or(0);
        self.ready[queue].1.push(ready);
        self.active += 1;
    }

    fn pop(&mut self, device: Device) -> Option<NodeTask<'g>> {
        let ready = self.ready.iter_mut().find(|q| q.0 == device)?.1.pop()?;
        Some(self.plan.start(ready.index))
    }
}

impl<'g> Shared<'_, 'g> {
    fn lock(&self) -> MutexGuard<'_, Queues<'g>> {
        unpoisoned(self.queues.lock())
    }

    fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Runs a worker: it runs the ready nodes of its device until the pass has no node left on any device.
    fn work(&self, device: Device) {
        ON_WORKER.set(true);
        let _context = self.graph_task.context.enter();
        let _anomaly = anomaly::set(self.graph_task.anomaly);
        while let Some(task) = self.next(device) {
            let op = Cell::new(task.node.name);
            match guarded(&op, || self.graph_task.run_node(task, &mut &*self)) {
                Ok(()) => self.lock().active -= 1,
                Err(error) => self.fail(error),
            }
            self.changed.notify_all();
        }
    }

    fn next(&self, device: Device) -> Option<NodeTask<'g>> {
        let mut queues = self.lock();
        loop {
            if queues.error.is_some() || queues.active == 0 {
                return None;
            }
            if let Some(task) = queues.pop(device) {
                return Some(task);
            }
            queues = unpoisoned(self.changed.wait(queues));
        }
    }
}

impl Scheduler for &Shared<'_, '_> {
    fn is_sole(&mut self, to: NodeIndex) -> bool {
        self.lock().plan.is_sole(to)
    }

    fn send(&mut self, to: NodeIndex, output: usize, from: Sender, arrival: Arrival) -> Result<()> {
        let mut queues = self.lock();
        let mut step = queues.plan.deposit(to, output, from, arrival);
        // Sums are computed while others go on.
        while let Step::Sum(mut buffer, parts) = step {
            drop(queues);
            for (output, grad) in parts {
                buffer.add(output, grad, self.graph_task.create_graph())?;
            }
            queues = self.lock();
            step = queues.plan.settle(to, buffer);
        }
        if let Step::Ready(ready) = step {
            queues.push(ready);
            drop(queues);
            self.changed.notify_all();
        }
        Ok(())
    }

    fn extend(&mut self, node: &Node, entries: &[Edge]) -> Targets {
        self.lock().plan.extend(self.graph_task, node, entries)
    }
}
