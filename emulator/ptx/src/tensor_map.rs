//! Tensor maps: what `cuTensorMapEncodeTiled` makes and `cp.async.bulk.tensor` reads, in 128 bytes of our own layout.

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Whole numbers of 8 bits.
    U8,
    /// Whole numbers of 16 bits.
    U16,
    /// Whole numbers of 32 bits.
    U32,
    /// Signed whole numbers of 32 bits.
    I32,
    /// Whole numbers of 64 bits.
    U64,
    /// Signed whole numbers of 64 bits.
    I64,
    /// Half precision.
    F16,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// Brain floats.
    Bf16,
    /// Single precision of which ten bits of the fraction count.
    Tf32,
}

const TYPES: [TensorType; 11] = [
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
    TensorType::Tf32,
];

impl TensorType {
    /// The bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            TensorType::U8 => 1,
            TensorType::U16 | TensorType::F16 | TensorType::Bf16 => 2,
            TensorType::U32 | TensorType::I32 | TensorType::F32 | TensorType::Tf32 => 4,
            TensorType::U64 | TensorType::I64 | TensorType::F64 => 8,
        }
    }
}

/// How 16-byte pieces of a box are permuted in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Not at all.
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// Where the byte at an offset of shared memory is put: address bits from 7 on are added to those from 4 on.
    pub(crate) fn apply(self, offset: u64) -> u64 {
        let mask = match self {
            Swizzle::None => return offset,
            Swizzle::Bytes32 => 0x10,
            Swizzle::Bytes64 => 0x30,
            Swizzle::Bytes128 => 0x70,
        };
        offset ^ (offset >> 3 & mask)
    }

    /// Bytes that the innermost side of a box has at most.
    fn bytes(self) -> Option<u64> {
        match self {
            Swizzle::None => None,
            Swizzle::Bytes32 => Some(32),
            Swizzle::Bytes64 => Some(64),
            Swizzle::Bytes128 => Some(128),
        }
    }
}

/// What is read outside of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// A NaN.
    Nan,
}

/// A map that a device would refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor map: {0}")]
pub struct TensorMapError(pub String);

/// A tensor in global memory and the box of it that a copy moves. Sides are innermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// The type of the elements.
    pub kind: TensorType,
    /// The address of the first element: a multiple of 16.
    pub address: u64,
    /// Elements of each side, 1 to 5 sides of 1 to 2^32.
    pub sides: Vec<u64>,
    /// Bytes between neighbours along each side but the first: multiples of 16 below 2^40.
    pub strides: Vec<u64>,
    /// Elements of each side of the box, 1 to 256.
    pub window: Vec<u32>,
    /// Steps along each side, 1 to 8.
    pub steps: Vec<u32>,
    /// How shared memory is permuted.
    pub swizzle: Swizzle,
    /// What is read outside.
    pub fill: Fill,
}

/// The first bytes of a map.
const MAGIC: [u8; 4] = *b"tmap";

impl TensorMap {
    /// The 128 bytes that a kernel is given.
    ///
    /// # Errors
    /// If a device would refuse the map.
    pub fn encode(&self) -> Result<[u8; 128], TensorMapError> {
        self.check().map_err(TensorMapError)?;
        let rank = self.sides.len();
        let mut bytes = [0; 128];
        bytes[..4].copy_from_slice(&MAGIC);
        let kind = TYPES.iter().position(|kind| *kind == self.kind).unwrap_or(0);
        let swizzle = self.swizzle.bytes().map_or(0, |bytes| bytes.ilog2() - 4);
        bytes[4..8].copy_from_slice(&[kind as u8, rank as u8, swizzle as u8, (self.fill == Fill::Nan) as u8]);
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        for axis in 0..rank {
            bytes[16 + axis * 4..][..4].copy_from_slice(&((self.sides[axis] - 1) as u32).to_le_bytes());
            bytes[68 + axis * 2..][..2].copy_from_slice(&(self.window[axis] as u16).to_le_bytes());
            bytes[78 + axis] = self.steps[axis] as u8;
            if axis > 0 {
                bytes[36 + (axis - 1) * 8..][..8].copy_from_slice(&self.strides[axis - 1].to_le_bytes());
            }
        }
        Ok(bytes)
    }

    fn check(&self) -> Result<(), String> {
        let rank = self.sides.len();
        let lens = [self.strides.len() + 1, self.window.len(), self.steps.len()];
        if !(1..=5).contains(&rank) || lens.iter().any(|&len| len != rank) {
            return Err(format!("{rank} sides with {lens:?} strides (and one), sides of the box, and steps"));
        }
        if !self.address.is_multiple_of(16) {
            return Err(format!("address {:#x} is no multiple of 16", self.address));
        }
        if let Some(side) = self.sides.iter().find(|&&side| side == 0 || side > 1 << 32) {
            return Err(format!("a side of {side} elements"));
        }
        if let Some(stride) = self.strides.iter().find(|&&stride| stride % 16 != 0 || stride >= 1 << 40) {
            return Err(format!("a stride of {stride} bytes, which must be a multiple of 16 below 2^40"));
        }
        if let Some(side) = self.window.iter().find(|&&side| side == 0 || side > 256) {
            return Err(format!("a side of the box of {side} elements"));
        }
        if let Some(step) = self.steps.iter().find(|&&step| step == 0 || step > 8) {
            return Err(format!("a step of {step} elements"));
        }
        let inner = self.window[0] as u64 * self.kind.bytes();
        match self.swizzle.bytes() {
            _ if !inner.is_multiple_of(16) => {
                Err(format!("an innermost side of the box of {inner} bytes, no multiple of 16"))
            }
            Some(most) if inner > most => {
                Err(format!("an innermost side of the box of {inner} bytes, above the swizzle's {most}"))
            }
            _ => Ok(()),
        }
    }

    /// The map in 128 bytes, if it is one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<TensorMap> {
        let number = |at: usize, len: usize| -> u64 {
            bytes[at..at + len].iter().rev().fold(0, |value, &byte| value << 8 | byte as u64)
        };
        let rank = bytes[5] as usize;
        if bytes[..4] != MAGIC || !(1..=5).contains(&rank) {
            return None;
        }
        Some(TensorMap {
            kind: *TYPES.get(bytes[4] as usize)?,
            address: number(8, 8),
            sides: (0..rank).map(|axis| number(16 + axis * 4, 4) + 1).collect(),
            strides: (1..rank).map(|axis| number(36 + (axis - 1) * 8, 8)).collect(),
            window: (0..rank).map(|axis| number(68 + axis * 2, 2) as u32).collect(),
            steps: (0..rank).map(|axis| number(78 + axis, 1) as u32).collect(),
            swizzle: [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128]
                [bytes[6] as usize & 3],
            fill: if bytes[7] == 1 { Fill::Nan } else { Fill::Zero },
        })
    }
}
