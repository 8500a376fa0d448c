//! A CUDA driver without a GPU: the driver's C interface, with kernels run by the PTX interpreter `phalanx-ptx`.
//!
//! A program uses it by loading it by its path before the first CUDA call: the library's SONAME is the one that cudarc
//! and others ask the loader for. Its file never has a vendor's name, so no program gets it by accident. [`library`]
//! says where the file is. The exported `phalanx_emulated_driver_name` tells a program that this is the emulator.
//!
//! ```
//! if let Some(driver) = phalanx_emulated_driver::library() {
//!     // SAFETY: the library does nothing when it is loaded.
//!     std::mem::forget(unsafe { libloading::Library::new(driver) }?);
//! }
//! # Ok::<(), libloading::Error>(())
//! ```
//!
//! ```text
//! api           the C functions, safe code over the pointer types of `phalanx-emulator-link`
//! launch        checks of launches, kernels as tasks          module    modules and functions
//! copy          copies and fills                              memory    allocations and pools
//! host          page-locked memory                            event     events
//! capture       begins and ends captures
//! streams       the streams' order
//! graph         graphs, captures, their memory
//! executor      runs what is queued, at once or deferred
//! queue         tasks, and all queued work as one graph       race      finds missing waits
//! context       contexts, and faults that end them            device    memory and attributes
//! ```
//!
//! `streams` puts a task behind what its stream and CUDA's rules say, as an operation in `queue`. `executor` runs the
//! operation and gives what it touched to `race`. While a stream is captured the task becomes a node of a graph instead.
//! A fault ends the context with a text that goes to stderr once and that `cuGetErrorString` gives (`status`).
//!
//! Each file has the static table of the handles of its objects. Locks are taken downwards: the streams' before the
//! queue's.
//!
//! # Environment
//!
//! | variable | values | default |
//! |---|---|---|
//! | `PHALANX_EMULATED_DEVICES` | 1 to 64 | 1 |
//! | `PHALANX_EMULATED_MEMORY_BYTES` | bytes a device | 16 GiB |
//! | `PHALANX_EMULATOR_STREAMS` | `eager`, `deferred`, `deferred:SEED` | `eager` |
//! | `PHALANX_EMULATOR_RACES` | `error`, `warn`, `off` | `error` |

mod api;
mod capture;
mod context;
mod copy;
mod device;
mod event;
mod executor;
mod graph;
mod host;
mod launch;
mod memory;
mod module;
mod queue;
mod race;
mod settings;
mod status;
mod streams;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The file of this library, to be loaded by its path: beside the running executable or test, or in the folder that
/// the environment variable `PHALANX_CUDA_EMULATOR` names. `None` if it is not there, as when no `cdylib` was built.
pub fn library() -> Option<std::path::PathBuf> {
    phalanx_emulator_link::library::find("phalanx_emulated_driver", env!("OUT_DIR"))
}
