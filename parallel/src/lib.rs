//! Parallel training: engine, communicators, data, tensor and pipeline parallelism.
#![forbid(unsafe_code)]

pub mod data_parallel;
