//! Tensor parallelism, held against one device.

mod kit;
mod models;
