//! Gradients that wait at nodes until all have arrived.

use super::add;
use super::task::{Arrival, NodeGrads};
use crate::{Result, Var};

/// The sum of what has arrived at a node.
#[derive(Default)]
pub(super) struct Pending {
    pub(super) grads: NodeGrads,
    /// Whether a sender has added its gradient to the leaf's buffer itself.
    pub(super) in_buffer: bool,
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

    /// Adds what arrives.
    pub(super) fn take(&mut self, output: usize, grad: Arrival, create_graph: bool) -> Result<()> {
        match grad {
            Arrival::Grad(grad) => return self.add(output, grad, create_graph),
            Arrival::InBuffer => self.in_buffer = true,
            Arrival::Nothing => {}
        }
        Ok(())
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
