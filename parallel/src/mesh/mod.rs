//! The mesh: ranks laid out along the axes of pipeline, data and tensor parallelism, and their groups.
//!
//! ```text
//! rank = tp + TP * (dp + DP * pp)          TP = 2, DP = 2, PP = 2:
//!
//!              tp 0  tp 1                             tp 0  tp 1
//! pp 0:  dp 0    0     1              pp 1:  dp 0       4     5
//!        dp 1    2     3                     dp 1       6     7
//! ```
//!
//! Tensor parallelism, which communicates most, has neighbours, as Megatron lays them out.

mod groups;
mod layout;

pub use groups::Groups;
pub use layout::{Axis, Coordinates, Mesh};
