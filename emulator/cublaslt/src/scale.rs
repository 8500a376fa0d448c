//! Alpha and beta: on the host, where they are read at the call, or in device memory, where they are read when it is
//! the product's turn.

use phalanx_emulator_link::driver::{Access, Driver};
use phalanx_emulator_link::pointer::Host;

use crate::call::{Result, present};
use crate::element::Kind;

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    Known(f64),
    OnDevice { address: u64, kind: Kind },
}

impl Scale {
    pub(crate) fn new(at: Host, kind: Kind, on_device: bool, name: &str) -> Result<Scale> {
        if on_device {
            let address = present((!at.is_null()).then_some(at.address() as u64), name)?;
            return Ok(Scale::OnDevice { address, kind });
        }
        let value = match kind {
            Kind::F64 => at.get::<f64>(),
            _ => at.get::<f32>().map(f64::from),
        };
        Ok(Scale::Known(present(value, name)?))
    }

    /// The value, when it is the product's turn.
    pub(crate) fn value(self, driver: &Driver) -> std::result::Result<f64, i32> {
        let Scale::OnDevice { address, kind } = self else {
            let Scale::Known(value) = self else { return Ok(0.0) };
            return Ok(value);
        };
        let mut bytes = [0; 8];
        driver.read(address, &mut bytes[..kind.bytes()])?;
        let [a, b, c, d, ..] = bytes;
        Ok(if kind == Kind::F64 {
            f64::from_le_bytes(bytes)
        } else {
            f64::from(f32::from_le_bytes([a, b, c, d]))
        })
    }

    pub(crate) fn access(self) -> Option<Access> {
        match self {
            Scale::Known(_) => None,
            Scale::OnDevice { address, kind } => {
                Some(Access { address, bytes: kind.bytes() as u64, written: 0 })
            }
        }
    }
}
