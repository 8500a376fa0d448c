//! The emulated devices: their memory, their addresses, and what a device says about itself.

use std::sync::OnceLock;

use phalanx_emulator_link::exit;
use phalanx_ptx::Memory;
pub(crate) use phalanx_ptx::device::{
    BLOCKS_MULTIPROCESSOR, MULTIPROCESSORS, REGISTERS, SHARED_BYTES_MULTIPROCESSOR, SHARED_BYTES_OPTIN,
    SHARED_BYTES_RESERVED, THREADS_BLOCK, THREADS_MULTIPROCESSOR, WARP,
};

use crate::counting;
use crate::ledger::{self, Kind};
use crate::settings::{CountersTo, settings};
use crate::status::{Result, Status, failure};

/// One emulated device.
#[derive(Debug)]
pub(crate) struct Device {
    pub ordinal: usize,
    pub memory: Memory,
    /// Addresses of this device have this above bit 44.
    space: u64,
}

/// Bits of an address below those that tell the devices apart.
const SPACE_BITS: u32 = 44;

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

impl Device {
    fn new(ordinal: usize, memory_bytes: u64) -> Device {
        let memory = match settings().dry {
            true => Memory::without_contents(memory_bytes),
            false => Memory::placed(memory_bytes, settings().addresses),
        };
        let somewhere = memory.allocate(1).unwrap_or_default();
        let _ = memory.free(somewhere);
        memory.restart_peak();
        Device { ordinal, memory, space: somewhere >> SPACE_BITS }
    }

    /// Frees an allocation.
    pub(crate) fn free(&self, address: u64) -> Result<()> {
        ledger::gone(Kind::Allocation, address as usize);
        self.memory.free(address).map_err(|fault| failure(&fault))
    }

    /// Whether an address is one of this device's, allocated or not.
    pub(crate) fn owns(&self, address: u64) -> bool {
        address >> SPACE_BITS == self.space
    }
}

/// Makes the devices, as many and as large as the environment says.
pub(crate) fn initialize() -> &'static [Device] {
    let device = |ordinal| Device::new(ordinal, settings().memory_bytes);
    DEVICES.get_or_init(|| {
        if settings().leaks || settings().counters != CountersTo::Nowhere {
            exit::at_exit(at_exit);
        }
        (0..settings().devices).map(device).collect()
    })
}

/// What is reported when the process ends.
extern "C" fn at_exit() {
    counting::write();
    ledger::process_ended();
}

/// All devices.
///
/// # Errors
/// `cuInit` was not called.
pub(crate) fn devices() -> Result<&'static [Device]> {
    DEVICES.get().map(Vec::as_slice).ok_or_else(|| Status::NOT_INITIALIZED.because("cuInit was not called"))
}

/// The device of a number.
pub(crate) fn device(ordinal: i32) -> Result<&'static Device> {
    let devices = devices()?;
    usize::try_from(ordinal).ok().and_then(|i| devices.get(i)).ok_or_else(|| {
        Status::INVALID_DEVICE.because(format!("device {ordinal} of {} emulated ones", devices.len()))
    })
}

/// The device that an address belongs to.
pub(crate) fn device_of(address: u64) -> Option<&'static Device> {
    DEVICES.get()?.iter().find(|device| device.owns(address))
}

/// Where the allocation around an address begins.
pub(crate) fn allocation_start(address: u64) -> Option<u64> {
    device_of(address)?.memory.allocation(address).map(|(start, _)| start)
}

/// Bytes of shared memory that a block has without asking for more.
pub(crate) const SHARED_BYTES: u32 = 48 << 10;
/// Multiprocessors. Few, so that kernels whose grid follows it stay small; where nothing is executed, those of an H100 or
/// H200 (SXM).
pub(crate) fn multiprocessors() -> u32 {
    if settings().dry { 132 } else { MULTIPROCESSORS }
}
/// Blocks along x, y and z.
pub(crate) const GRID_MAX: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];
/// Threads of a block along x, y and z.
pub(crate) const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
/// Blocks of a cluster that every device has, and those that one may ask for.
pub(crate) const CLUSTER_MAX: u32 = 8;
/// See [`CLUSTER_MAX`].
pub(crate) const CLUSTER_MAX_OPTIN: u32 = 16;

/// The value of an attribute, for a device of compute capability 9.0 or 8.0 as NVIDIA documents it (CUDA C Programming
/// Guide, "Compute Capabilities"), with few multiprocessors, and without what the emulator does not do. The numbers
/// are those of `CUdevice_attribute`. Those that are not named are of things that do not exist here (textures,
/// surfaces, virtual memory management, sharing between processes), so 0.
pub(crate) fn device_attribute(attribute: i32, ordinal: usize) -> Option<i32> {
    let value = match attribute {
        75 if settings().before_hopper => 8,
        81 if settings().before_hopper => 164 << 10,
        97 if settings().before_hopper => 163 << 10,
        120 | 127 if settings().before_hopper => 0,
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
        16 => multiprocessors(),
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
