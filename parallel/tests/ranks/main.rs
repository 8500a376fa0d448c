//! The pipeline over ranks against one device.

#[path = "../gpt/mod.rs"]
mod gpt;

mod bits;
mod data_parallel;
mod faults;
mod kit;
mod odd;
mod processes;
mod tensor_parallel;
