//! [`combine`]: the parts of several ranks, as bytes.

use phalanx_tensor::{DType, bf16, f16};

use crate::comm::Reduction;
use crate::comm::reduction::{BLOCK, Block, Summand};

/// Combines the ranks' parts, which are of one length, in order.
pub(crate) fn combine(dtype: DType, by: Reduction, parts: &[&[u8]]) -> Vec<u8> {
    match dtype {
        DType::F64 => typed::<f64>(by, parts),
        DType::F32 => typed::<f32>(by, parts),
        DType::BF16 => typed::<bf16>(by, parts),
        DType::F16 => typed::<f16>(by, parts),
        DType::I64 => typed::<i64>(by, parts),
        DType::I32 => typed::<i32>(by, parts),
        DType::U8 | DType::Bool => typed::<u8>(by, parts),
    }
}

fn typed<T: Summand>(by: Reduction, parts: &[&[u8]]) -> Vec<u8> {
    let length = parts.first().map_or(0, |part| part.len());
    let (mut out, step) = (vec![0; length], BLOCK * size_of::<T>());
    // Messages are not aligned for elements; these are.
    let (mut block, mut elements) = (Block::<T>::new(), vec![T::zeroed(); BLOCK]);
    for start in (0..length).step_by(step) {
        let range = start..length.min(start + step);
        let elements = &mut elements[..range.len() / size_of::<T>()];
        for (i, part) in parts.iter().enumerate() {
            bytemuck::cast_slice_mut(elements).copy_from_slice(&part[range.clone()]);
            if i == 0 { block.load(elements) } else { block.combine(elements, by) }
        }
        block.store(elements);
        out[range].copy_from_slice(bytemuck::cast_slice(elements));
    }
    out
}
