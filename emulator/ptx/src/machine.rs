//! The machine that runs a launch: resident blocks, their warps, and the memories they reach.

mod access;
mod atomic;
mod barrier;
mod block;
mod bulk;
mod bytes;
mod call;
mod clocks;
mod copies;
mod fault;
mod grid;
mod load;
mod matrix;
mod mbarrier;
mod product;
mod proxy;
mod run;
mod shadow;
mod store;
mod target;
mod together;
mod touched;
mod warp;
mod warpgroup;
mod watched;
mod wmma;

pub(crate) use grid::run;
pub(crate) use shadow::Shadow;

use std::sync::MutexGuard;

use crate::code::Program;
use crate::memory::Space;
use crate::{Checks, Fault, Kernel, Launch, Report};
use barrier::ClusterMeeting;
use block::Block;
use clocks::Clocks;
use target::Cached;

/// Where shared memory begins among generic addresses.
pub(crate) const SHARED_WINDOW: u64 = 1 << 56;
/// Where a thread's local memory begins.
pub(crate) const LOCAL_WINDOW: u64 = 2 << 56;
/// Where the kernel's parameters begin.
pub(crate) const PARAMETER_WINDOW: u64 = 3 << 56;
/// Bits of a shared address below the block's rank in its cluster, plus one.
pub(crate) const RANK_SHIFT: u32 = 24;

type Outcome<T> = Result<T, Box<Fault>>;

/// A launch under way.
pub(crate) struct Machine<'a> {
    kernel: &'a Kernel,
    program: &'a Program,
    launch: Launch,
    checks: Checks,
    parameters: &'a [u8],
    spaces: Vec<MutexGuard<'a, Space>>,
    blocks: Vec<Block>,
    clocks: Clocks,
    /// For each instruction, the allocation that it met last.
    cache: Vec<Cached>,
    report: Report,
    /// Instructions since anything was written or anyone got past a barrier.
    idle: u64,
    cluster: ClusterMeeting,
    /// Of a cooperative launch, whose blocks are all resident: where its barrier is.
    workspace: Option<u64>,
}
