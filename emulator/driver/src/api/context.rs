//! Devices and contexts.

use std::sync::Arc;

use phalanx_emulator_link::pointer::{Host, Out};

use crate::capture::forbidden;
use crate::context::{
    CONTEXTS, Context, current_handle, here, is_primary_active, pop, push, release_primary, retain_primary,
    unstack,
};
use crate::device::{Device, device, device_attribute, devices};
use crate::ledger;
use crate::status::{Result, Status};
use crate::streams::{PRIORITY_GREATEST, PRIORITY_LEAST, end_context, synchronize_all};

fn create(out: Out<usize>, ordinal: i32) -> Result<()> {
    let handle = CONTEXTS.add(Arc::new(Context::new(devices()?, device(ordinal)?.ordinal)));
    set!(out, handle)?;
    push(handle)
}

fn checked(handle: usize) -> Result<Arc<Context>> {
    devices()?;
    Ok(CONTEXTS.get(handle)?)
}

/// Takes one `retain` of the primary context back, or all of them. The context ends with the last.
fn release(ordinal: i32, all: bool) -> Result<()> {
    if let Some((handle, context)) = release_primary(device(ordinal)?, all)? {
        end_context(&context);
        ledger::context_ended(&context);
        CONTEXTS.remove(handle)?;
    }
    Ok(())
}

fn peer(handle: usize) -> Result<(Arc<Context>, usize)> {
    let (here, other) = (here()?, CONTEXTS.get(handle)?);
    if here.ordinal == other.ordinal {
        return Err(Status::INVALID_DEVICE.because("a device is no peer of itself"));
    }
    Ok((here, other.ordinal))
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

fn uuid_of(device: &Device) -> Uuid {
    let mut bytes = *b"phalanx-emulated";
    bytes[15] = device.ordinal as u8;
    Uuid(bytes)
}

export! {
    @always {
        fn cuDeviceGetCount(count: Out<i32>) { set!(count, devices()?.len() as i32) }
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
            let known = device_attribute(attribute, device.ordinal);
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
            set!(context, retain_primary(device(ordinal)?)?)
        }
        fn cuDevicePrimaryCtxRelease_v2(ordinal: i32) { release(ordinal, false) }
        fn cuDevicePrimaryCtxReset_v2(ordinal: i32) { release(ordinal, true) }
        fn cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, flags: u32) { device(ordinal).map(|_| ()) }
        fn cuDevicePrimaryCtxGetState(ordinal: i32, flags: Out<u32>, active: Out<i32>) {
            let device = device(ordinal)?;
            set!(flags, 0)?;
            set!(active, i32::from(is_primary_active(device)))
        }
        fn cuCtxCreate_v2(out: Out<usize>, flags: u32, ordinal: i32) { create(out, ordinal) }
        fn cuCtxCreate_v3(out: Out<usize>, affinity: Host, count: i32, flags: u32, ordinal: i32) { create(out, ordinal) }
        fn cuCtxCreate_v4(out: Out<usize>, parameters: Host, flags: u32, ordinal: i32) { create(out, ordinal) }
        fn cuCtxGetCurrent(out: Out<usize>) { set!(out, current_handle()) }
        fn cuCtxSetCurrent(handle: usize) {
            if handle != current_handle() {
                let context = if handle == 0 { None } else { Some(checked(handle)?) };
                pop();
                if context.is_some() {
                    push(handle)?;
                }
            }
            Ok(())
        }
        fn cuCtxPushCurrent_v2(handle: usize) { push(handle) }
        fn cuCtxPopCurrent_v2(out: Out<usize>) {
            let handle = pop().ok_or_else(|| Status::INVALID_CONTEXT.because("no context is current to this thread"))?;
            if out.is_null() { Ok(()) } else { set!(out, handle) }
        }
        fn cuCtxDestroy_v2(handle: usize) {
            devices()?;
            let context = CONTEXTS.remove(handle)?;
            end_context(&context);
            ledger::context_ended(&context);
            unstack(handle);
            Ok(())
        }
    }
    fn cuCtxGetDevice(out: Out<i32>) { set!(out, here()?.ordinal as i32) }
    fn cuCtxGetId(context: usize, out: Out<u64>) {
        let context = if context == 0 { here()? } else { CONTEXTS.get(context)? };
        set!(out, context.id)
    }
    fn cuCtxGetApiVersion(context: usize, version: Out<u32>) { set!(version, 3020) }
    fn cuCtxGetFlags(flags: Out<u32>) { set!(flags, 0) }
    fn cuCtxSetFlags(flags: u32) { here().map(|_| ()) }
    fn cuCtxGetCacheConfig(config: Out<i32>) { set!(config, 0) }
    fn cuCtxSetCacheConfig(config: i32) { here().map(|_| ()) }
    fn cuCtxGetLimit(bytes: Out<usize>, limit: i32) {
        here()?;
        // Stack, printf's buffer, the device's heap.
        let known = [1 << 10, 1 << 20, 8 << 20].get(usize::try_from(limit).unwrap_or(usize::MAX)).copied();
        set!(bytes, known.unwrap_or(0))
    }
    fn cuCtxSetLimit(limit: i32, bytes: usize) { here().map(|_| ()) }
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        here()?;
        if !least.is_null() {
            set!(least, PRIORITY_LEAST)?;
        }
        if greatest.is_null() { Ok(()) } else { set!(greatest, PRIORITY_GREATEST) }
    }
    fn cuCtxSynchronize() {
        let context = here()?;
        forbidden("cuCtxSynchronize")?;
        synchronize_all(context.id);
        context.check()
    }
    fn cuCtxEnablePeerAccess(handle: usize, flags: u32) {
        let (here, other) = peer(handle)?;
        if here.add_peer(other) { Ok(()) } else { Err(Status::PEER_ACCESS_ALREADY_ENABLED.into()) }
    }
    fn cuCtxDisablePeerAccess(handle: usize) {
        let (here, other) = peer(handle)?;
        if here.remove_peer(other) { Ok(()) } else { Err(Status::PEER_ACCESS_NOT_ENABLED.into()) }
    }
}
