//! Tensor parallelism, held against one device.

mod int8;
mod kit;
mod layers;
mod mappings;
mod models;
mod whole_rules;
