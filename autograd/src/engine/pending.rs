//! Gradients that wait at nodes until all have arrived.

use std::sync::Arc;

use super::plan::{NodeMap, Plan};
use super::task::{Arrival, Origin, Task};
use super::{add, no_grads};
use crate::node::{Edge, Node};
use crate::{Result, Var};

/// The nodes that some gradients have reached, but not all.
pub(super) struct Waiting {
    nodes: NodeMap<Pending>,
    /// Whether messages arrive in the order of summation: then each is added at once.
    in_order: bool,
    create_graph: bool,
}

/// A node with what has arrived at it.
pub(super) struct Pending {
    task: Task,
    /// Gradients that arrived in an order of chance, with where they came from.
    parts: Vec<(Origin, usize, Var)>,
}

impl Waiting {
    pub(super) fn new(in_order: bool, create_graph: bool) -> Waiting {
        Waiting { nodes: NodeMap::default(), in_order, create_graph }
    }

    /// A root that other roots lead to: it has a gradient already.
    pub(super) fn hold(&mut self, task: Task) {
        self.nodes.insert(task.node.id, Pending { task, parts: Vec::new() });
    }

    /// Whether something waits at the node.
    pub(super) fn holds(&self, node: &Arc<Node>) -> bool {
        !self.nodes.is_empty() && self.nodes.contains_key(&node.id)
    }

    /// Takes what arrives at the end of an edge; the node with everything, if it was the last.
    pub(super) fn take(
        &mut self,
        plan: &mut Plan,
        to: &Edge,
        from: Origin,
        grad: Arrival,
    ) -> Result<Option<Pending>> {
        let (in_order, create_graph) = (self.in_order, self.create_graph);
        let last = plan.arrived(&to.node);
        if !last && matches!(grad, Arrival::Nothing) {
            return Ok(None);
        }
        let add = |pending: &mut Pending| match grad {
            Arrival::Grad(grad) if in_order => pending.task.add(to.output, grad, create_graph),
            Arrival::Grad(grad) => {
                pending.parts.push((from, to.output, grad));
                Ok(())
            }
            Arrival::InBuffer => {
                pending.task.in_buffer = true;
                Ok(())
            }
            Arrival::Nothing => Ok(()),
        };
        if !last {
            add(self.nodes.entry(to.node.id).or_insert_with(|| Pending::new(&to.node)))?;
            return Ok(None);
        }
        // The usual case, a node with a single consumer, touches no table but the plan.
        let earlier = if self.nodes.is_empty() { None } else { self.nodes.remove(&to.node.id) };
        let mut pending = earlier.unwrap_or_else(|| Pending::new(&to.node));
        add(&mut pending)?;
        Ok(Some(pending))
    }
}

impl Pending {
    fn new(node: &Arc<Node>) -> Pending {
        let task = Task { node: node.clone(), grads: no_grads(node), in_buffer: false };
        Pending { task, parts: Vec::new() }
    }

    /// The node with its sums. What was kept is summed as it would have arrived on one thread: the latest sender
    /// first, its edges in order.
    pub(super) fn finish(self, create_graph: bool) -> Result<Task> {
        let Pending { mut task, mut parts } = self;
        parts.sort_by_key(|part| part.0);
        for (_, output, grad) in parts {
            task.add(output, grad, create_graph)?;
        }
        Ok(task)
    }
}

impl Task {
    pub(super) fn add(&mut self, output: usize, grad: Var, create_graph: bool) -> Result<()> {
        let sum = match self.grads[output].take() {
            Some(sum) => add(sum, grad, create_graph)?,
            None => grad,
        };
        self.grads[output] = Some(sum);
        Ok(())
    }
}
