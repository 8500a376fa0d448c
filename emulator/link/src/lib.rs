//! What the emulated CUDA libraries share: how a function is exported and takes pointers from C ([`mod@pointer`],
//! [`export!`](crate::export)), where the built libraries lie ([`library`]), and how the emulated cuBLASLt and NCCL reach
//! the emulated driver's memory and streams ([`driver`]).
//!
//! Nothing here knows what a kernel or a matrix is.

mod bytes;
pub mod driver;
mod export;
pub mod library;
pub mod pointer;

pub use bytes::{Bytes, BytesMut};
