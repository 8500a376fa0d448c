//! What happens to a finished tile of sums on its way to C: bias, activation, addition to what is there.

use super::activation::Activation;
use super::element::GemmElem;
use crate::simd::{Float, Isa, Kernel, Vector};

/// Whether a product replaces C or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// C = A B
    Store,
    /// C = C + A B, the finished product added once.
    Accumulate,
}

/// Steps applied to the product before it is written, in the order of the fields. Each has the bits of a step of its
/// own: in half precision the value is rounded between them.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a, T> {
    /// Added to every row: one value per column.
    pub(crate) bias: Option<&'a [T]>,
    /// Applied to every element.
    pub(crate) activation: Option<Activation>,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Epilogue { bias: None, activation: None }
    }
}

impl<T> Epilogue<'_, T> {
    /// Whether nothing is to be done.
    pub(super) fn is_empty(&self) -> bool {
        self.bias.is_none() && self.activation.is_none()
    }
}

/// One row of a tile: its sums, and the steps with the bias cut to the tile's columns. On return the sums are what is
/// to be written, apart from the last rounding; `old` is C's row, widened, if the product is added to it.
pub(super) struct FinishRow<'a, T: GemmElem> {
    pub(super) sums: &'a mut [T::Acc],
    pub(super) epilogue: Epilogue<'a, T>,
    pub(super) old: Option<&'a [T::Acc]>,
}

impl<T: GemmElem> Kernel for FinishRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let FinishRow { sums, epilogue, old } = self;
        if let Some(bias) = epilogue.bias {
            T::round_slice(sums);
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum += bias.widen();
            }
        }
        if let Some(activation) = epilogue.activation {
            T::round_slice(sums);
            for lanes in sums.chunks_mut(<T::Acc as Float>::Vec::<S>::LANES) {
                let x = <T::Acc as Float>::Vec::<S>::load_partial(lanes, T::Acc::ZERO);
                activation.apply(x).store_partial(lanes);
            }
        }
        if let Some(old) = old {
            T::round_slice(sums);
            for (sum, old) in sums.iter_mut().zip(old) {
                *sum = *old + *sum;
            }
        }
    }
}
