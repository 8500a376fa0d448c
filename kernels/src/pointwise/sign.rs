//! Functions that change no more of a float than its sign: of halves in 16 bits, without widening them.

use bytemuck::{cast_slice, cast_slice_mut};
use phalanx_tensor::{DType, Device, Element, Result, Tensor, bf16, f16};

use super::{in_order, map_stored};
use crate::simd::{Isa, Kernel, dispatch};

/// The sign's bit of a half.
pub(crate) const SIGN: u16 = 0x8000;

/// What is done to the bits of a half.
#[derive(Clone, Copy)]
pub(crate) struct Signs {
    /// Bits that are set to 0.
    pub(crate) cleared: u16,
    /// Bits that are then exchanged.
    pub(crate) flipped: u16,
}

/// The function of halves on a CPU, with the bits that widening and rounding give: a NaN is made quiet. `None` of other tensors.
pub(crate) fn map_signs(op: &'static str, signs: Signs, x: &Tensor) -> Option<Result<Tensor>> {
    match (x.device(), x.dtype()) {
        (Device::Cpu(_), DType::BF16) => Some(map::<bf16>(op, signs, [0x7f80, 0x40], x)),
        (Device::Cpu(_), DType::F16) => Some(map::<f16>(op, signs, [0x7c00, 0x200], x)),
        _ => None,
    }
}

fn map<T: Element>(op: &'static str, signs: Signs, nan: [u16; 2], x: &Tensor) -> Result<Tensor> {
    in_order(op, x.dtype(), [x], |inputs, out| {
        let block = |[from]: [&[T]; 1], to: &mut [T]| {
            dispatch(Block { from: cast_slice(from), to: cast_slice_mut(to), signs, nan });
        };
        map_stored(op, &block, inputs, out)
    })
}

struct Block<'a> {
    from: &'a [u16],
    to: &'a mut [u16],
    signs: Signs,
    /// Infinity, beyond which are NaNs, and the bit that makes one quiet.
    nan: [u16; 2],
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let [infinity, quiet] = self.nan;
        let (kept, flipped) = (!self.signs.cleared, self.signs.flipped);
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            let quiet = if from & !SIGN > infinity { quiet } else { 0 };
            *to = ((from | quiet) & kept) ^ flipped;
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor, bf16, f16};

    use crate::ops::{abs, cast, neg};

    #[test]
    fn halves_have_the_bits_that_widening_and_rounding_give() {
        type Function = fn(&Tensor) -> phalanx_tensor::Result<Tensor>;
        let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let all = [
            Tensor::from_slice(&bf16s, &[256, 256], Device::CPU).unwrap(),
            Tensor::from_slice(&f16s, &[256, 256], Device::CPU).unwrap(),
        ];
        for x in all.iter().flat_map(|x| [x.clone(), x.transpose(0, 1).unwrap(), x.narrow(1, 3, 33).unwrap()])
        {
            for f in [abs as Function, neg] {
                let wide = cast(&x, phalanx_tensor::DType::F32).unwrap();
                let wanted = cast(&f(&wide).unwrap(), x.dtype()).unwrap().contiguous().unwrap();
                let got = f(&x).unwrap().contiguous().unwrap();
                assert!(*got.read_bytes("test").unwrap() == *wanted.read_bytes("test").unwrap());
            }
        }
    }
}
