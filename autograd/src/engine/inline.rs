//! The engine on the calling thread.

use std::collections::BinaryHeap;
use std::sync::Arc;

use super::job::{Job, Message, Scheduler, Task};
use super::pending::Waiting;
use super::plan::Plan;
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

    fn send(&mut self, message: Message) -> Result<()> {
        if let Some(complete) = self.waiting.take(&mut self.plan, message)? {
            self.ready.push(complete.finish(self.job.create_graph())?);
        }
        Ok(())
    }

    fn extend(&mut self, entries: &[Edge]) {
        self.plan.extend(self.job, entries);
    }
}
