//! Ranks with a GPU each, over NCCL.
//!
//! Another communicator of the same ranks (threads, TCP, MPI) stays as the control plane. There every call is announced, so
//! that it is compared between ranks, late and lost ranks are named and the first error ends the run of all, as on every
//! backend; and what lies in the host's memory is exchanged there altogether. NCCL is given a call only when all its
//! ranks have come to it, so nothing waits on a GPU for a rank that may never come.
//!
//! ```text
//! caller   announce ──submit──────────────────── wait: its later work on the GPU comes after
//! lane              └─all have come─ exchange ─ add in order of the ranks ─ exchange ─┘     (a stream of its own)
//! watch                                looks after what is under way; aborts it where the run has failed
//!
//! route    what a rank does for a call: messages, and what is added when. Pure    library  NCCL's calls
//! combine  the kernel that adds in order of the ranks                            lane     the calls of a group, in order
//! watch    what is under way on the GPU                                          member   the communicator
//! ```
//!
//! A group has a lane and an NCCL communicator of its own, made when it is first used; messages have one a pair and direction.
//! No call waits for the GPU, but those that somebody observes.

mod combine;
mod lane;
mod library;
mod member;
mod route;
mod watch;

use std::time::Duration;

use phalanx_tensor::Device;
use phalanx_tensor::cuda::{Library, require};

use super::{Comm, Error, Result};
pub(crate) use member::{Session, join};

/// Who adds the elements of several ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// This crate, in order of the ranks: the bits are those of every other backend.
    #[default]
    InOrder,
    /// NCCL, in an order of its own, which may depend on the machine and on sizes. bf16 and f16 may be rounded at each
    /// addition.
    Library,
}

/// How ranks exchange what is on their GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclConfig {
    /// Who adds.
    pub sums: Sums,
    /// How long a call may run on a GPU, and how long NCCL may take to find the other ranks.
    pub timeout: Duration,
}

impl Default for NcclConfig {
    fn default() -> NcclConfig {
        NcclConfig { sums: Sums::InOrder, timeout: crate::launch::TIMEOUT }
    }
}

/// `control`'s rank with a GPU: what is there is exchanged over NCCL, everything else over `control`. All ranks do this, each
/// with a GPU of its own. `control` is not used for anything else from now on.
///
/// # Errors
/// If `device` is no GPU, or NCCL is not found.
pub fn nccl(control: Comm, device: Device, config: NcclConfig) -> Result<Comm> {
    join(control, device, config).map(|(_, comm)| comm)
}

/// Whether NCCL can be used here.
///
/// # Errors
/// What was looked for, and where.
pub fn check_nccl() -> Result<&'static str> {
    let from = require(Library::Nccl).map_err(Error::Launch)?;
    library::functions().map(|_| from).map_err(Error::Launch)
}
