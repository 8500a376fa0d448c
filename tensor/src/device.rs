//! [`Device`]: a CPU, a CUDA device or `meta`.

use std::fmt;

use crate::{Error, Result};

/// Where a tensor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// A *logical* CPU device: a thread pool, an allocator and a ledger of its own. Tensors of different logical
    /// devices do not mix, exactly as on different GPUs, so a missing copy shows up on a laptop.
    Cpu(u16),
    /// An NVIDIA GPU.
    Cuda(u16),
    /// Shapes, dtypes and the ledger, without bytes and arithmetic.
    Meta(u16),
}

impl Device {
    /// The device that programs use when they name none.
    pub const CPU: Device = Device::Cpu(0);

    /// The device for a few numbers that the host reads about tensors of this one: itself if it is a CPU, else `cpu:0`.
    pub fn host(self) -> Device {
        if let Device::Cpu(_) = self { self } else { Device::CPU }
    }

    /// Whether tensors here are a GPU's, whose elements the host cannot touch.
    #[inline]
    pub fn is_cuda(self) -> bool {
        matches!(self, Device::Cuda(_))
    }

    /// Whether tensors here have no elements.
    #[inline]
    pub fn is_meta(self) -> bool {
        matches!(self, Device::Meta(_))
    }
}

impl Default for Device {
    fn default() -> Device {
        Device::CPU
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(i) => write!(f, "cpu:{i}"),
            Device::Cuda(i) => write!(f, "cuda:{i}"),
            Device::Meta(i) => write!(f, "meta:{i}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    /// `cpu`, `cuda`, `meta`, each with an optional `:index`.
    fn from_str(text: &str) -> Result<Device> {
        let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
        let wrong = || {
            Error::invalid(
                "device",
                format!("got {text:?}, wanted cpu, cuda or meta, with :INDEX or without"),
            )
        };
        let index = index.parse().map_err(|_| wrong())?;
        match kind {
            "cpu" => Ok(Device::Cpu(index)),
            "cuda" => Ok(Device::Cuda(index)),
            "meta" => Ok(Device::Meta(index)),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_bad_ones_say_what_was_wanted() {
        for device in [Device::Cpu(0), Device::Cuda(3), Device::Meta(7)] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        assert_eq!("cpu".parse::<Device>().unwrap(), Device::CPU);
        assert!("gpu".parse::<Device>().unwrap_err().to_string().contains("cpu, cuda or meta"));
    }
}
