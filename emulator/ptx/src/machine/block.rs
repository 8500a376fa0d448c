//! A block: its shared memory, its warps, its barriers.

use std::collections::HashMap;

use super::barrier::Meeting;
use super::mbarrier::MemoryBarrier;
use super::warp::Warp;
use crate::memory::Contents;

/// Barriers that a block has.
pub(crate) const BARRIERS: usize = 16;

/// A block that is resident.
#[derive(Debug, Default)]
pub(crate) struct Block {
    pub(crate) index: [u32; 3],
    /// Its number in the grid, and in its cluster.
    pub(crate) number: u32,
    pub(crate) rank: u32,
    pub(crate) shared: Contents,
    pub(crate) warps: Vec<Warp>,
    /// Barriers in shared memory, by their offset.
    pub(crate) mbarriers: HashMap<u64, MemoryBarrier>,
    pub(crate) barriers: [Meeting; BARRIERS],
}
