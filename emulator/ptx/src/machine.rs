//! The machine that runs a launch: resident blocks, their warps, and the memories they reach.
//!
//! ```text
//! grid                         blocks come and go; warps in turn
//!   run, call, collective      a warp's loop; functions; shuffles and votes
//!     load, store              ── runs ── access        lanes in runs; from an address to checked bytes
//!       unwritten              what nothing has written, on its way through registers
//!     atomic                   ── access
//!     count                    accesses and threads, if they are to be counted
//!     barrier, asynchronous    ── access
//!     matrix, warpgroup        ── access
//!       fault                  kernel, line, block and thread of a fault
//!         state ── clocks
//! ```

mod access;
mod asynchronous;
mod atomic;
mod barrier;
mod call;
mod clocks;
mod collective;
mod count;
mod fault;
mod grid;
mod load;
mod matrix;
mod run;
mod runs;
mod state;
mod store;
mod unwritten;
mod warpgroup;

pub(crate) use grid::run;
pub(crate) use state::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW};
