//! Communicators: collectives between ranks that are threads, processes or machines.
//!
//! ```text
//! caller ─► Call ─► checked ─► Signature ─► plan ─► transfers ─► Pending
//!           tensors            compared     (pure)  │
//!                              between              ├─ threads   ranks in one process: the rank that comes last moves the
//!                              ranks                │            elements of all, directly between their tensors
//!                                                   ├─ wire      ranks in several processes, over messages: TCP, or MPI
//!                                                   ├─ nccl      ranks with a GPU each: NCCL, controlled over one of the above
//!                                                   └─ meta      one rank without peers: counts bytes, moves nothing
//!
//! threads, wire, nccl, meta ──► Communicator, Pending ──► Call ──► Signature, Reduction, plan
//! observed (a communicator that reports each call to an observer) ──► Communicator, Call
//! ```
//!
//! Sums are added in order of the ranks on every backend, so a result depends on the values and the number of ranks alone.
//! No call hangs: a rank that is late, ends early, calls something else, fails or dies ends the run of all ranks, with an
//! error that names it. Threads and wires copy a GPU's tensors to the host ([`Call`], `on_host`).

mod call;
mod communicator;
mod error;
mod meta;
#[cfg(feature = "nccl")]
mod nccl;
mod observed;
mod pending;
mod plan;
mod signature;
pub mod threads;
pub(crate) mod wire;

pub use call::{Call, Observed, Observer};
pub use communicator::{Comm, Communicator, Traffic};
pub use error::{Error, Result};
pub use meta::meta;
#[cfg(feature = "nccl")]
pub use nccl::{NcclConfig, Sums, check_nccl, nccl};
pub use observed::observed;
pub use pending::Pending;
pub use phalanx_kernels::combine::Reduction;
#[expect(deprecated, reason = "it stays importable")]
pub use plan::shares;
pub use signature::CollectiveKind;

#[cfg(feature = "nccl")]
pub(crate) use nccl::{Session as NcclSession, join as join_nccl};
pub(crate) use signature::Signature;

/// The former name of [`CollectiveKind`].
#[deprecated(since = "0.1.0", note = "renamed to `CollectiveKind`")]
pub type Kind = CollectiveKind;
