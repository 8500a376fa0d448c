//! What the operations' CUDA kernels share: the prelude that is put before each, layouts as kernels take them.
//!
//! An operation's own kernel is a `.cu` file beside its Rust code, with a `cuda.rs` that launches it; families
//! (pointwise, reductions, rows) share one.

mod layout;

use phalanx_tensor::DType;

pub(crate) use layout::Strided;

/// A file of a program: its name and its text.
pub type File = (&'static str, &'static str);

/// Types, packets, reductions, matrix instructions, random numbers.
pub const PRELUDE: File = ("prelude.cuh", include_str!("prelude.cuh"));
/// Copies of boxes and products of warpgroups, for programs that only devices of compute capability 9.0 are given.
pub(crate) const HOPPER: File = ("hopper.cuh", include_str!("hopper.cuh"));
/// Layouts of any strides.
pub(crate) const LAYOUT: File = ("layout.cuh", include_str!("layout.cuh"));
/// Errors that only a kernel can find.
pub(crate) const FAULT: File = ("fault.cuh", phalanx_tensor::cuda::FAULT);

/// The prelude's name of a dtype.
pub fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "i64",
        DType::I32 => "i32",
        DType::U8 => "u8",
        DType::Bool => "bool8",
    }
}
