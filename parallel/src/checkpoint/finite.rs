//! [`check_finite`]: refuses bytes of a tensor that hold NaN or infinity.

use phalanx_tensor::DType;

use crate::sharded_tensor::ShardedTensor;

/// Why elements of a part are refused, given as their bytes in a dtype. Buffers may have infinities, such as those of an attention mask.
///
/// # Errors
/// If an element is NaN, or infinite in a parameter or an optimizer's tensor.
pub(super) fn check_finite(part: &ShardedTensor, dtype: DType, bytes: &[u8]) -> Result<(), String> {
    // The bits of the exponent.
    let odd = match dtype {
        DType::F16 => odd_of(bytes, u16::from_le_bytes, 0x7c00, part.buffer),
        DType::BF16 => odd_of(bytes, u16::from_le_bytes, 0x7f80, part.buffer),
        DType::F32 => odd_of(bytes, u32::from_le_bytes, 0x7f80_0000, part.buffer),
        DType::F64 => odd_of(bytes, u64::from_le_bytes, 0x7ff0_0000_0000_0000, part.buffer),
        _ => false,
    };
    match odd {
        true => Err(format!("tensor {:?} has numbers that are not finite", part.name)),
        false => Ok(()),
    }
}

/// Whether a number's exponent has all bits, so that it is infinite or NaN; NaNs have more bits after it.
fn odd_of<const N: usize, T>(bytes: &[u8], of: fn([u8; N]) -> T, exponent: T, nan_only: bool) -> bool
where
    T: Copy + PartialOrd + std::ops::BitAnd<Output = T> + std::ops::Shl<u32, Output = T>,
{
    let (numbers, _) = bytes.as_chunks::<N>();
    // Without an early end, so that the loop is vectorized. Shifted by one, a number has no sign.
    match nan_only {
        true => numbers.iter().fold(false, |odd, &x| odd | (of(x) << 1 > exponent << 1)),
        false => numbers.iter().fold(false, |odd, &x| odd | (of(x) & exponent == exponent)),
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels as kernels;
    use phalanx_tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_found_in_every_dtype() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let refused = |x: f64, buffer: bool| {
                let values = Tensor::from_slice(&[1.0, -0.0, 65504.0, x, -1e-7], &[5], Device::CPU).unwrap();
                let values = kernels::cast(&values, dtype).unwrap();
                let bytes = values.to_bytes().unwrap();
                let part = ShardedTensor { buffer, ..ShardedTensor::whole("w", values) };
                check_finite(&part, dtype, &bytes).is_err()
            };
            for buffer in [false, true] {
                assert!(refused(f64::NAN, buffer) && refused(-f64::NAN, buffer), "{dtype}");
                assert_eq!(
                    [f64::INFINITY, f64::NEG_INFINITY].map(|x| refused(x, buffer)),
                    [!buffer; 2],
                    "{dtype}"
                );
                assert!(!refused(-3.0, buffer) && !refused(0.0, buffer), "{dtype}");
            }
        }
    }
}
