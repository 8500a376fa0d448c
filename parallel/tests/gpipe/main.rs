//! GPipe: the plain model's gradients bit for bit, the order of execution, memory, skips, errors.

mod checkpoint;
mod copy;
mod faults;
mod kit;
mod memory;
mod order;
mod skips;
mod surface;
mod transparency;
