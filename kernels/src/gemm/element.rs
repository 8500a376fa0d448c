//! What a product's elements may be, and the type their sums are kept in.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::scratch::Scratch;

/// An element type of `gemm`. Half types are widened while packing and rounded once when stored.
pub(crate) trait GemmElem: Copy + Send + Sync + 'static {
    /// The type of the sums.
    type Acc: Scratch;

    /// The exact value.
    fn widen(self) -> Self::Acc;
    /// The nearest value.
    fn narrow(x: Self::Acc) -> Self;
    /// The same elements, if they already are of the sums' type.
    fn as_acc(src: &[Self]) -> Option<&[Self::Acc]>;
    /// [`GemmElem::widen`] for each element of two slices of one length.
    fn widen_slice(src: &[Self], dst: &mut [Self::Acc]);
    /// [`GemmElem::as_acc`] to write.
    fn as_acc_mut(dst: &mut [Self]) -> Option<&mut [Self::Acc]>;
}

macro_rules! exact {
    ($elem:ident) => {
        impl GemmElem for $elem {
            type Acc = $elem;

            #[inline(always)]
            fn widen(self) -> $elem {
                self
            }

            #[inline(always)]
            fn narrow(x: $elem) -> $elem {
                x
            }

            #[inline(always)]
            fn as_acc(src: &[$elem]) -> Option<&[$elem]> {
                Some(src)
            }

            #[inline(always)]
            fn widen_slice(src: &[$elem], dst: &mut [$elem]) {
                dst.copy_from_slice(src);
            }

            #[inline(always)]
            fn as_acc_mut(dst: &mut [$elem]) -> Option<&mut [$elem]> {
                Some(dst)
            }
        }
    };
}

exact!(f32);
exact!(f64);

macro_rules! half {
    ($elem:ident, |$src:ident, $dst:ident| $widen_slice:expr, |$x:ident| $widen:expr) => {
        impl GemmElem for $elem {
            type Acc = f32;

            #[inline(always)]
            fn widen(self) -> f32 {
                let $x = self;
                $widen
            }

            #[inline(always)]
            fn narrow(x: f32) -> $elem {
                $elem::from_f32(x)
            }

            #[inline(always)]
            fn as_acc(_src: &[$elem]) -> Option<&[f32]> {
                None
            }

            #[inline(always)]
            fn widen_slice(src: &[$elem], dst: &mut [f32]) {
                let ($src, $dst) = (src, dst);
                $widen_slice
            }

            #[inline(always)]
            fn as_acc_mut(_dst: &mut [$elem]) -> Option<&mut [f32]> {
                None
            }
        }
    };
}

// A bf16 is the upper half of an f32; a plain loop over shifts becomes vector code where it is inlined.
half!(
    bf16,
    |src, dst| for (dst, src) in dst.iter_mut().zip(src) {
        *dst = src.widen();
    },
    |x| f32::from_bits(u32::from(x.to_bits()) << 16)
);
half!(f16, |src, dst| src.convert_to_f32_slice(dst), |x| x.to_f32());
