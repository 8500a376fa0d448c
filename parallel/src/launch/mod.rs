//! Starting ranks: as threads of this process, or as the processes that a launcher such as `mpirun`, `srun` or
//! `torchrun` has started already.
//!
//! ```
//! use phalanx_parallel::comm::Reduction;
//! use phalanx_parallel::launch;
//! use phalanx_tensor::Tensor;
//!
//! let sums = launch::threads(3, |rank| {
//!     let mut x = Tensor::scalar(rank.rank() as f32 + 1.0, rank.device())?;
//!     rank.comm().all_reduce(&mut x, Reduction::Sum)?;
//!     Ok::<f32, phalanx_parallel::comm::Error>(x.item()?)
//! })?;
//! assert_eq!(sums, [6.0; 3]);
//! # Ok::<(), phalanx_parallel::comm::Error>(())
//! ```

mod caught;
mod cores;
mod environment;
mod place;
mod rank;
mod rendezvous;
mod seat;
mod threads;

pub(crate) use caught::caught;
pub use environment::{Backend, Environment, environment, is_launched};
pub use rank::Rank;
pub use threads::{Threads, threads};

use std::time::Duration;

/// How long ranks wait for each other unless told otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(600);
