//! The pipeline over ranks against one device.

#[path = "../gpt/mod.rs"]
mod gpt;

mod bits;
mod kit;
mod memory;
