//! An emulated device: its memory, its default context, and what it says about itself.

use std::sync::{Mutex, PoisonError};

use phalanx_ptx::Memory;

use crate::context::Context;
use crate::status::{Result, Status};
use crate::world::{World, world};
use phalanx_emulator_link::pointer::{Host, Out};
use std::sync::Arc;

/// One emulated device.
#[derive(Debug)]
pub(crate) struct Device {
    pub ordinal: usize,
    pub memory: Memory,
    /// Addresses of this device have this above bit 44.
    space: u64,
    /// The primary context and how often it is retained.
    primary: Mutex<Option<(usize, Arc<Context>, usize)>>,
}

/// Bits of an address below those that tell the devices apart.
const SPACE_BITS: u32 = 44;

impl Device {
    pub(crate) fn new(ordinal: usize, memory_bytes: u64) -> Device {
        let memory = Memory::new(memory_bytes);
        let somewhere = memory.allocate(1).unwrap_or_default();
        let _ = memory.free(somewhere);
        Device { ordinal, memory, space: somewhere >> SPACE_BITS, primary: Mutex::default() }
    }

    /// Whether an address is one of this device's, allocated or not.
    pub(crate) fn owns(&self, address: u64) -> bool {
        address >> SPACE_BITS == self.space
    }

    /// The handle of the primary context, which exists from now on.
    pub(crate) fn retain(&self, world: &'static World) -> usize {
        let mut primary = self.primary.lock().unwrap_or_else(PoisonError::into_inner);
        let (handle, _, count) = primary.get_or_insert_with(|| {
            let context = Arc::new(Context::new(world, self.ordinal));
            (world.contexts.add(context.clone()), context, 0)
        });
        *count += 1;
        *handle
    }

    /// Takes one `retain` back, or all of them. The context ends with the last.
    pub(crate) fn release(&self, world: &World, all: bool) -> Result<()> {
        let mut primary = self.primary.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, _, count)) = primary.as_mut() else {
            return if all {
                Ok(())
            } else {
                Err(Status::INVALID_CONTEXT.because("no primary context is retained"))
            };
        };
        *count -= 1;
        if (*count == 0 || all)
            && let Some((handle, context, _)) = primary.take()
        {
            drop(primary);
            context.end(world);
            world.contexts.remove(handle)?;
        }
        Ok(())
    }

    /// Whether the primary context exists.
    pub(crate) fn is_active(&self) -> bool {
        self.primary.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// The device of a number.
pub(crate) fn device(ordinal: i32) -> Result<&'static Device> {
    let devices = &world()?.devices;
    usize::try_from(ordinal).ok().and_then(|i| devices.get(i)).ok_or_else(|| {
        Status::INVALID_DEVICE.because(format!("device {ordinal} of {} emulated ones", devices.len()))
    })
}

fn copy_text(to: Out<u8>, room: i32, text: &str) -> Result<()> {
    let room = usize::try_from(room).unwrap_or(0);
    let bytes = text.bytes().take(room.saturating_sub(1)).chain([0]);
    bytes.enumerate().try_for_each(|(i, byte)| to.set_at(i, byte)).ok_or(Status::INVALID_VALUE.into())
}

/// 16 bytes that name a device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uuid([u8; 16]);

export! {
    @always {
        fn cuDeviceGetCount(count: Out<i32>) { set!(count, world()?.devices.len() as i32) }
        fn cuDeviceGet(out: Out<i32>, ordinal: i32) { set!(out, device(ordinal)?.ordinal as i32) }
        fn cuDeviceGetName(name: Out<u8>, room: i32, ordinal: i32) {
            let device = device(ordinal)?;
            copy_text(name, room, &format!("Phalanx emulated device {} (sm_90)", device.ordinal))
        }
        fn cuDeviceGetUuid(uuid: Out<Uuid>, ordinal: i32) { set!(uuid, uuid_of(device(ordinal)?)) }
        fn cuDeviceGetUuid_v2(uuid: Out<Uuid>, ordinal: i32) { set!(uuid, uuid_of(device(ordinal)?)) }
        fn cuDeviceGetPCIBusId(id: Out<u8>, room: i32, ordinal: i32) {
            copy_text(id, room, &format!("0000:{:02x}:00.0", device(ordinal)?.ordinal + 1))
        }
        fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: i32) {
            set!(bytes, device(ordinal)?.memory.capacity() as usize)
        }
        fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, ordinal: i32) {
            let device = device(ordinal)?;
            let known = crate::attribute::device_attribute(attribute, device.ordinal);
            let known = known.ok_or_else(|| Status::INVALID_VALUE.because(format!("device attribute {attribute}")))?;
            set!(value, known)
        }
        fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, ordinal: i32) {
            device(ordinal)?;
            set!(major, 9)?;
            set!(minor, 0)
        }
        fn cuDeviceCanAccessPeer(can: Out<i32>, ordinal: i32, peer: i32) {
            let (one, other) = (device(ordinal)?, device(peer)?);
            set!(can, i32::from(one.ordinal != other.ordinal))
        }
        fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: i32, ordinal: i32, peer: i32) {
            let (one, other) = (device(ordinal)?, device(peer)?);
            // 1: performance rank, 2: access, 3: native atomics, 4: arrays.
            set!(value, i32::from(one.ordinal != other.ordinal && matches!(attribute, 2 | 3)))
        }
        fn cuDeviceGetProperties(properties: Host, ordinal: i32) {
            Err(Status::NOT_SUPPORTED.because("cuDeviceGetAttribute says what cuDeviceGetProperties said"))
        }
        fn cuDevicePrimaryCtxRetain(context: Out<usize>, ordinal: i32) {
            let device = device(ordinal)?;
            set!(context, device.retain(world()?))
        }
        fn cuDevicePrimaryCtxRelease_v2(ordinal: i32) { device(ordinal)?.release(world()?, false) }
        fn cuDevicePrimaryCtxReset_v2(ordinal: i32) { device(ordinal)?.release(world()?, true) }
        fn cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, flags: u32) { device(ordinal).map(|_| ()) }
        fn cuDevicePrimaryCtxGetState(ordinal: i32, flags: Out<u32>, active: Out<i32>) {
            let device = device(ordinal)?;
            set!(flags, 0)?;
            set!(active, i32::from(device.is_active()))
        }
    }
}

fn uuid_of(device: &Device) -> Uuid {
    let mut bytes = *b"phalanx-emulated";
    bytes[15] = device.ordinal as u8;
    Uuid(bytes)
}
