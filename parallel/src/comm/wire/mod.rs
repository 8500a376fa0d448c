//! Ranks in several processes, over messages.
//!
//! One thread of each process, the [`driver`], owns the wire. Calls and messages reach it as events; a call goes through
//! three phases, each of which begins when everything awaited in the one before has come:
//!
//! ```text
//! check    every rank tells every other what it calls; whoever disagrees, all find out
//! give     sources send their part of each transfer to its owner          (see the plan)
//! results  owners combine in order of the ranks, and send to the destinations
//! ```
//!
//! Nothing blocks, so the driver always notices who is late, gone or has failed.

pub(crate) mod combine;
pub(crate) mod driver;
mod letter;
mod member;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
mod shared;
mod task;
pub(crate) mod tcp;

pub(crate) use driver::Driver;
pub(crate) use member::{Process, connect};

use super::Result;

/// Carries whole messages between processes, in order between each pair.
pub(crate) trait Wire: Send {
    /// Sends without waiting for anything.
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()>;

    /// A message that has come. Wires that bring messages to the driver as events have none.
    fn poll(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        Ok(None)
    }

    /// Whether messages come only when asked for.
    fn is_polled(&self) -> bool {
        false
    }

    /// Whether everything sent is out of this process's hands.
    fn is_flushed(&mut self) -> bool;

    /// Ends it; `orderly` if all ranks do the same now.
    fn close(&mut self, orderly: bool);
}
