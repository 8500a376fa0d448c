//! Gradients that wait at nodes until all have arrived.

use super::add;
use super::task::{Arrival, NodeGrads, Place};
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
    #[inline]
    pub(super) fn new(outputs: usize) -> Pending {
        Pending::of(NodeGrads::of((0..outputs).map(|_| None)))
    }

    /// A root's gradients.
    pub(super) fn of(grads: NodeGrads) -> Pending {
        Pending { grads, in_buffer: false }
    }

    /// Adds what arrives.
    #[inline]
    pub(super) fn take(&mut self, output: usize, grad: Arrival, create_graph: bool) -> Result<()> {
        match grad {
            Arrival::Grad(grad) => return self.add(output, grad, create_graph),
            Arrival::InBuffer => self.in_buffer = true,
            Arrival::Nothing => {}
        }
        Ok(())
    }

    #[inline]
    pub(super) fn add(&mut self, output: usize, grad: Var, create_graph: bool) -> Result<()> {
        let slot = &mut self.grads[output];
        let sum = match slot.take() {
            Some(sum) => add(sum, grad, create_graph)?,
            None => grad,
        };
        *slot = Some(sum);
        Ok(())
    }
}

/// A room's number.
#[derive(Clone, Copy)]
pub(super) struct Room(Place);

/// Rooms for what is pending, used again and again.
#[derive(Default)]
pub(super) struct Rooms {
    rooms: Vec<Pending>,
    free: Vec<Room>,
}

impl Rooms {
    /// A room with nothing in it yet, for a node with this many outputs.
    #[inline]
    pub(super) fn enter(&mut self, outputs: usize) -> Room {
        let room = self.free.pop().unwrap_or_else(|| {
            self.rooms.push(Pending::default());
            Room(Place::at(self.rooms.len() - 1))
        });
        self.get(room).grads.fill((0..outputs).map(|_| None));
        room
    }

    #[inline]
    pub(super) fn get(&mut self, room: Room) -> &mut Pending {
        &mut self.rooms[room.0.index()]
    }

    #[inline]
    pub(super) fn leave(&mut self, room: Room) -> Pending {
        self.free.push(room);
        std::mem::take(self.get(room))
    }
}
