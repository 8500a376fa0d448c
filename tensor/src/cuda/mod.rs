//! NVIDIA GPUs: finding the driver, devices, stream-ordered memory, kernels compiled at run time, launches, graphs.
//!
//! Nothing here is needed to build: the libraries are loaded when a CUDA device is first asked for, and one that is
//! missing is an error that says what was looked for. What orders the work is this crate's: every operation of a thread
//! goes to its *current stream* (`Gpu::stream`), the device's own or that of the lane whose thread it is; lanes meet in
//! events as on every other device ([`crate::Stream`]).
//!
//! ```text
//! library   which files, from where            gpu      a device: context, streams, modules
//! driver    the calls, errors made ours        memory   allocation and copies
//! nvrtc     source -> PTX or CUBIN, cached     kernel   Program, Kernel; launch: arguments and grids
//! fault     errors that kernels find           graph    a captured step
//! cublaslt  the library of matrix products     product  what they are asked for
//! scratch   memory between an op's launches
//! gather    views made contiguous
//! event     points in a stream's work          raw      addresses and handles for other libraries
//! readback  numbers for the host, later        calls    how often a thread has waited
//! quiet     loads and collectives kept apart
//! ```

#[cfg(feature = "cuda")]
mod cache;
mod calls;
#[cfg_attr(not(feature = "cuda"), path = "cublaslt_off.rs")]
mod cublaslt;
#[cfg_attr(not(feature = "cuda"), path = "driver_off.rs")]
mod driver;
mod event;
mod fault;
mod gather;
mod gpu;
mod graph;
mod image;
mod kernel;
mod launch;
#[cfg_attr(not(feature = "cuda"), path = "library_off.rs")]
mod library;
mod memory;
#[cfg_attr(not(feature = "cuda"), path = "nvrtc_off.rs")]
mod nvrtc;
mod product;
mod quiet;
mod raw;
mod readback;
mod scratch;
mod upload;

pub use calls::{Calls, calls};
/// The bindings to the CUDA libraries, for crates that call more of them than this one does.
#[cfg(feature = "cuda")]
pub use cudarc;
pub use event::GpuEvent;
pub use fault::FAULT;
pub use gpu::Gpu;
pub use graph::Graph;
pub use image::{Image, Target};
pub use kernel::{Kernel, Program};
pub use launch::{Args, Grid};
#[cfg(feature = "cuda")]
pub use library::symbol;
pub use library::{Library, driver_name, emulated, require};
pub use memory::Pinned;
pub use nvrtc::{compile, compiled};
pub use product::{Matrices, Products, Sums, multiply};
pub use quiet::Meeting;
pub use raw::DevicePointer;
pub use readback::Readback;
pub use scratch::Scratch;

pub(crate) use event::lane_stream;
pub(crate) use memory::{DeviceBlock, copy_strided, zero};
