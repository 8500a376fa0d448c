//! Tensor parallelism, held against one device.

mod cross_entropy;
mod files;
mod kit;
mod layers;
mod mappings;
mod models;
mod refused;
mod together;
