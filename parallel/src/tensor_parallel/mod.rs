//! Tensor parallelism: layers cut over ranks.
