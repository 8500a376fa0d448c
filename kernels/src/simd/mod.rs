//! SIMD: one generic vector, an implementation per instruction set, and the run-time choice between them.
//!
//! A kernel is a struct that implements [`Kernel`]; `dispatch(kernel)` runs its body compiled for the best
//! instruction set this CPU has (or the one `PHALANX_ISA` names). Inside, `S::F32`, `S::F64` or `T::Vec<S>` are the
//! vectors. Everything on the way from `run` to the arithmetic must be `#[inline(always)]`: only what is inlined into
//! the dispatcher's trampoline is compiled with the instruction set's features.
//!
//! A slice's tail goes through `load_partial` and the same arithmetic, so bits do not depend on where an element sits.
//! Across instruction sets the same sequence of operations runs on every lane; only `reduce_*` differ, whose tree has
//! the vector's width.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dispatch;
mod halves;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
mod tables;
#[cfg(test)]
mod tests;
mod truncate;
mod vector;

#[cfg(test)]
pub(crate) use dispatch::dispatch_on;
pub use dispatch::{IsaName, available_isas, checked_isa, isa};
pub(crate) use dispatch::{Runner, dispatch, follows_few_streams, prefetches_far};
pub(crate) use halves::{Halves, narrow_bf16, narrow_f16, pair, widen_bf16, widen_f16};
pub(crate) use truncate::{truncate_f32_to_i32, truncate_to_i32, truncate_to_i64};
pub(crate) use vector::{Float, Isa, Kernel, LANES_MAX, Mask, PARTS_MAX, Vector, each};
