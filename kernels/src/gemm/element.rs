//! [`GemmElem`]: the element types of products, f64, f32, bf16 and f16, and the type of their sums. [`PanelElem`]: what one place of a packed panel
//! holds, one step of k ([`OneStep`]) or, for bf16 where the CPU has a dot product of pairs, two ([`Bf16Pairs`]).
//!
//! A *line* is a row of A or a column of B. A *place* is an element of a packed panel; it has the size of a sum.

use std::marker::PhantomData;

use phalanx_tensor::{bf16, f16};

use super::micro_kernel::SizedTile;
use crate::real::Real;
use crate::scratch::Scratch;
use crate::simd::{Float, Halves, Isa, Kernel, PARTS_MAX, Runner, Vector, pair};

/// An element type of `gemm`. Half types are rounded once when stored.
pub(crate) trait GemmElem: Real<Wide = <Self as GemmElem>::Acc> {
    /// The type of the sums.
    type Acc: Scratch + GemmElem<Acc = <Self as GemmElem>::Acc>;
    /// What a place of A's and B's packed panels holds.
    type PanelElem: PanelElem<Acc = Self::Acc>;

    /// The place of this step and, if a place holds two, the next one.
    fn pair_up<S: Isa>(self, next: Self) -> Self::Acc;
    /// A vector of places, each of another line: [`GemmElem::pair_up`] of a step's elements and the next step's.
    fn load_lines<S: Isa>(lanes: &[Self], next: &[Self]) -> <Self::Acc as Float>::Vec<S>;
    /// A vector of places, successive steps of one line; `beyond` stands for a step that a place lacks.
    fn load_steps<S: Isa>(steps: &[Self], beyond: Self) -> <Self::Acc as Float>::Vec<S>;

    /// How many steps of a column lie side by side in a matrix [in panels](super::MatRef::in_panels), [in which order](super::place_in_group): two of bf16, which are a lane
    /// of [`Isa::dot_bf16`], else one.
    const GROUP: usize = 1;
    /// A panel has a multiple of so many steps: of bf16 those of a line of [`amx`](crate::simd::amx)'s tiles.
    const PANEL_STEPS: usize = 1;
    /// The places of LANES columns and the steps of a group as vectors, the second one for the second place, if a group fills two.
    #[inline(always)]
    fn load_group<S: Isa>(columns: &[Self]) -> [<Self::Acc as Float>::Vec<S>; 2] {
        [Self::load_lines::<S>(columns, columns), <Self::Acc as Float>::Vec::<S>::zero()]
    }

    /// Whether many steps are read faster as lanes of two neighbours, which [`GemmElem::split`] takes apart.
    fn reads_neighbours<S: Isa>() -> bool {
        false
    }
    /// [`Halves::load_neighbours`], where they are read.
    fn load_neighbours<S: Isa>(_lines: [&[Self]; PARTS_MAX]) -> [<Self::Acc as Float>::Vec<S>; PARTS_MAX] {
        unreachable!("no neighbours in a lane")
    }
    /// The first steps of lanes of two, and the others.
    fn split<S: Isa>(_lanes: <Self::Acc as Float>::Vec<S>) -> [<Self::Acc as Float>::Vec<S>; 2] {
        unreachable!("no neighbours in a lane")
    }
}

/// What a place of a packed panel holds: one step of k or several, in the size of a sum.
pub(crate) trait PanelElem: 'static {
    /// The type of the sums.
    type Acc: Float;
    /// Whether only packed panels hold such places, so that no tile reads them from where a matrix lies.
    const IN_PANELS: bool;

    /// How many steps a place holds on an instruction set.
    fn steps<S: Isa>() -> usize;

    /// `sum` plus the products of a place's steps, in ascending order.
    fn add<S: Isa>(
        a: <Self::Acc as Float>::Vec<S>,
        b: <Self::Acc as Float>::Vec<S>,
        sum: <Self::Acc as Float>::Vec<S>,
    ) -> <Self::Acc as Float>::Vec<S>;

    /// Runs a kernel that packs, on the instruction set that has these places.
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

/// One step a place.
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

/// The steps of bf16 that [`Isa::dot_bf16`] takes at a time: two on CPUs that have it, else one.
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

    /// On a CPU without the dot product, tiles are those of f32.
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

    const GROUP: usize = 2;
    const PANEL_STEPS: usize = 32;

    #[inline(always)]
    fn load_group<S: Isa>(columns: &[bf16]) -> [S::F32; 2] {
        let lanes = S::F32::load_twos(columns);
        if S::BF16_IN_LANE == 2 {
            return [lanes, S::F32::zero()];
        }
        let [second, first] = lanes.split_neighbours();
        [first, second]
    }

    #[inline(always)]
    fn reads_neighbours<S: Isa>() -> bool {
        S::BF16_IN_LANE == 1 && S::F32::SPLITS_NEIGHBOURS
    }

    #[inline(always)]
    fn load_neighbours<S: Isa>(lines: [&[bf16]; PARTS_MAX]) -> [S::F32; PARTS_MAX] {
        S::F32::load_neighbours(lines)
    }

    #[inline(always)]
    fn split<S: Isa>(lanes: S::F32) -> [S::F32; 2] {
        lanes.split_neighbours()
    }
}
