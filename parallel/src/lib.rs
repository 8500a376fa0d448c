//! Parallel training: engine, communicators, data, tensor and pipeline parallelism.
