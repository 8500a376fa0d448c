//! Gradients that wait at nodes until all have arrived.

use super::add;
use super::task::{Arrival, NodeGrads, Origin};
use crate::{Result, Var};

/// What has arrived at a node.
#[derive(Default)]
pub(super) struct Pending {
    pub(super) grads: NodeGrads,
    /// Whether a sender has added its gradient to the leaf's buffer itself.
    pub(super) in_buffer: bool,
    /// Gradients that arrived in an order of chance, with where they came from.
    parts: Vec<(Origin, usize, Var)>,
}

impl Pending {
    /// Nothing yet, of a node with this many outputs.
    pub(super) fn new(outputs: usize) -> Pending {
        Pending::of(match outputs {
            1 => NodeGrads::from_buf([None]),
            _ => (0..outputs).map(|_| None).collect(),
        })
    }

    /// A root's gradients.
    pub(super) fn of(grads: NodeGrads) -> Pending {
        Pending { grads, ..Pending::default() }
    }

    /// Keeps what arrives: added at once if it arrives in the order of summation.
    pub(super) fn take(&mut self, output: usize, from: Origin, grad: Arrival, how: Summation) -> Result<()> {
        match grad {
            Arrival::Grad(grad) if how.in_order => return self.add(output, grad, how.create_graph),
            Arrival::Grad(grad) => self.parts.push((from, output, grad)),
            Arrival::InBuffer => self.in_buffer = true,
            Arrival::Nothing => {}
        }
        Ok(())
    }

    /// Sums what was kept, as it would have arrived on one thread: the latest sender first, its edges in order.
    pub(super) fn finish(&mut self, create_graph: bool) -> Result<()> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let mut parts = std::mem::take(&mut self.parts);
        parts.sort_by_key(|part| part.0);
        parts.into_iter().try_for_each(|(_, output, grad)| self.add(output, grad, create_graph))
    }

    pub(super) fn add(&mut self, output: usize, grad: Var, create_graph: bool) -> Result<()> {
        let slot = &mut self.grads[output];
        *slot = Some(match slot.take() {
            Some(sum) => add(sum, grad, create_graph)?,
            None => grad,
        });
        Ok(())
    }
}

/// How gradients that meet are summed.
#[derive(Clone, Copy)]
pub(super) struct Summation {
    /// Whether they arrive in the order of summation.
    pub(super) in_order: bool,
    pub(super) create_graph: bool,
}

/// Rooms for what is pending, used again and again.
#[derive(Default)]
pub(super) struct Rooms {
    rooms: Vec<Pending>,
    free: Vec<u32>,
}

impl Rooms {
    pub(super) fn enter(&mut self, pending: Pending) -> u32 {
        if let Some(room) = self.free.pop() {
            self.rooms[room as usize] = pending;
            return room;
        }
        self.rooms.push(pending);
        self.rooms.len() as u32 - 1
    }

    pub(super) fn get(&mut self, room: u32) -> &mut Pending {
        &mut self.rooms[room as usize]
    }

    pub(super) fn leave(&mut self, room: u32) -> Pending {
        self.free.push(room);
        std::mem::take(&mut self.rooms[room as usize])
    }
}
