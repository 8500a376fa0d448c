//! Everything that reads or makes elements: every operation forward and backward.
//!
//! Kernels keep no state and know no graph. One that writes takes its destination as `&mut`, bumps its version and
//! says so in its name. See [`ops`].

mod arithmetic;
mod check;
mod gemm;
pub mod ops;
mod pointwise;
mod real;
mod reduce;
mod simd;
mod source;
mod strided;
#[cfg(test)]
mod testing;

pub use ops::*;
pub use simd::{IsaName, available_isas, isa};
