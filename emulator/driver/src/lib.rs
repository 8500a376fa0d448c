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
//! The way of an operation: `lanes` puts it behind what its stream and CUDA's rules say, as an operation in
//! `queue`; `executor` runs it, at once or deferred; what it touched goes to `access`, which finds missing
//! waits. While a stream is captured it becomes a node instead (`capture`, `graph`). A fault loses the context
//! (`context`) with a text that `cuGetErrorString` gives and that is said on stderr once (`report`).
//!
//! Every file ends with the C functions of its noun. They are safe code over the pointer types of
//! `phalanx-emulator-link`.
//!
//! # Environment
//!
//! | variable | values | default |
//! |---|---|---|
//! | `PHALANX_EMULATED_DEVICES` | 1 to 64 | 2 |
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
