//! Tensor parallelism, held against one device.

mod kit;
mod layers;
mod mappings;
mod models;
mod whole_rules;
