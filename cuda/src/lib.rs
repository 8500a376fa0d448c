//! NVIDIA GPUs: the driver, memory, streams, kernels compiled at run time, graphs, matrix products.
//!
//! A build needs nothing of NVIDIA's. The libraries are loaded when a device is first opened; the error for a missing one says which
//! files were looked for. The crate works on addresses, sizes and plain descriptions; it knows no tensor.
//!
//! Work goes to the *current stream* of a thread: the device's own CUDA stream, or, on the worker thread of a
//! `phalanx_tensor::Stream` (a *lane*), the CUDA stream of that lane ([`Context::lane`]). Streams wait for each
//! other through a [`GpuEvent`]. No call but a read of results blocks the host.
//!
//! ```text
//!   gpu        Gpu: a logical device with all that belongs to it; Graph: a captured step; Readback: results that are read later
//!    │
//!   kernel     loaded programs, launches        cublaslt   plans and calls of matrix products
//!   nvrtc      source -> machine code           product    the description of a matrix product
//!   kernel_cache, progress: of nvrtc            doctor     what a machine has, and what brings the rest
//!   program    sources and targets              fault      errors that kernels report
//!   load_gate  loads wait for collectives       memory     device and pinned memory, uploads  <->  capture
//!   cache      compiled kernels and fastest algorithms, on disk
//!    │
//!   trace      times of a stream's work         chrome     Chrome's trace format
//!   context    context, streams, events, counters  <->  lane   streams beside a device's own
//!   driver     the calls of the driver          library    which files, from where
//!   stubs      in place of these, of nvrtc and of cublaslt without the feature `cuda`
//!    │
//!   vendor     the libraries' names, a GPU's properties, the failure of a call
//! ```

#[cfg(feature = "cuda")]
mod cache;
mod capture;
mod chrome;
mod context;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
mod doctor;
#[cfg(feature = "cuda")]
mod driver;
mod dry;
mod fault;
mod gpu;
mod kernel;
#[cfg(feature = "cuda")]
mod kernel_cache;
mod lane;
#[cfg(feature = "cuda")]
mod library;
mod load_gate;
mod memory;
#[cfg(feature = "cuda")]
mod nvrtc;
mod product;
mod program;
#[cfg(feature = "cuda")]
mod progress;
#[cfg(not(feature = "cuda"))]
mod stubs;
mod tensor_map;
mod trace;
mod vendor;

#[cfg(not(feature = "cuda"))]
use stubs::{cublaslt, doctor, driver, library, nvrtc};

pub use capture::captured_step;
pub use chrome::{ChromeTrace, Row};
pub use context::{Calls, Context, GpuEvent, calls};
pub use cublaslt::PlannedProduct;
/// The bindings to the CUDA libraries, for crates that call more of them than this one does.
#[cfg(feature = "cuda")]
pub use cudarc;
pub use doctor::{Doctor, doctor, nccl_lacks};
pub use dry::{DryLog, LoggedOperation, Traffic, take_dry_log};
pub use fault::FAULT;
pub use gpu::{Gpu, Graph, Readback};
pub use kernel::{Arguments, Grid, Kernel};
pub use lane::{Lane, LaneGuard, LeftLanes, leave_lanes};
#[cfg(feature = "cuda")]
pub use library::symbol;
pub use library::{driver_name, emulated, require, version};
pub use load_gate::CollectiveGuard;
pub use memory::{DeviceBlock, Pinned};
pub use nvrtc::{compile, compile_key, compiled};
pub use product::{Epilogue, Float, MatrixLayout, ProductForm, ProductPointers};
pub use program::{Image, KernelSource, Program, Target};
pub use tensor_map::{Boxes, TensorMap};
pub use trace::{Span, Work, start_trace, take_trace};
pub use vendor::{Library, Version};

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a GPU. A message names the operation that the caller gave and the logical device.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device cannot be opened.
    #[error("device: not possible on cuda:{index}: {why}")]
    Unsupported {
        /// The device.
        index: u16,
        /// The reason, such as the files that were looked for.
        why: String,
    },
    /// The device, or pinned memory of the host, has no room left.
    #[error("{op}: cuda:{index} could not allocate {bytes} bytes")]
    OutOfMemory {
        /// The operation.
        op: &'static str,
        /// The device.
        index: u16,
        /// The size of the request; 0 where it is not known.
        bytes: usize,
    },
    /// The GPU, its driver or its compiler reported a failure.
    #[error("{op}: cuda:{index}: {what}")]
    Failed {
        /// The operation. Of work that runs asynchronously, the operation that found out.
        op: &'static str,
        /// The device.
        index: u16,
        /// The report.
        what: String,
    },
    /// A kernel met an index beyond its limit.
    #[error("{op}: index {value} (item {item}) is out of range, wanted an index below {limit}")]
    Fault {
        /// The operation that launched the kernel.
        op: &'static str,
        /// Which of the kernel's items it was.
        item: i64,
        /// The index.
        value: i64,
        /// The first index that is too large.
        limit: i64,
    },
}

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
