//! NVIDIA GPUs: the driver, memory, streams, kernels compiled at run time, graphs, matrix products.
//!
//! A build needs nothing of NVIDIA's. The libraries are loaded when a device is first opened; the error for a missing one says which
//! files were looked for. The crate works on addresses, sizes and plain descriptions; it knows no tensor.
//!
//! Work goes to the *current stream* of a thread: the device's own stream, or the stream of the lane whose thread it is
//! ([`Context::enter_lane`]). Streams wait for each other through a [`GpuEvent`]. No call but a read of results blocks the host.
//!
//! ```text
//!   gpu        Gpu: one logical device with all that belongs to it      graph    a captured step, launched again whole
//!    │
//!   kernel     loaded programs, launches        cublaslt   plans and calls of matrix products
//!   nvrtc      source -> machine code, cached   product    what a matrix product is asked for
//!   program    sources and targets              readback   faults of kernels, results that are read later
//!   gate       loads wait for collectives       memory     device and pinned memory, uploads
//!    │
//!   context    context, streams, events, counters
//!   driver     the calls of the driver          library    which files, from where          error
//! ```

mod context;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
mod driver;
mod error;
mod gate;
mod gpu;
mod graph;
mod kernel;
#[cfg(feature = "cuda")]
mod library;
mod memory;
#[cfg(feature = "cuda")]
mod nvrtc;
#[cfg(not(feature = "cuda"))]
mod off;
mod product;
mod program;
mod readback;

#[cfg(not(feature = "cuda"))]
use off::{cublaslt, driver, library, nvrtc};

pub use context::{Calls, Context, GpuEvent, LaneGuard, calls};
pub use cublaslt::PlannedProduct;
/// The bindings to the CUDA libraries, for crates that call more of them than this one does.
#[cfg(feature = "cuda")]
pub use cudarc;
pub use error::{Error, Result};
pub use gate::CollectiveGuard;
pub use gpu::Gpu;
pub use graph::Graph;
pub use kernel::{Arguments, Grid, Kernel};
#[cfg(feature = "cuda")]
pub use library::symbol;
pub use library::{Library, driver_name, emulated, require};
pub use memory::{DeviceBlock, Pinned, captured_step};
pub use nvrtc::{compile, compiled};
pub use product::{Epilogue, Float, MatrixLayout, ProductForm, ProductPointers};
pub use program::{Image, Program, Target};
pub use readback::{FAULT, Readback};

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
