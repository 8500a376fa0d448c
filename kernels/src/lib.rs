//! Everything that reads or makes elements: every operation forward and backward.

mod simd;

pub use simd::{IsaName, available_isas, isa};
