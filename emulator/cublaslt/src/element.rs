//! Element types: how values lie in memory, and what they are computed in.

use half::{bf16, f16};

use crate::status::{Result, Status};

/// The type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementType {
    F64,
    F32,
    F16,
    Bf16,
}

impl ElementType {
    /// The type of a `cudaDataType`.
    pub(crate) fn from_number(number: i32) -> Result<ElementType> {
        match number {
            0 => Ok(ElementType::F32),
            1 => Ok(ElementType::F64),
            2 => Ok(ElementType::F16),
            14 => Ok(ElementType::Bf16),
            _ => Err(Status::NOT_SUPPORTED.because(format!("data type {number} is not emulated"))),
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            ElementType::F64 => 8,
            ElementType::F32 => 4,
            ElementType::F16 | ElementType::Bf16 => 2,
        }
    }
}

/// What inputs are rounded to before they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputRounding {
    AsTheyAre,
    Tf32,
    F16,
    Bf16,
}

impl InputRounding {
    fn round(self, x: f32) -> f32 {
        match self {
            InputRounding::AsTheyAre => x,
            InputRounding::Tf32 => tf32(x),
            InputRounding::F16 => f16::from_f32(x).to_f32(),
            InputRounding::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }
}

/// Rounds to 10 bits of mantissa, to nearest, ties away from zero (as `cvt.rna.tf32`).
fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
}

/// A number that products are computed in: f32, or f64 for f64.
pub(crate) trait Number: Copy + Send + Sync + Default + 'static {
    /// Element `index` of bytes that are elements of `kind`.
    fn load(kind: ElementType, inputs: InputRounding, bytes: &[u8], index: usize) -> Self;
    /// Puts a value there, rounded.
    fn store(self, kind: ElementType, bytes: &mut [u8], index: usize);
    fn fused(self, times: Self, plus: Self) -> Self;
    fn plain(self, times: Self, plus: Self) -> Self;
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
}

fn at<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[index * N..][..N]);
    value
}

impl Number for f32 {
    #[inline(always)]
    fn load(kind: ElementType, inputs: InputRounding, bytes: &[u8], index: usize) -> f32 {
        match kind {
            ElementType::F32 => inputs.round(f32::from_le_bytes(at(bytes, index))),
            ElementType::F64 => f64::from_le_bytes(at(bytes, index)) as f32,
            ElementType::F16 => f16::from_le_bytes(at(bytes, index)).to_f32(),
            ElementType::Bf16 => bf16::from_le_bytes(at(bytes, index)).to_f32(),
        }
    }

    #[inline(always)]
    fn store(self, kind: ElementType, bytes: &mut [u8], index: usize) {
        let to = &mut bytes[index * kind.bytes()..][..kind.bytes()];
        match kind {
            ElementType::F32 => to.copy_from_slice(&self.to_le_bytes()),
            ElementType::F64 => to.copy_from_slice(&f64::from(self).to_le_bytes()),
            ElementType::F16 => to.copy_from_slice(&f16::from_f32(self).to_le_bytes()),
            ElementType::Bf16 => to.copy_from_slice(&bf16::from_f32(self).to_le_bytes()),
        }
    }

    #[inline(always)]
    fn fused(self, times: f32, plus: f32) -> f32 {
        self.mul_add(times, plus)
    }

    #[inline(always)]
    fn plain(self, times: f32, plus: f32) -> f32 {
        self * times + plus
    }

    fn from_f64(x: f64) -> f32 {
        x as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f64 {
    #[inline(always)]
    fn load(kind: ElementType, _: InputRounding, bytes: &[u8], index: usize) -> f64 {
        match kind {
            ElementType::F64 => f64::from_le_bytes(at(bytes, index)),
            other => f64::from(f32::load(other, InputRounding::AsTheyAre, bytes, index)),
        }
    }

    #[inline(always)]
    fn store(self, kind: ElementType, bytes: &mut [u8], index: usize) {
        match kind {
            ElementType::F64 => bytes[index * 8..][..8].copy_from_slice(&self.to_le_bytes()),
            other => (self as f32).store(other, bytes, index),
        }
    }

    #[inline(always)]
    fn fused(self, times: f64, plus: f64) -> f64 {
        self.mul_add(times, plus)
    }

    #[inline(always)]
    fn plain(self, times: f64, plus: f64) -> f64 {
        self * times + plus
    }

    fn from_f64(x: f64) -> f64 {
        x
    }

    fn to_f64(self) -> f64 {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_keeps_ten_bits_and_rounds_ties_away() {
        assert_eq!(tf32(1.0 + 2f32.powi(-10)), 1.0 + 2f32.powi(-10));
        assert_eq!(tf32(1.0 + 2f32.powi(-11)), 1.0 + 2f32.powi(-10));
        assert_eq!(tf32(-1.0 - 2f32.powi(-12)), -1.0);
        assert_eq!(tf32(f32::INFINITY), f32::INFINITY);
    }
}
