//! The engine on the calling thread.

use std::cell::Cell;
use std::collections::BinaryHeap;

use phalanx_tensor::Context;

use super::job::{Job, guarded};
use super::plan::Plan;
use super::task::{Arrival, Origin, Place, Ready, Scheduler, Targets};
use crate::node::{Edge, Node};
use crate::{Result, anomaly};

/// Runs a pass to its end.
pub(super) fn run(job: &Job, plan: Plan<'_>, ready: Vec<Ready>) -> Result<()> {
    let _context = Context::with_grad(job.context.grad);
    let _anomaly = anomaly::set(job.anomaly);
    let mut inline = Inline { job, plan, next: None, later: BinaryHeap::new() };
    ready.into_iter().for_each(|ready| inline.push(ready));
    let op = Cell::new("");
    guarded(&op, || {
        while let Some(ready) = inline.pop() {
            let task = inline.plan.start(ready.place);
            op.set(task.node.name);
            job.run_node(task, &mut inline)?;
        }
        Ok(())
    })
}

struct Inline<'a, 'g> {
    job: &'a Job,
    plan: Plan<'g>,
    /// The greatest of the ready ones, since mostly there is but one.
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
    fn is_sole(&mut self, to: Place) -> bool {
        self.plan.is_sole(to)
    }

    #[inline(always)]
    fn send(&mut self, to: Place, output: usize, _: Origin, grad: Arrival) -> Result<()> {
        if let Some(ready) = self.plan.arrive(to, output, grad)? {
            self.push(ready);
        }
        Ok(())
    }

    fn extend(&mut self, node: &Node, entries: &[Edge]) -> Targets {
        self.plan.extend(self.job, node, entries)
    }
}
