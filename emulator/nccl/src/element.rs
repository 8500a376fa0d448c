//! Element types.

use crate::status::{Result, Status};

/// The type of a buffer's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl Kind {
    /// The type of an `ncclDataType_t`.
    pub(crate) fn from_number(number: i32) -> Result<Kind> {
        use Kind::*;
        let known = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16];
        let found = usize::try_from(number).ok().and_then(|i| known.get(i)).copied();
        found.ok_or_else(|| Status::INVALID_ARGUMENT.because(format!("data type {number} is not emulated")))
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Kind::I8 | Kind::U8 => 1,
            Kind::F16 | Kind::Bf16 => 2,
            Kind::I32 | Kind::U32 | Kind::F32 => 4,
            Kind::I64 | Kind::U64 | Kind::F64 => 8,
        }
    }
}
