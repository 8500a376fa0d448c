//! cuBLASLt without a GPU: its C interface for matrix products, on the memory and the streams of the emulated driver.
//!
//! A product is `D = epilogue(alpha op(A) op(B) + beta C)`, with matrices in columns unless their layout says rows.
//! It runs in stream order and becomes a node of a graph when its stream is captured.
//!
//! What is emulated, and how exactly:
//! - f64; f32 with inputs as they are, or rounded to TF32, bf16 or f16 if the compute type says so; bf16 and f16 with
//!   results in the same type or f32. Sums are chains of fused multiply-adds over ascending k in f32 (f64), so they
//!   differ in the last bits from any GPU's, whose order is another one.
//! - Transposition, leading dimensions, batches with strides, alpha and beta on the host or the device.
//! - The epilogues with bias, ReLU, GELU (the tanh form), its input kept or read back, its gradient, and sums for
//!   bias gradients.
//! - The heuristic gives up to two algorithms for each product, of other bits; the first wants a workspace for products
//!   that are mostly a sum.
//! - What the documentation demands of an epilogue's operands: the types of bias and aux, and how aux lies.
//!
//! What is wrong is refused with `CUBLAS_STATUS_INVALID_VALUE`, what is only unknown here with
//! `CUBLAS_STATUS_NOT_SUPPORTED`; either is explained on stderr. The library refuses to work over any driver but the
//! emulated one.

mod api;
mod description;
mod element;
mod layout;
mod matmul;
mod plan;
mod product;
mod status;

/// The file of this library, to be loaded by its path: beside the running executable or test, or in the folder that
/// the environment variable `PHALANX_CUDA_EMULATOR` names. `None` if it is not there, as when no `cdylib` was built.
pub fn library() -> Option<std::path::PathBuf> {
    phalanx_emulator_link::library::find("phalanx_emulated_cublaslt", env!("OUT_DIR"))
}
