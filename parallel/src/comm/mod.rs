//! Communicators: what ranks do together, on threads, processes and machines.
//!
//! ```text
//! Call       a collective with its tensors            Signature  what it says of itself, compared between ranks
//! plan       which elements go where, in which order  Reduction  how elements of several ranks become one
//! Pending    a call that was started                  Communicator  a rank's membership in a group
//! threads    ranks in one process: whoever comes last moves the elements of all, directly between their tensors
//! wire       ranks in several processes, over messages: TCP, or MPI with the feature `mpi`
//! staged     how those take tensors of a GPU: by way of the host's memory
//! nccl       ranks with a GPU each, over one of the above and NCCL, with the feature `nccl`
//! meta       one rank without peers, which counts bytes
//! observed   any of them, with an observer of what ran when
//! ```
//!
//! Sums are added in order of the ranks on every backend, so a result depends on the values and the number of ranks
//! alone. Nothing hangs: a rank that does not come in time, ends early, calls something else, fails or dies ends the
//! run of all, with an error that names it.

mod call;
mod communicator;
mod error;
mod meta;
#[cfg(feature = "nccl")]
mod nccl;
mod observed;
mod pending;
mod plan;
mod reduction;
mod signature;
pub mod threads;
pub(crate) mod wire;

pub use call::Call;
pub use communicator::{Comm, Communicator, Traffic};
pub use error::{Error, Result};
pub use meta::meta;
#[cfg(feature = "nccl")]
pub use nccl::{NcclConfig, Sums, check_nccl, nccl};
pub use observed::{Observed, Observer, observed};
pub use pending::Pending;
pub use plan::shares;
pub use reduction::Reduction;
pub use signature::Kind;

#[cfg(feature = "nccl")]
pub(crate) use nccl::{Session as NcclSession, join as join_nccl};
pub(crate) use signature::Signature;
