//! The memory order of a pointwise result: that of its inputs of the same shape.
//!
//! The result of a transposed or channels-last tensor is transposed or channels-last too, so that nothing has to be gathered, here and in the
//! operations after. If one of several inputs is row-major, so is the result: a residual stream that begins transposed does not stay so. Else the
//! first input decides. All inputs are permuted to that order, the result is computed row-major, and its
//! dimensions are then permuted back.

use phalanx_tensor::{DType, Dims, Result, Tensor};
use smallvec::SmallVec;

use super::common_shape;
use crate::block_reader::BLOCK;

/// A tensor of `dtype` of the shape that the inputs broadcast to. `compute` fills it, contiguous, from the inputs seen in its order.
pub(crate) fn in_order<const N: usize>(
    op: &'static str,
    dtype: DType,
    inputs: [&Tensor; N],
    compute: impl Fn([&Tensor; N], &mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    let first = inputs[0];
    if !inputs.iter().all(|t| t.is_contiguous() && t.same_shape(first)) {
        return in_any_order(op, dtype, &inputs, &|seen, out| compute(std::array::from_fn(|n| seen[n]), out));
    }
    let mut out = match first.dtype() == dtype {
        true => first.empty_like_for(op)?,
        false => Tensor::empty_for(op, first.shape(), dtype, first.device())?,
    };
    compute(inputs, &mut out)?;
    Ok(out)
}

/// [`in_order`] of inputs of different layouts, compiled once.
#[inline(never)]
fn in_any_order(
    op: &'static str,
    dtype: DType,
    inputs: &[&Tensor],
    compute: &dyn Fn(&[&Tensor], &mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    let (shape, device) = (common_shape(op, inputs)?, inputs[0].device());
    let mut whole = inputs.iter().filter(|t| t.shape() == &shape[..]);
    let first = whole.clone().find(|t| t.is_contiguous()).or_else(|| whole.next());
    let order = first.and_then(|t| t.layout().memory_order());
    let mut seen: SmallVec<[Tensor; 3]> = SmallVec::new();
    for input in inputs {
        let input = match &order {
            Some(order) => in_rank(input, shape.len())?.permute(order)?,
            None => (*input).clone(),
        };
        seen.push(contiguous_if_scattered(input)?);
    }
    let Some(order) = order else {
        let mut out = Tensor::empty_for(op, &shape, dtype, device)?;
        compute(&SmallVec::<[&Tensor; 3]>::from_iter(&seen), &mut out)?;
        return Ok(out);
    };
    let sizes: Dims = order.iter().map(|&d| shape[d]).collect();
    let mut out = Tensor::empty_for(op, &sizes, dtype, device)?;
    compute(&SmallVec::<[&Tensor; 3]>::from_iter(&seen), &mut out)?;
    out.permute(&back(&order))
}

/// `x` with dimensions of size 1 put in front, up to a rank.
fn in_rank(x: &Tensor, rank: usize) -> Result<Tensor> {
    (x.rank()..rank).try_fold(x.clone(), |x, _| x.unsqueeze(0))
}

/// The permutation that undoes another.
fn back(order: &[usize]) -> Dims {
    let mut back = Dims::from_elem(0, order.len());
    order.iter().enumerate().for_each(|(at, &d)| back[d] = at);
    back
}

/// `x`, or a contiguous copy where a CPU would otherwise gather every few elements. A GPU gathers well. A meta device
/// allocates what a CPU does.
pub(super) fn contiguous_if_scattered(x: Tensor) -> Result<Tensor> {
    let worth = x.numel() > 2 * BLOCK && !x.device().is_cuda() && x.layout().is_scattered();
    if worth { x.contiguous() } else { Ok(x) }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::{accumulate_, add, add_scalar, cast, eq, exp, masked_fill, maximum_backward, where_};
    use crate::testing::{floats, make, values};

    /// The tensor in every order of its dimensions, over the same values.
    fn orders(shape: [usize; 3], dtype: DType) -> Vec<Tensor> {
        let x = make(&shape, dtype, &floats(-3.0, 3.0));
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        let lying = |order: [usize; 3]| {
            let back: Vec<usize> = (0..3).map(|d| order.iter().position(|&o| o == d).unwrap()).collect();
            x.permute(&order).unwrap().copy().unwrap().permute(&back).unwrap()
        };
        orders.map(lying).into()
    }

    #[test]
    fn a_result_lies_as_inputs_of_its_shape_do_and_has_the_same_values() {
        for shape in [[2, 3, 5], [7, 1, 33], [1, 129, 7], [33, 16, 65], [0, 3, 2]] {
            for dtype in [DType::F32, DType::BF16, DType::I64] {
                let all = orders(shape, dtype);
                let row = make(&[shape[1], 1], dtype, &floats(-3.0, 3.0));
                let wanted = [add(&all[0], &all[0]), add(&row, &all[0]), eq(&all[0], &row)]
                    .map(|y| values(&y.unwrap()));
                for a in &all {
                    assert_eq!(values(&add(&row, a).unwrap()), wanted[1]);
                    assert_eq!(values(&eq(a, &row).unwrap()), wanted[2]);
                    for b in &all {
                        let y = add(a, b).unwrap();
                        let like = if b.is_contiguous() { b } else { a };
                        assert_eq!(
                            (y.strides(), values(&y)),
                            (add(like, like).unwrap().strides(), wanted[0].clone())
                        );
                        let dense = like.layout().memory_order().is_some();
                        assert_eq!(
                            y.layout().memory_order().is_some(),
                            dense,
                            "{shape:?} {:?}",
                            like.strides()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_kind_of_function_keeps_the_order() {
        let x = orders([9, 4, 31], DType::F32).remove(3);
        let flags = cast(&x, DType::Bool).unwrap();
        let results = [
            exp(&x),
            add_scalar(&x, 1.into()),
            add_scalar(&cast(&x, DType::I32).unwrap(), 1.into()),
            cast(&x, DType::F16),
            eq(&x, &x),
            where_(&flags, &x, &x),
            masked_fill(&x, &flags, 2.into()),
            maximum_backward(&x, &x, &make(&[], DType::F32, &|_| 1.0)),
        ];
        for (at, y) in results.into_iter().enumerate() {
            assert_eq!(y.unwrap().strides(), x.strides(), "function {at}");
        }
    }

    #[test]
    fn gaps_are_closed_and_what_overlaps_itself_decides_nothing() {
        let x = make(&[6, 5, 4], DType::F32, &floats(-3.0, 3.0));
        let part = x.narrow(1, 1, 3).unwrap().permute(&[2, 0, 1]).unwrap();
        let y = exp(&part).unwrap();
        assert_eq!(
            (y.strides(), values(&y)),
            (&[1, 12, 4][..], values(&exp(&part.copy().unwrap()).unwrap()))
        );
        let spread =
            x.narrow(0, 0, 1).unwrap().broadcast_to(&[6, 5, 4]).unwrap().permute(&[2, 1, 0]).unwrap();
        assert!(exp(&spread).unwrap().is_contiguous());
    }

    #[test]
    fn a_sum_in_place_is_right_in_any_order() {
        for to in orders([33, 2, 65], DType::BF16) {
            for x in orders([33, 2, 65], DType::BF16) {
                let mut to = add_scalar(&to, 0.into()).unwrap();
                let wanted = values(&add(&to, &x).unwrap());
                accumulate_(&mut to, &x).unwrap();
                assert_eq!(values(&to), wanted);
            }
        }
    }

    #[test]
    fn a_meta_device_allocates_what_a_cpu_does() {
        let run = |device: Device| {
            let a = Tensor::zeros(&[64, 65], DType::F32, device).unwrap();
            let b = Tensor::zeros(&[65, 64], DType::F32, device).unwrap().transpose(0, 1).unwrap();
            device.ledger().unwrap().reset_peak();
            let y = add(&a, &b).unwrap();
            (y.strides().to_vec(), device.ledger().unwrap().total().peak)
        };
        assert_eq!(run(Device::Cpu(915)), run(Device::Meta(915)));
    }
}
