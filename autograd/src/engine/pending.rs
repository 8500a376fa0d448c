//! Gradients that wait at a node until all have arrived.

use super::job::{Arrival, Message, NodeGrads};
use super::{add, no_grads};
use crate::node::Node;
use crate::{Result, Var};

/// A node that is not ready.
pub(super) struct Pending {
    /// Messages still to come.
    waits: u32,
    grads: NodeGrads,
    /// Whether a sender has written to the leaf's buffer.
    in_buffer: bool,
    /// Gradients that arrived in an order of chance, with where they came from.
    parts: Vec<((u64, usize), usize, Var)>,
}

impl Pending {
    pub(super) fn new(node: &Node, waits: u32) -> Pending {
        Pending { waits, grads: no_grads(node), in_buffer: false, parts: Vec::new() }
    }

    /// A root that other roots lead to: it has a gradient already.
    pub(super) fn with(grads: NodeGrads, waits: u32) -> Pending {
        Pending { waits, grads, in_buffer: false, parts: Vec::new() }
    }

    /// Takes a message that arrived in the order of summation, and adds it. Whether the node is ready now.
    pub(super) fn add(&mut self, message: Message, create_graph: bool) -> Result<bool> {
        self.waits -= 1;
        match message.grad {
            Arrival::Grad(grad) => self.sum(message.to.output, grad, create_graph)?,
            Arrival::InBuffer => self.in_buffer = true,
            Arrival::Nothing => {}
        }
        Ok(self.waits == 0)
    }

    /// Takes a message that may have overtaken others, and keeps it. Whether the node is ready now.
    pub(super) fn keep(&mut self, message: Message) -> bool {
        self.waits -= 1;
        match message.grad {
            Arrival::Grad(grad) => self.parts.push((message.from, message.to.output, grad)),
            Arrival::InBuffer => self.in_buffer = true,
            Arrival::Nothing => {}
        }
        self.waits == 0
    }

    /// The sums, and whether a sender has written to the leaf's buffer. What was kept is summed as it would have
    /// arrived on one thread: the latest sender first, its edges in order.
    pub(super) fn finish(mut self, create_graph: bool) -> Result<(NodeGrads, bool)> {
        let mut parts = std::mem::take(&mut self.parts);
        parts.sort_by_key(|((seq, edge), ..)| (std::cmp::Reverse(*seq), *edge));
        for (_, output, grad) in parts {
            self.sum(output, grad, create_graph)?;
        }
        Ok((self.grads, self.in_buffer))
    }

    fn sum(&mut self, output: usize, grad: Var, create_graph: bool) -> Result<()> {
        let sum = match self.grads[output].take() {
            Some(sum) => add(sum, grad, create_graph)?,
            None => grad,
        };
        self.grads[output] = Some(sum);
        Ok(())
    }
}
