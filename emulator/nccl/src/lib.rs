//! NCCL without a GPU: its C interface for collectives between ranks of one machine, on the memory and the streams of
//! the emulated driver.
//!
//! Ranks are threads, or several are served by one thread within a group, or they are in several processes; they may
//! be on devices of their own or share one. A call is queued on its stream and becomes a node of a graph when the
//! stream is captured. The operation of the rank that comes last moves the data of all. Sums are added in the order
//! of the ranks, those of narrow floats in f32 and rounded once.
//!
//! What would hang or corrupt on GPUs is an error here that names the rank and its call: ranks that call different
//! things, counts that differ, a rank that aborts, and one that does not come within
//! `PHALANX_EMULATOR_NCCL_TIMEOUT_MS` milliseconds (60 seconds if unset). Such an error goes to stderr, is what
//! `ncclCommGetAsyncError` gives, and loses the contexts of the streams that wait. Where a rank has aborted, calls
//! that need it stay on their streams, as on GPUs, until their own rank aborts too, or the time is over.
//!
//! As with NCCL each rank of a communicator wants a GPU of its own, unless `NCCL_MULTI_RANK_GPU_ENABLE=1` lets several
//! share one. Operations of several communicators that are queued in unlike orders on ranks, so that they wait for each
//! other for ever, are an error that names all of them.
//!
//! Not emulated: several machines, splits of communicators of several processes, premultiplied sums, 8-bit floats,
//! windows and signals.
//!
//! ```text
//! api            the C functions
//! communicator   a rank's handle, and groups of calls        driver: contexts, and the order of streams
//! joining        how ranks become a communicator
//! rendezvous     matches the calls of all ranks, and carries them out
//! turns          calls of several communicators on a GPU, and ranks that wait for each other's turns
//! relay          the other processes: ids, sockets           message: what is sent, as bytes
//! call           a rank's call, and its part of the result
//! reduction      numbers
//! ```

mod api;
mod call;
mod communicator;
mod driver;
mod joining;
mod message;
mod reduction;
mod relay;
mod rendezvous;
mod status;
mod turns;

/// The file of this library, to be loaded by its path: beside the running executable or test, or in the folder that
/// the environment variable `PHALANX_CUDA_EMULATOR` names. `None` if it is not there, as when no `cdylib` was built.
pub fn library() -> Option<std::path::PathBuf> {
    phalanx_emulator_link::library::find("phalanx_emulated_nccl", env!("OUT_DIR"))
}
