//! The machine that runs a launch: resident blocks, their warps, and the memories they reach.
//!
//! ```text
//! grid                         a launch, its blocks and warps
//!   schedule                   blocks come and go; who runs next
//!   run, call, collective      a warp's loop; functions; shuffles and votes
//!     load, store              ── runs ── access        lanes in runs; from an address to checked bytes
//!       unwritten              what nothing has written, on its way through registers
//!     atomic                   ── access
//!     count                    accesses and threads, if they are to be counted
//!     barrier, asynchronous    ── sources ── access
//!     matrix, sparse, warpgroup ── access
//!       excuse                 races that are no mistakes
//!       fault                  kernel, line, block and thread of a fault
//!         state ── clocks ── flags
//! ```

mod access;
mod asynchronous;
mod atomic;
mod barrier;
mod call;
mod clocks;
mod collective;
mod count;
mod excuse;
mod fault;
mod flags;
mod grid;
mod load;
mod matrix;
mod run;
mod runs;
mod schedule;
mod sources;
mod sparse;
mod state;
mod store;
mod unwritten;
mod warpgroup;

pub(crate) use grid::run;
pub(crate) use state::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW};
