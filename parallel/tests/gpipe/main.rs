//! GPipe: the plain model's gradients bit for bit, the order of execution, memory, skips, errors; all of it on CUDA devices too.

mod checkpoint;
mod faults;
mod gpus;
mod kit;
mod on_gpus;
mod order;
mod skips;
mod transparency;
