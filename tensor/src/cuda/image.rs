//! [`Target`] and [`Image`]: what a program is compiled for, and what comes of it.

use std::fmt;

use super::{Gpu, emulated};

/// What a program is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Machine code (CUBIN) of a compute capability, such as `Cubin(90)`: assembled, so that inline PTX is checked too.
    Cubin(u32),
    /// PTX of a compute capability: what the emulator runs.
    Ptx(u32),
}

impl Target {
    /// What a device runs.
    pub(super) fn of(gpu: &Gpu) -> Target {
        let (major, minor) = gpu.capability();
        let capability = major * 10 + minor;
        if emulated() { Target::Ptx(capability) } else { Target::Cubin(capability) }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // From 9.0 on the suffix gives the instructions of this very architecture.
        let suffix = |capability| if capability >= 90 { "a" } else { "" };
        match *self {
            Target::Cubin(c) => write!(f, "sm_{c}{}", suffix(c)),
            Target::Ptx(c) => write!(f, "compute_{c}{}", suffix(c)),
        }
    }
}

/// A compiled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// PTX, with a 0 at its end, or a CUBIN.
    pub code: Vec<u8>,
    /// What the compiler says of it: of a CUBIN, the registers and spills of each kernel.
    pub log: String,
}
