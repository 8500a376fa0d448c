//! Tensor maps: the 128 bytes that describe a tensor to the copies of whole boxes.

use phalanx_emulator_link::pointer::{In, Out};
use phalanx_ptx::{Fill, Swizzle, TensorMap, TensorType};

use crate::status::{Result, Status};

/// `CUtensorMap`, in a layout that only the interpreter knows, as only the GPU knows the real one.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoded([u8; 128]);

fn unknown(what: &str, number: i32) -> crate::status::Failure {
    Status::INVALID_VALUE.because(format!("{what} {number} of a tensor map"))
}

fn named<T: Copy>(what: &str, number: i32, known: &[T]) -> Result<T> {
    usize::try_from(number).ok().and_then(|i| known.get(i)).copied().ok_or_else(|| unknown(what, number))
}

/// The types of `CUtensorMapDataType`. Those that flush denormals are the same here.
const TYPES: [TensorType; 13] = [
    TensorType::U8,
    TensorType::U16,
    TensorType::U32,
    TensorType::I32,
    TensorType::U64,
    TensorType::I64,
    TensorType::F16,
    TensorType::F32,
    TensorType::F64,
    TensorType::Bf16,
    TensorType::F32,
    TensorType::Tf32,
    TensorType::Tf32,
];
const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
const FILLS: [Fill; 2] = [Fill::Zero, Fill::Nan];

export! {
    fn cuTensorMapEncodeTiled(
        map: Out<Encoded>, kind: i32, rank: u32, address: u64, sides: In<u64>, strides: In<u64>, window: In<u32>,
        steps: In<u32>, interleave: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        if !(1..=5).contains(&rank) || sides.is_null() || window.is_null() || steps.is_null() {
            return Err(Status::INVALID_VALUE.because(format!("a tensor map of rank {rank}, or a null list")));
        }
        if interleave != 0 {
            return Err(Status::NOT_SUPPORTED.because("interleaved tensor maps are not emulated"));
        }
        let rank = rank as usize;
        let tensor = TensorMap {
            kind: named("data type", kind, &TYPES)?,
            address,
            sides: sides.list(rank),
            strides: strides.list(rank - 1),
            window: window.list(rank),
            steps: steps.list(rank),
            swizzle: named("swizzle", swizzle, &SWIZZLES)?,
            fill: named("fill", fill, &FILLS)?,
        };
        let bytes = tensor.encode().map_err(|error| Status::INVALID_VALUE.because(error.to_string()))?;
        set!(map, Encoded(bytes))
    }
}
