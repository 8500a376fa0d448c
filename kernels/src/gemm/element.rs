//! What a product's elements may be, the type their sums are kept in, and what a tile reads of them at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::scratch::Scratch;
use crate::simd::{Float, Isa, Kernel, Runner, Vector};

/// An element type of `gemm`. Half types are rounded once when stored.
pub(crate) trait GemmElem: Copy + Send + Sync + 'static {
    /// The type of the sums.
    type Acc: Scratch;
    /// What a tile does with a place of A's and B's packed panels.
    type Place: Place<Acc = Self::Acc>;

    /// The exact value.
    fn widen(self) -> Self::Acc;
    /// The nearest value.
    fn narrow(x: Self::Acc) -> Self;
    /// What a place of a panel holds for this step and, if it holds two, the next.
    fn beside(self, next: Self) -> Self::Acc;
    /// The same elements, if they already are of the sums' type.
    fn as_acc(src: &[Self]) -> Option<&[Self::Acc]>;
    /// [`GemmElem::widen`] for each element of two slices of one length.
    fn widen_slice(src: &[Self], dst: &mut [Self::Acc]);
    /// [`GemmElem::as_acc`] to write.
    fn as_acc_mut(dst: &mut [Self]) -> Option<&mut [Self::Acc]>;
}

/// What a place of a packed panel, of the sums' size, holds: one step of k or several.
pub(crate) trait Place: 'static {
    /// The type of the sums.
    type Acc: Float;
    /// The steps.
    const STEPS: usize;

    /// `sum` and the products of a place's steps, ascending.
    fn add<S: Isa>(
        a: <Self::Acc as Float>::Vec<S>,
        b: <Self::Acc as Float>::Vec<S>,
        sum: <Self::Acc as Float>::Vec<S>,
    ) -> <Self::Acc as Float>::Vec<S>;

    /// Runs a kernel that calls [`Place::add`].
    fn run<K: Kernel>(runner: Runner, kernel: K) -> K::Output;
}

/// A step as it is.
pub(crate) struct One<T>(std::marker::PhantomData<T>);

impl<T: Float> Place for One<T> {
    type Acc = T;
    const STEPS: usize = 1;

    #[inline(always)]
    fn add<S: Isa>(a: T::Vec<S>, b: T::Vec<S>, sum: T::Vec<S>) -> T::Vec<S> {
        a.mul_add(b, sum)
    }

    #[inline]
    fn run<K: Kernel>(runner: Runner, kernel: K) -> K::Output {
        runner.run(kernel)
    }
}

/// Two steps in bf16 side by side, the first in the upper half.
pub(crate) struct Pair;

impl Place for Pair {
    type Acc = f32;
    const STEPS: usize = 2;

    #[inline(always)]
    fn add<S: Isa>(a: S::F32, b: S::F32, sum: S::F32) -> S::F32 {
        S::dot_pairs(a, b, sum)
    }

    #[inline]
    fn run<K: Kernel>(runner: Runner, kernel: K) -> K::Output {
        runner.run_pairs(kernel)
    }
}

macro_rules! exact {
    ($elem:ident) => {
        impl GemmElem for $elem {
            type Acc = $elem;
            type Place = One<$elem>;

            #[inline(always)]
            fn widen(self) -> $elem {
                self
            }

            #[inline(always)]
            fn narrow(x: $elem) -> $elem {
                x
            }

            #[inline(always)]
            fn beside(self, _next: $elem) -> $elem {
                self
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
    (
        $elem:ident in $place:ty,
        |$src:ident, $dst:ident| $widen_slice:expr,
        |$x:ident| $widen:expr,
        |$first:ident, $next:ident| $beside:expr
    ) => {
        impl GemmElem for $elem {
            type Acc = f32;
            type Place = $place;

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
            fn beside(self, $next: $elem) -> f32 {
                let $first = self;
                $beside
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
    bf16 in Pair,
    |src, dst| for (dst, src) in dst.iter_mut().zip(src) {
        *dst = src.widen();
    },
    |x| f32::from_bits(u32::from(x.to_bits()) << 16),
    |first, next| f32::from_bits(u32::from(first.to_bits()) << 16 | u32::from(next.to_bits()))
);
half!(f16 in One<f32>, |src, dst| src.convert_to_f32_slice(dst), |x| x.to_f32(), |first, _next| first.widen());
