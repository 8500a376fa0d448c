//! The engine on the calling thread.

use std::collections::BinaryHeap;
use std::sync::Arc;

use super::job::{Job, NodeGrads};
use super::pending::Pending;
use super::plan::{NodeMap, Plan, key};
use crate::node::Node;
use crate::{Result, anomaly};

/// A node that can run; the greatest runs first.
pub(super) struct Ready {
    pub(super) node: Arc<Node>,
    pub(super) grads: NodeGrads,
    pub(super) in_buffer: bool,
}

impl Ord for Ready {
    fn cmp(&self, other: &Ready) -> std::cmp::Ordering {
        let key = |r: &Ready| (r.node.priority(), r.node.seq);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Ready) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ready {
    fn eq(&self, other: &Ready) -> bool {
        self.node.seq == other.node.seq
    }
}

impl Eq for Ready {}

/// Runs a pass to its end.
pub(super) fn run(job: &Job, mut plan: Plan, roots: Vec<(Arc<Node>, NodeGrads)>) -> Result<()> {
    let _context = job.context.enter();
    let anomaly_before = anomaly::is_on();
    anomaly::set(job.anomaly);
    let done = run_ready(job, &mut plan, roots);
    anomaly::set(anomaly_before);
    done
}

fn run_ready(job: &Job, plan: &mut Plan, roots: Vec<(Arc<Node>, NodeGrads)>) -> Result<()> {
    let mut pending: NodeMap<Pending> = NodeMap::default();
    let mut ready: BinaryHeap<Ready> = BinaryHeap::new();
    for (node, grads) in roots {
        let id = key(&node);
        match plan.waits.get(&id) {
            Some(&waits) if waits > 0 => {
                pending.insert(id, Pending::with(grads, waits));
            }
            _ => ready.push(Ready { node, grads, in_buffer: false }),
        }
    }
    while let Some(Ready { node, grads, in_buffer }) = ready.pop() {
        let sole = |edge: &crate::node::Edge| {
            let id = key(&edge.node);
            plan.waits.get(&id) == Some(&1) && !pending.contains_key(&id)
        };
        for message in job.run_node(&node, grads, in_buffer, sole)? {
            let to = message.to.node.clone();
            let id = key(&to);
            let waits = plan.waits.get(&id).copied().unwrap_or(1);
            let waiting = pending.entry(id).or_insert_with(|| Pending::new(&to, waits));
            if waiting.add(message, job.create_graph())?
                && let Some(complete) = pending.remove(&id)
            {
                let (grads, in_buffer) = complete.finish(job.create_graph())?;
                ready.push(Ready { node: to, grads, in_buffer });
            }
        }
    }
    Ok(())
}
