//! [`Held`]: gradients of all ranks that a pass finds still there.
//!
//! Every rank holds the sum of the last synchronised pass. If nobody has zeroed it, the next sum over the ranks would
//! count it once a rank. So one rank keeps it and the others forget theirs: the sum of both passes comes out, as on one
//! device, the earlier one first. (It travels again: a mean is multiplied and divided anew, and a hook that rounds rounds
//! it once more.) Whether a gradient was zeroed is asked of one element that was not zero when the pass
//! ended, so that the ordinary case costs two looks a parameter.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Element, Tensor, bf16, f16};

use crate::Result;

const OP: &str = "ddp";

/// For each parameter the place of an element that is not zero; `None` if all are.
pub(super) struct Held(Vec<Option<usize>>);

impl Held {
    /// Nothing.
    pub(super) fn none(parameters: usize) -> Held {
        Held(vec![None; parameters])
    }

    /// What these gradients hold.
    pub(super) fn of(views: &[Tensor]) -> Result<Held> {
        Ok(Held(views.iter().map(|view| nonzero(view, 0..view.numel())).collect::<Result<_>>()?))
    }

    /// Whether it says anything.
    pub(super) fn is_none(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// The parameters whose gradients are still there.
    pub(super) fn remaining(&self, views: &[Tensor]) -> Result<Vec<usize>> {
        let mut remaining = Vec::new();
        for (number, view) in views.iter().enumerate() {
            if let Some(place) = self.0[number]
                && nonzero(view, place..place + 1)?.is_some()
            {
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
