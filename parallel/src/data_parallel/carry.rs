//! [`Held`]: gradients of all ranks that a pass finds still there.
//!
//! Every rank holds the sum of the last synchronised pass. If nobody has zeroed it, the next sum over the ranks would
//! count it once a rank. So one rank keeps it and the others forget theirs: the sum of both passes comes out, as on one
//! device, the earlier one first. (It travels again: a mean is multiplied and divided anew, and a hook that rounds rounds
//! it once more.) Whether a gradient was zeroed is asked of one element that was not zero when the pass
//! ended, so that the ordinary case costs two looks a parameter. A GPU's elements would have to be waited for; there the leaf
//! says whether it was zeroed. Who zeroes it in another way loses nothing: zeros stay zeros.

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::Leaf;
use phalanx_tensor::{DType, Element, Tensor, bf16, f16};

use crate::Result;

const OP: &str = "ddp";

/// For each gradient how to find out whether it is still there; `None` if there was none.
pub(super) struct Held(Vec<Option<Mark>>);

/// What tells that a gradient is still there.
enum Mark {
    /// The element at this place is not zero.
    Element(usize),
    /// The leaf was zeroed this often.
    Zeroed(u64),
}

impl Held {
    /// Nothing.
    pub(super) fn none(parameters: usize) -> Held {
        Held((0..parameters).map(|_| None).collect())
    }

    /// What these gradients, which are the leaves', hold.
    pub(super) fn of(views: &[Tensor], leaves: &[(Parameter, Leaf)]) -> Result<Held> {
        let mark = |(view, (_, leaf)): (&Tensor, &(Parameter, Leaf))| match view.device().is_cuda() {
            true => Ok(Some(Mark::Zeroed(leaf.times_zeroed()))),
            false => Ok(nonzero(view, 0..view.numel())?.map(Mark::Element)),
        };
        Ok(Held(views.iter().zip(leaves).map(mark).collect::<Result<_>>()?))
    }

    /// Whether it says anything.
    pub(super) fn is_none(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// The parameters whose gradients are still there.
    pub(super) fn remaining(&self, views: &[Tensor], leaves: &[(Parameter, Leaf)]) -> Result<Vec<usize>> {
        let mut remaining = Vec::new();
        for (number, (view, (_, leaf))) in views.iter().zip(leaves).enumerate() {
            let remains = match &self.0[number] {
                None => false,
                Some(Mark::Element(place)) => nonzero(view, *place..place + 1)?.is_some(),
                Some(Mark::Zeroed(times)) => leaf.times_zeroed() == *times,
            };
            if remains {
                remaining.push(number);
            }
        }
        Ok(remaining)
    }
}

/// Leaves on one rank what all hold: `keeper` multiplies it by `divisor`, which it will be divided by; others zero it.
pub(super) fn carry(view: &mut Tensor, keeper: bool, divisor: Option<f64>) -> Result<()> {
    match (keeper, divisor) {
        (true, None) => Ok(()),
        (true, Some(divisor)) => Ok(kernels::scale_(view, divisor)?),
        (false, _) => Ok(kernels::fill_(view, -0.0)?),
    }
}

/// The place of the first element among `range` that is not zero.
fn nonzero(view: &Tensor, range: std::ops::Range<usize>) -> Result<Option<usize>> {
    fn find<T: Element + Default + PartialEq>(
        view: &Tensor,
        range: std::ops::Range<usize>,
    ) -> Result<Option<usize>> {
        let elements = &view.read::<T>(OP)?[view.offset()..][..view.numel()];
        let found = elements[range.clone()].iter().position(|x| *x != T::default());
        Ok(found.map(|place| range.start + place))
    }
    if view.device().is_meta() {
        return Ok(None);
    }
    match view.dtype() {
        DType::F64 => find::<f64>(view, range),
        DType::F32 => find::<f32>(view, range),
        DType::BF16 => find::<bf16>(view, range),
        DType::F16 => find::<f16>(view, range),
        // Gradients are floats.
        _ => Ok(None),
    }
}
