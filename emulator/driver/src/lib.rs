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
//! counting      what kernels counted                          failing   allocations that fail on demand
//! copy          copies and fills                              memory    allocations and pools
//! order         the order in which threads of kernels run
//! host          page-locked memory                            event     events
//! capture       begins and ends captures
//! streams       the streams' order
//! graph         graphs, captures, their memory
//! executor      runs what is queued, at once or deferred
//! queue         tasks, and all queued work as one graph       race      finds missing waits
//! unwaited      page-locked memory, until the host waits      ledger    where objects were made
//! log           what is queued, of runs without execution
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
//! | `PHALANX_CUDA` | `dry`: nothing is executed, memory has no contents, and work is logged (`log`) | |
//! | `PHALANX_EMULATED_DEVICES` | 1 to 64 | 1 |
//! | `PHALANX_EMULATED_MEMORY_BYTES` | bytes a device | 16 GiB; without execution 80 GiB |
//! | `PHALANX_EMULATED_CAPABILITY` | `90`, `80` | `90` |
//! | `PHALANX_EMULATOR_STREAMS` | `eager`, `deferred`, `deferred:SEED` | `eager` |
//! | `PHALANX_EMULATOR_RACES` | `error`, `warn`, `off` | `error` |
//! | `PHALANX_EMULATOR_ADDRESSES` | `ascending`, `random:SEED` | `ascending` |
//! | `PHALANX_EMULATOR_UNWRITTEN` | `error`, `warn`, `off` | `error` |
//! | `PHALANX_EMULATOR_FREES` | `error`, `strict`, `status` | `error` |
//! | `PHALANX_EMULATOR_LEAKS` | `off`, `report` | `off` |
//! | `PHALANX_EMULATOR_COUNTERS` | `off`, `print`, a file | `off` |
//! | `PHALANX_EMULATOR_APPROXIMATE` | a seed | exact |
//! | `PHALANX_EMULATOR_FAIL_ALLOCATION` | the number of an allocation | none |
//! | `PHALANX_EMULATOR_SCHEDULE` | `fixed`, `SEED`, `exactly:SEED` | `fixed` |
//! | `PHALANX_EMULATOR_ALLOW_RACES` | kernels and lines, `equal@` before them for equal values | none |
//! | `PHALANX_EMULATOR_BARRIERS` | `volta`, `strict` | `volta` |

mod api;
mod capture;
mod context;
mod copy;
mod counting;
mod device;
mod event;
mod executor;
mod failing;
mod graph;
mod host;
mod launch;
mod ledger;
mod log;
mod memory;
mod module;
mod order;
mod queue;
mod race;
mod settings;
mod status;
mod streams;
mod unwaited;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The file of this library, to be loaded by its path: beside the running executable or test, or in the folder that
/// the environment variable `PHALANX_CUDA_EMULATOR` names. `None` if it is not there, as when no `cdylib` was built.
pub fn library() -> Option<std::path::PathBuf> {
    phalanx_emulator_link::library::find("phalanx_emulated_driver", env!("OUT_DIR"))
}

/// Runs a test once for each seed; all kernels that it launches through the loaded driver run in an order drawn from the
/// seed, another one for each launch. The order is one for the whole process, so other tests must not run beside it.
///
/// # Errors
/// The first error of the test, with the seed, or that the emulated driver is not loaded. A panic of the test passes
/// through, after the seed was printed.
pub fn for_each_seed<E: std::fmt::Display>(
    seeds: impl IntoIterator<Item = u64>,
    mut test: impl FnMut() -> Result<(), E>,
) -> Result<(), String> {
    /// Whatever becomes of the test, later ones have the environment's order again.
    struct Restore(&'static phalanx_emulator_link::driver::Driver);
    impl Drop for Restore {
        fn drop(&mut self) {
            let _ = self.0.schedule("");
        }
    }
    let driver = Restore(phalanx_emulator_link::driver::Driver::loaded()?);
    phalanx_ptx::for_each_seed(seeds, |seed| {
        let understood = driver.0.schedule(&seed.to_string());
        debug_assert_eq!(understood, Ok(()), "a number is a seed");
        test()
    })
}
