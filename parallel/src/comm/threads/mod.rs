//! Ranks in one process. Each brings its tensors; who comes last has everything at hand and moves the elements of all,
//! directly between the tensors, with one thread for each rank.
//!
//! ```text
//! rank 0  ──arrives──waits───────────────────────┐
//! rank 1  ────────arrives──waits─────────────────┤ all go on
//! rank 2  ───────────────arrives──moves all──────┘
//! ```
//!
//! No rank ever has another's queue to copy through, and a call that nobody waits for costs no thread until it is
//! complete.

mod exchange;
mod member;
mod world;

pub(crate) use member::member;
pub use member::world;
pub(crate) use world::World;
