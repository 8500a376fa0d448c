//! What an emulated device says about itself: a device of compute capability 9.0 as NVIDIA documents it (CUDA C
//! Programming Guide, "Compute Capabilities"), with few multiprocessors, and without what the emulator does not do.

/// Bytes of shared memory that a block has without asking for more.
pub(crate) const SHARED_BYTES: u32 = 48 << 10;
/// Bytes of shared memory that a block may ask for: 227 KiB.
pub(crate) const SHARED_BYTES_OPTIN: u32 = 227 << 10;
/// Bytes of shared memory of a multiprocessor.
pub(crate) const SHARED_BYTES_MULTIPROCESSOR: u32 = 228 << 10;
/// Of which so many are the system's, a block.
pub(crate) const SHARED_BYTES_RESERVED: u32 = 1 << 10;
/// Threads of a block.
pub(crate) const THREADS_BLOCK: u32 = 1024;
/// Threads that a multiprocessor holds.
pub(crate) const THREADS_MULTIPROCESSOR: u32 = 2048;
/// Blocks that a multiprocessor holds.
pub(crate) const BLOCKS_MULTIPROCESSOR: u32 = 32;
/// Registers of a multiprocessor, and of a block.
pub(crate) const REGISTERS: u32 = 65_536;
/// Multiprocessors. Few, so that kernels whose grid follows it stay small.
pub(crate) const MULTIPROCESSORS: u32 = 4;
/// Blocks along x, y and z.
pub(crate) const GRID_MAX: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];
/// Threads of a block along x, y and z.
pub(crate) const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
/// Blocks of a cluster that every device has, and those that one may ask for.
pub(crate) const CLUSTER_MAX: u32 = 8;
/// See [`CLUSTER_MAX`].
pub(crate) const CLUSTER_MAX_OPTIN: u32 = 16;

/// The value of an attribute: the numbers are those of `CUdevice_attribute`. Those that are not named are of things
/// that do not exist here (textures, surfaces, virtual memory management, sharing between
/// processes), so 0.
pub(crate) fn device_attribute(attribute: i32, ordinal: usize) -> Option<i32> {
    let value = match attribute {
        1 => THREADS_BLOCK,
        2..=4 => BLOCK_MAX[attribute as usize - 2],
        5..=7 => GRID_MAX[attribute as usize - 5],
        8 => SHARED_BYTES,
        9 => 64 << 10,        // constant memory
        10 => 32,             // warp size
        11 => 0x7fff_ffff,    // pitch
        12 | 82 => REGISTERS, // a block, a multiprocessor
        13 => 1_980_000,      // clock, kHz
        14 => 512,            // texture alignment
        15 | 31 | 41 => 1,    // copies beside kernels, kernels side by side, unified addressing
        16 => MULTIPROCESSORS,
        33 => ordinal as u32 + 1, // bus
        36 => 3_201_000,          // memory clock, kHz
        37 => 6144,               // memory bus, bits
        38 => 50 << 20,           // second-level cache
        39 => THREADS_MULTIPROCESSOR,
        40 => 3,  // copy engines
        51 => 32, // pitch alignment
        75 => 9,
        76 => 0,
        78..=80 => 1, // stream priorities, first-level caches
        81 => SHARED_BYTES_MULTIPROCESSOR,
        87 => 2, // f32 to f64 performance
        90 => 1, // preemption
        95 => 1, // cooperative launches
        97 => SHARED_BYTES_OPTIN,
        99 => 1, // registering host memory
        106 => BLOCKS_MULTIPROCESSOR,
        111 => SHARED_BYTES_RESERVED,
        115 | 120 | 127 => 1, // memory pools, clusters, tensor maps
        17..=161 => 0,
        _ => return None,
    };
    i32::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_may_ask_for_227_kib_of_shared_memory() {
        assert_eq!(device_attribute(97, 0), Some(232_448));
        assert_eq!(device_attribute(8, 0), Some(49_152));
    }

    #[test]
    fn an_attribute_that_cuda_does_not_have_is_none() {
        assert_eq!(device_attribute(0, 0), None);
        assert_eq!(device_attribute(1000, 0), None);
    }
}
