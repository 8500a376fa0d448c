//! What a product's elements may be, the type their sums are kept in, and what a tile reads of them at a time.

use std::marker::PhantomData;

use phalanx_tensor::{bf16, f16};

use super::micro_kernel::SizedTile;
use crate::real::Real;
use crate::scratch::Scratch;
use crate::simd::{Float, Halves, Isa, Kernel, Runner, Vector, pair};

/// An element type of `gemm`. Half types are rounded once when stored.
pub(crate) trait GemmElem: Real<Wide = <Self as GemmElem>::Acc> {
    /// The type of the sums.
    type Acc: Scratch + GemmElem<Acc = <Self as GemmElem>::Acc>;
    /// What a tile does with a place of A's and B's packed panels.
    type PanelElem: PanelElem<Acc = Self::Acc>;

    /// What a place of a panel holds for this step and, if it holds two, the next.
    fn pair_up<S: Isa>(self, next: Self) -> Self::Acc;
    /// A place of each lane: [`GemmElem::pair_up`] for the elements of two slices.
    fn load_lines<S: Isa>(lanes: &[Self], next: &[Self]) -> <Self::Acc as Float>::Vec<S>;
    /// The places that steps of one lane fill; `beyond` stands for what is missing in a place.
    fn load_steps<S: Isa>(steps: &[Self], beyond: Self) -> <Self::Acc as Float>::Vec<S>;
}

/// What a place of a packed panel, of the sums' size, holds: one step of k or several.
pub(crate) trait PanelElem: 'static {
    /// The type of the sums.
    type Acc: Float;
    /// Whether only packed panels hold such places, so that no tile reads them from where a matrix lies.
    const IN_PANELS: bool;

    /// The steps on an instruction set.
    fn steps<S: Isa>() -> usize;

    /// `sum` and the products of a place's steps, ascending.
    fn add<S: Isa>(
        a: <Self::Acc as Float>::Vec<S>,
        b: <Self::Acc as Float>::Vec<S>,
        sum: <Self::Acc as Float>::Vec<S>,
    ) -> <Self::Acc as Float>::Vec<S>;

    /// Runs a kernel that makes places.
    fn run<K: Kernel>(runner: Runner, kernel: K) -> K::Output;
    /// Computes a tile.
    fn compute<const H: usize, const W: usize>(runner: Runner, tile: SizedTile<'_, Self, H, W>)
    where
        Self: Sized;
}

/// [`PanelElem::steps`] on the instruction set that [`PanelElem::run`] takes.
pub(super) fn steps_on<P: PanelElem>(runner: Runner) -> usize {
    struct Ask<P>(PhantomData<P>);
    impl<P: PanelElem> Kernel for Ask<P> {
        type Output = usize;

        #[inline(always)]
        fn run<S: Isa>(self) -> usize {
            P::steps::<S>()
        }
    }
    P::run(runner, Ask::<P>(PhantomData))
}

/// A step as it is.
pub(crate) struct OneStep<T>(PhantomData<T>);

impl<T: Float> PanelElem for OneStep<T> {
    type Acc = T;
    const IN_PANELS: bool = false;

    #[inline(always)]
    fn steps<S: Isa>() -> usize {
        1
    }

    #[inline(always)]
    fn add<S: Isa>(a: T::Vec<S>, b: T::Vec<S>, sum: T::Vec<S>) -> T::Vec<S> {
        a.mul_add(b, sum)
    }

    #[inline]
    fn run<K: Kernel>(runner: Runner, kernel: K) -> K::Output {
        runner.run(kernel)
    }

    #[inline]
    fn compute<const H: usize, const W: usize>(runner: Runner, tile: SizedTile<'_, Self, H, W>) {
        runner.run(tile)
    }
}

/// The steps of bf16 that [`Isa::dot_bf16`] takes at a time.
pub(crate) struct Bf16Pairs;

impl PanelElem for Bf16Pairs {
    type Acc = f32;
    const IN_PANELS: bool = true;

    #[inline(always)]
    fn steps<S: Isa>() -> usize {
        S::BF16_IN_LANE
    }

    #[inline(always)]
    fn add<S: Isa>(a: S::F32, b: S::F32, sum: S::F32) -> S::F32 {
        S::dot_bf16(a, b, sum)
    }

    #[inline]
    fn run<K: Kernel>(runner: Runner, kernel: K) -> K::Output {
        runner.run_on_pairs(kernel).unwrap_or_else(|kernel| runner.run(kernel))
    }

    /// Where a place holds one step, tiles are those of f32.
    #[inline]
    fn compute<const H: usize, const W: usize>(runner: Runner, tile: SizedTile<'_, Self, H, W>) {
        runner.run_on_pairs(tile).unwrap_or_else(|tile| runner.run(tile.of::<OneStep<f32>>()))
    }
}

macro_rules! one {
    ($($elem:ident sums $acc:ident),*) => {$(
        impl GemmElem for $elem {
            type Acc = $acc;
            type PanelElem = OneStep<$acc>;

            #[inline(always)]
            fn pair_up<S: Isa>(self, _next: $elem) -> $acc {
                self.widen()
            }

            #[inline(always)]
            fn load_lines<S: Isa>(lanes: &[$elem], _next: &[$elem]) -> <$acc as Float>::Vec<S> {
                $elem::load::<S>(lanes)
            }

            #[inline(always)]
            fn load_steps<S: Isa>(steps: &[$elem], _beyond: $elem) -> <$acc as Float>::Vec<S> {
                $elem::load::<S>(steps)
            }
        }
    )*};
}

one!(f32 sums f32, f64 sums f64, f16 sums f32);

impl GemmElem for bf16 {
    type Acc = f32;
    type PanelElem = Bf16Pairs;

    #[inline(always)]
    fn pair_up<S: Isa>(self, next: bf16) -> f32 {
        if S::BF16_IN_LANE == 2 { pair(self, next) } else { self.widen() }
    }

    #[inline(always)]
    fn load_lines<S: Isa>(lanes: &[bf16], next: &[bf16]) -> S::F32 {
        if S::BF16_IN_LANE == 2 { S::F32::load_pairs_of(lanes, next) } else { S::F32::load_bf16(lanes) }
    }

    #[inline(always)]
    fn load_steps<S: Isa>(steps: &[bf16], beyond: bf16) -> S::F32 {
        if S::BF16_IN_LANE == 2 { S::F32::load_pairs(steps, beyond) } else { S::F32::load_bf16(steps) }
    }
}
