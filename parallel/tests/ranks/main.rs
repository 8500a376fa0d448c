//! The pipeline over ranks against one device.

#[path = "../gpt/mod.rs"]
mod gpt;

mod asynchronous;
mod bits;
mod data_parallel;
mod faults;
mod kit;
mod odd;
#[path = "../comm/port.rs"]
mod port;
mod replicas;
mod skips;
mod sync_batch_norm;
mod twin;
mod values;
mod work;
