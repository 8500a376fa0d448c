//! Phalanx: tensors, autograd and parallel training from scratch in Rust.
