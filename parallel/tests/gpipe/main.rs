//! GPipe: the plain model's gradients bit for bit, the order of execution, memory, skips, errors.

mod checkpoint;
mod copy;
mod deferred_batch_norm;
mod faults;
mod kit;
mod memory;
mod one_to_three;
mod order;
mod skips;
mod surface;
mod transparency;
