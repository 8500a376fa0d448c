//! What an address is: whose, and where it begins.

use phalanx_emulator_link::pointer::{Host, In};

use crate::context::here;
use crate::status::{Result, Status, present};
use crate::world::world;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

fn query(value: Host, attribute: i32, address: u64) -> Result<()> {
    let world = world()?;
    let on_device = world.device_of(address).and_then(|d| Some((d, d.memory.allocation(address)?)));
    let (kind, ordinal, start, bytes) = match (on_device, world.host.around(address as usize)) {
        (Some((device, (start, bytes))), _) => (DEVICE, device.ordinal, start, bytes),
        (None, Some((start, bytes, _))) => (HOST, here()?.ordinal, start as u64, bytes as u64),
        (None, None) => {
            return Err(Status::INVALID_VALUE.because(format!("the driver does not know {address:#x}")));
        }
    };
    let done = match attribute {
        2 => value.set(kind),
        3 if kind == DEVICE => value.set(address),
        4 if kind == HOST => value.set(address),
        7 => value.set(start),
        8 => value.set(0_u8),
        9 => value.set(ordinal as i32),
        11 => value.set(start),
        12 => value.set(bytes as usize),
        13 => value.set(1_u8),
        _ => {
            return Err(
                Status::INVALID_VALUE.because(format!("pointer attribute {attribute} of {address:#x}"))
            );
        }
    };
    present(done, "value")
}

export! {
    fn cuPointerGetAttribute(value: Host, attribute: i32, address: u64) { query(value, attribute, address) }
    fn cuPointerGetAttributes(count: u32, attributes: In<i32>, values: In<Host>, address: u64) {
        for (attribute, value) in attributes.list(count as usize).into_iter().zip(values.list(count as usize)) {
            // Unknown addresses are of no type, which is no error here.
            if query(value, attribute, address).is_err() {
                present(value.set(0_u32), "a value")?;
            }
        }
        Ok(())
    }
}
