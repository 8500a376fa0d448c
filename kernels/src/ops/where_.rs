//! [`where_`] and [`masked_fill`]: a choice between two elements by a bool.

use phalanx_tensor::{DType, Element, Result, Scalar, Tensor};

use crate::block_reader::{BLOCK, BlockReader, BlockScratch, BlockSplit};
use crate::check;
use crate::data_movement::choose;
use crate::ops::cast::Number;
use crate::pointwise::cuda::{self, Expression};
use crate::pointwise::{evaluate, in_order, update};
use crate::real::for_element;

/// `a` where `condition` (a bool), else `b`; all three broadcast. Any dtype, the same for both.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the condition is no bool.
pub fn where_(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "where";
    check::dtype(OP, condition, DType::Bool)?;
    check::same(OP, &[a, b])?;
    check::same_device(OP, &[condition, a])?;
    in_order(OP, a.dtype(), [a, b, condition], |[a, b, condition], out| {
        let choice = Expression::of_bits("x[0] ? x[1] : x[2]", a.dtype(), &[]);
        evaluate(
            OP,
            &choice,
            [condition, a, b],
            out,
            |out| for_element!(a.dtype(), T => choose_all::<T>(OP, condition, Choice::Of(a), b, out)),
        )
    })
}

/// `value` where `mask` (a bool), else `x`; the mask broadcasts to `x`.
///
/// # Errors
/// If the mask does not broadcast to `x`, is no bool, or is on another device, or an integer `x` cannot hold the value.
pub fn masked_fill(x: &Tensor, mask: &Tensor, value: Scalar) -> Result<Tensor> {
    const OP: &str = "masked_fill";
    check::dtype(OP, mask, DType::Bool)?;
    check::same_device(OP, &[x, mask])?;
    let value = value.fitting(OP, x.dtype())?;
    mask.broadcast_for(OP, x.shape())?;
    in_order(OP, x.dtype(), [x, mask], |[x, mask], out| {
        let bits = [for_element!(x.dtype(), T => cuda::bits(T::from_scalar(value)))];
        let choice = Expression::of_bits("x[0] ? (X)k[0] : x[1]", x.dtype(), &bits);
        evaluate(
            OP,
            &choice,
            [mask, x],
            out,
            |out| for_element!(x.dtype(), T => choose_all(OP, mask, Choice::Number(T::from_scalar(value)), x, out)),
        )
    })
}

/// What is taken where the condition holds: a tensor's elements, or a number.
enum Choice<'a, T> {
    Of(&'a Tensor),
    Number(T),
}

fn choose_all<T: Element>(
    op: &'static str,
    condition: &Tensor,
    a: Choice<'_, T>,
    b: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let (a, number) = match a {
        Choice::Of(a) => (Some(BlockReader::<T>::open(op, a, out.shape())?), T::zeroed()),
        Choice::Number(number) => (None, number),
    };
    let condition = BlockReader::<u8>::open(op, condition, out.shape())?;
    let b = BlockReader::<T>::open(op, b, out.shape())?;
    let cut = BlockSplit::NONE.with(&condition).with(&b);
    let cut = a.as_ref().map_or(cut, |a| cut.with(a));
    let numbers = [number; BLOCK];
    update(op, out, |start, target: &mut [T]| {
        let (mut bytes, mut left, mut right) =
            (BlockScratch::new(), BlockScratch::new(), BlockScratch::new());
        cut.blocks(start, target, |start, target| {
            let len = target.len();
            let condition = bytes.block(&condition, start, len);
            let a = a.as_ref().map_or(&numbers[..len], |a| left.block(a, start, len));
            choose(condition, a, right.block(&b, start, len), target);
        });
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::testing::{make, values};

    #[test]
    fn every_dtype_and_broadcast_chooses() {
        let condition = cast(&make(&[3, 1], DType::F32, &|i| (i % 2) as f64), DType::Bool).unwrap();
        for dtype in DType::ALL {
            let a = cast(&make(&[1, 4], DType::F64, &|_| 1.0), dtype).unwrap();
            let b = cast(&make(&[], DType::F64, &|_| 0.0), dtype).unwrap();
            let chosen = where_(&condition, &a, &b).unwrap();
            assert_eq!((chosen.dtype(), chosen.shape()), (dtype, &[3, 4][..]));
            assert_eq!(values(&chosen), [0., 0., 0., 0., 1., 1., 1., 1., 0., 0., 0., 0.]);
            let filled = masked_fill(&chosen, &condition, Scalar::Int(0)).unwrap();
            assert_eq!(values(&filled), [0.0; 12]);
        }
        let bools = cast(&make(&[1], DType::F32, &|_| 0.0), DType::Bool).unwrap();
        let mask = cast(&make(&[1], DType::F32, &|_| 1.0), DType::Bool).unwrap();
        let filled = masked_fill(&bools, &mask, Scalar::Int(256)).unwrap();
        assert_eq!(filled.read_bytes("test").unwrap()[0], 1, "a bool is stored as 0 or 1");
        let unfit = make(&[5, 4], DType::F32, &|_| 0.0);
        assert!(masked_fill(&unfit, &condition, Scalar::Int(0)).is_err());
    }
}
