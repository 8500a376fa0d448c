//! How many blocks of a kernel a multiprocessor holds, by the limits of the device.

use phalanx_emulator_link::pointer::{In, Out};

use crate::attribute::{
    BLOCKS_MULTIPROCESSOR, CLUSTER_MAX, CLUSTER_MAX_OPTIN, MULTIPROCESSORS, REGISTERS,
    SHARED_BYTES_MULTIPROCESSOR, SHARED_BYTES_RESERVED, THREADS_MULTIPROCESSOR,
};
use crate::function::Function;
use crate::launch::Config;
use crate::status::{Result, Status, present};
use crate::world::world;

/// Lanes of a warp, and registers that a warp gets at a time.
const WARP: u32 = 32;
const REGISTERS_AT_A_TIME: u32 = 256;

/// How many blocks of that many threads and bytes of dynamic shared memory a multiprocessor holds at once.
pub(crate) fn blocks_per_multiprocessor(function: &Function, threads: u32, dynamic_shared_bytes: u32) -> u32 {
    if threads == 0 || threads > function.threads_max {
        return 0;
    }
    let warps = threads.div_ceil(WARP);
    let warp_registers = (function.registers() * WARP).next_multiple_of(REGISTERS_AT_A_TIME);
    let shared =
        function.shared_bytes.saturating_add(dynamic_shared_bytes).saturating_add(SHARED_BYTES_RESERVED);
    let by_threads = THREADS_MULTIPROCESSOR / (warps * WARP);
    let by_registers = REGISTERS / (warps * warp_registers).max(1);
    let by_shared = SHARED_BYTES_MULTIPROCESSOR / shared.next_multiple_of(128).max(1);
    BLOCKS_MULTIPROCESSOR.min(by_threads).min(by_registers).min(by_shared)
}

fn max_active(blocks: Out<i32>, function: usize, threads: i32, shared_bytes: usize) -> Result<()> {
    let function = world()?.functions.get(function)?;
    let threads = u32::try_from(threads).ok().filter(|n| *n > 0);
    let threads = threads.ok_or_else(|| Status::INVALID_VALUE.because("blocks without threads"))?;
    let shared_bytes = u32::try_from(shared_bytes).unwrap_or(u32::MAX);
    set!(blocks, blocks_per_multiprocessor(&function, threads, shared_bytes) as i32)
}

/// Bytes of dynamic shared memory of a block with that many threads.
type SharedBytes = extern "C" fn(i32) -> usize;

fn potential(
    grid: Out<i32>,
    block: Out<i32>,
    function: usize,
    shared_of: Option<SharedBytes>,
    shared_bytes: usize,
    limit: i32,
) -> Result<()> {
    let function = world()?.functions.get(function)?;
    let most = u32::try_from(limit).ok().filter(|n| *n > 0).unwrap_or(1024).min(function.threads_max);
    let mut best = (0, 0, 0);
    for threads in (1..=most.div_ceil(WARP)).rev().map(|warps| (warps * WARP).min(most)) {
        let shared = shared_of.map_or(shared_bytes, |of| of(threads as i32));
        let blocks = blocks_per_multiprocessor(&function, threads, u32::try_from(shared).unwrap_or(u32::MAX));
        if blocks * threads > best.0 {
            best = (blocks * threads, blocks, threads);
        }
    }
    set!(grid, (best.1 * MULTIPROCESSORS) as i32)?;
    set!(block, best.2 as i32)
}

export! {
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>, function: usize, threads: i32, shared_bytes: usize,
    ) {
        max_active(blocks, function, threads, shared_bytes)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, function: usize, threads: i32, shared_bytes: usize, flags: u32,
    ) {
        max_active(blocks, function, threads, shared_bytes)
    }
    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, function: usize, shared_of: Option<SharedBytes>, shared_bytes: usize,
        limit: i32,
    ) {
        potential(grid, block, function, shared_of, shared_bytes, limit)
    }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, function: usize, shared_of: Option<SharedBytes>, shared_bytes: usize,
        limit: i32, flags: u32,
    ) {
        potential(grid, block, function, shared_of, shared_bytes, limit)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, function: usize, blocks: i32, threads: i32) {
        let function = world()?.functions.get(function)?;
        let blocks = u32::try_from(blocks).ok().filter(|n| *n > 0).ok_or(Status::INVALID_VALUE)?;
        let each = SHARED_BYTES_MULTIPROCESSOR / blocks;
        set!(bytes, each.saturating_sub(SHARED_BYTES_RESERVED + function.shared_bytes) as usize)
    }
    fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: usize, config: In<Config>) {
        let function = world()?.functions.get(function)?;
        present(config.get(), "config")?;
        set!(size, if function.has_big_clusters() { CLUSTER_MAX_OPTIN } else { CLUSTER_MAX } as i32)
    }
    fn cuOccupancyMaxActiveClusters(clusters: Out<i32>, function: usize, config: In<Config>) {
        let function = world()?.functions.get(function)?;
        let config = present(config.get(), "config")?;
        let (cluster, _) = config.cluster()?;
        let threads: u32 = config.block.iter().product();
        let blocks = blocks_per_multiprocessor(&function, threads, config.shared_bytes) * MULTIPROCESSORS;
        set!(clusters, (blocks / cluster.iter().product::<u32>().max(1)) as i32)
    }
}
