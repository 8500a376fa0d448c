//! The engine over several devices: one worker thread a device, each with its own ready queue.

use std::any::Any;
use std::cell::Cell;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use phalanx_tensor::Device;

use super::inline::Ready;
use super::job::{Job, Message, NodeGrads, message_of};
use super::pending::Pending;
use super::plan::{NodeMap, Plan, key};
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
    waits: NodeMap<u32>,
    queues: Mutex<Queues>,
    changed: Condvar,
}

struct Queues {
    ready: Vec<(Device, BinaryHeap<Ready>)>,
    pending: NodeMap<Pending>,
    /// Nodes that are ready or running.
    active: usize,
    error: Option<Error>,
}

/// Runs a pass to its end, or to the first error, after which every worker stops.
pub(super) fn run(job: &Job, plan: Plan, roots: Vec<(Arc<Node>, NodeGrads)>) -> Result<()> {
    let ready = plan.devices.iter().map(|&d| (d, BinaryHeap::new())).collect();
    let queues = Queues { ready, pending: NodeMap::default(), active: 0, error: None };
    let shared = Shared { job, waits: plan.waits, queues: Mutex::new(queues), changed: Condvar::new() };
    {
        let mut queues = shared.lock();
        for (node, grads) in roots {
            let id = key(&node);
            match shared.waits.get(&id) {
                Some(&waits) if waits > 0 => {
                    queues.pending.insert(id, Pending::with(grads, waits));
                }
                _ => queues.push(Ready { node, grads, in_buffer: false }),
            }
        }
    }
    std::thread::scope(|scope| {
        for &device in &plan.devices {
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
    fn push(&mut self, ready: Ready) {
        let device = ready.node.device();
        if let Some((_, queue)) = self.ready.iter_mut().find(|q| q.0 == device) {
            queue.push(ready);
            self.active += 1;
        }
    }

    fn pop(&mut self, device: Device) -> Option<Ready> {
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
        anomaly::set(self.job.anomaly);
        while let Some(ready) = self.next(device) {
            // A hook may panic too; the others must not wait for this worker then.
            let done = catch_unwind(AssertUnwindSafe(|| self.run(ready)));
            let panicked = |p: Box<dyn Any + Send>| Error::Panicked { op: "hook", message: message_of(&*p) };
            if let Err(error) = done.map_err(panicked).and_then(|result| result) {
                self.fail(error);
            }
        }
    }

    fn next(&self, device: Device) -> Option<Ready> {
        let mut queues = self.lock();
        loop {
            if queues.error.is_some() || queues.active == 0 {
                return None;
            }
            if let Some(ready) = queues.pop(device) {
                return Some(ready);
            }
            queues = self.changed.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, Ready { node, grads, in_buffer }: Ready) -> Result<()> {
        let sole = |edge: &Edge| {
            let id = key(&edge.node);
            self.waits.get(&id) == Some(&1) && !self.lock().pending.contains_key(&id)
        };
        let messages = self.job.run_node(&node, grads, in_buffer, sole)?;
        let complete = self.deliver(messages);
        let complete: Result<Vec<Ready>> = complete
            .into_iter()
            .map(|(node, pending)| {
                let (grads, in_buffer) = pending.finish(self.job.create_graph())?;
                Ok(Ready { node, grads, in_buffer })
            })
            .collect();
        let mut queues = self.lock();
        for ready in complete? {
            queues.push(ready);
        }
        queues.active -= 1;
        drop(queues);
        self.changed.notify_all();
        Ok(())
    }

    /// Hands the messages over; the nodes that have all of theirs now.
    fn deliver(&self, messages: Vec<Message>) -> Vec<(Arc<Node>, Pending)> {
        let mut queues = self.lock();
        let mut complete = Vec::new();
        for message in messages {
            let to = message.to.node.clone();
            let id = key(&to);
            let waits = self.waits.get(&id).copied().unwrap_or(1);
            let waiting = queues.pending.entry(id).or_insert_with(|| Pending::new(&to, waits));
            if waiting.keep(message)
                && let Some(pending) = queues.pending.remove(&id)
            {
                complete.push((to, pending));
            }
        }
        complete
    }
}
