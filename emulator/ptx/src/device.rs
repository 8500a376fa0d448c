//! The emulated device's limits (compute capability 9.0, with few multiprocessors), and how many blocks it holds at once.

use crate::Kernel;

/// Multiprocessors. Few, so that kernels whose grid follows it stay small.
pub const MULTIPROCESSORS: u32 = 4;
/// Threads of a block.
pub const THREADS_BLOCK: u32 = 1024;
/// Threads that a multiprocessor holds.
pub const THREADS_MULTIPROCESSOR: u32 = 2048;
/// Blocks that a multiprocessor holds.
pub const BLOCKS_MULTIPROCESSOR: u32 = 32;
/// Registers of a multiprocessor, and of a block.
pub const REGISTERS: u32 = 65_536;
/// Bytes of shared memory of a multiprocessor.
pub const SHARED_BYTES_MULTIPROCESSOR: u32 = 228 << 10;
/// Bytes of these that the system takes for each block.
pub const SHARED_BYTES_RESERVED: u32 = 1 << 10;
/// Bytes of shared memory that a block may ask for: 227 KiB.
pub const SHARED_BYTES_OPTIN: u32 = 227 << 10;
/// Lanes of a warp, and registers that a warp gets at a time.
pub const WARP: u32 = 32;
const REGISTERS_AT_A_TIME: u32 = 256;

impl Kernel {
    /// Threads that a block of it has at most.
    pub fn block_threads_max(&self) -> u32 {
        self.max_threads().unwrap_or(THREADS_BLOCK).min(THREADS_BLOCK)
    }

    /// Registers a thread that the device reckons with. Those of PTX are virtual, one a value, and a compiler shares them
    /// out; this is a bound, not a count.
    pub fn device_registers(&self) -> u32 {
        self.registers().clamp(16, 255).min(REGISTERS / self.block_threads_max().max(1))
    }

    /// How many blocks of that many threads and bytes of dynamic shared memory a multiprocessor holds at once.
    pub fn blocks_per_multiprocessor(&self, threads: u32, dynamic_shared_bytes: u32) -> u32 {
        if threads == 0 || threads > self.block_threads_max() {
            return 0;
        }
        let warps = threads.div_ceil(WARP);
        let warp_registers = (self.device_registers() * WARP).next_multiple_of(REGISTERS_AT_A_TIME);
        let shared =
            self.shared_bytes().saturating_add(dynamic_shared_bytes).saturating_add(SHARED_BYTES_RESERVED);
        let by_threads = THREADS_MULTIPROCESSOR / (warps * WARP);
        let by_registers = REGISTERS / (warps * warp_registers).max(1);
        let by_shared = SHARED_BYTES_MULTIPROCESSOR / shared.next_multiple_of(128).max(1);
        BLOCKS_MULTIPROCESSOR.min(by_threads).min(by_registers).min(by_shared)
    }
}
