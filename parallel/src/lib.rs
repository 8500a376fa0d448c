//! Parallel training: engine, communicators, data, tensor and pipeline parallelism.
#![forbid(unsafe_code)]
