//! The engine on the calling thread.

use std::collections::BinaryHeap;
use std::sync::Arc;

use super::job::Job;
use super::pending::Waiting;
use super::plan::Plan;
use super::task::{Arrival, Origin, Scheduler, Task};
use crate::node::{Edge, Node};
use crate::{Result, anomaly};

/// Runs a pass to its end.
pub(super) fn run(job: &Job, plan: Plan, roots: Vec<Task>) -> Result<()> {
    let _context = job.context.enter();
    let _anomaly = anomaly::set(job.anomaly);
    let waiting = Waiting::new(true, job.create_graph());
    let mut inline = Inline { job, plan, waiting, ready: BinaryHeap::new() };
    for root in roots {
        match inline.plan.waits(&root.node) {
            0 => inline.ready.push(root),
            _ => inline.waiting.hold(root),
        }
    }
    while let Some(task) = inline.ready.pop() {
        job.run_node(task, &mut inline)?;
    }
    Ok(())
}

struct Inline<'a> {
    job: &'a Job,
    plan: Plan,
    waiting: Waiting,
    ready: BinaryHeap<Task>,
}

impl Scheduler for Inline<'_> {
    fn is_sole(&mut self, to: &Arc<Node>) -> bool {
        self.plan.waits(to) == 1 && !self.waiting.holds(to)
    }

    fn send(&mut self, to: &Edge, from: Origin, grad: Arrival) -> Result<()> {
        if let Some(complete) = self.waiting.take(&mut self.plan, to, from, grad)? {
            self.ready.push(complete.finish(self.job.create_graph())?);
        }
        Ok(())
    }

    fn extend(&mut self, entries: &[Edge]) {
        self.plan.extend(self.job, entries);
    }
}
