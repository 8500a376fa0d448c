//! The pipeline over ranks against one device.

#[path = "../gpt/mod.rs"]
mod gpt;

mod asynchronous;
mod asynchronous_replicas;
mod bits;
mod data_parallel;
mod faults;
mod kit;
mod odd;
#[path = "../comm/port.rs"]
mod port;
mod processes;
mod sync_batch_norm;
mod tensor_parallel;
mod twin;
mod work;
