//! GPipe: the plain model's gradients bit for bit, the order of execution, memory, skips, errors.

mod checkpoint;
mod faults;
mod kit;
mod order;
mod skips;
mod transparency;
