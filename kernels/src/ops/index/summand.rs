//! [`Summand`]: the element types that are added up, and the type of their sums.

use phalanx_tensor::{Element, bf16, f16};

use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, Vector, dispatch};

/// What is done with a row's sum.
#[derive(Clone, Copy)]
pub(super) enum End {
    /// The sum, begun at 0, is stored; a row to which nothing is added becomes 0.
    Store,
    /// The sum is rounded and added to the row.
    Add,
    /// The sum is multiplied and added to the row.
    AddScaled(f64),
}

/// An element that is added up. The halves' sums are kept in f32; integers wrap.
pub(super) trait Summand: Element {
    /// The type of sums.
    type Sum: Copy + Send + Sync;
    /// 0
    const ZERO: Self::Sum;
    /// The neutral element, which leaves a sum of -0 as it is.
    const NOTHING: Self::Sum;

    /// The elements themselves as sums, if both types are the same.
    fn as_sums(x: &mut [Self]) -> Option<&mut [Self::Sum]>;
    /// `a + b`.
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    /// Begins sums with elements.
    fn begin_all(sums: &mut [Self::Sum], x: &[Self]);
    /// Adds an element to each sum.
    fn add_all(sums: &mut [Self::Sum], x: &[Self]);
    /// Stores or adds finished sums.
    fn end_all(to: &mut [Self], sums: &[Self::Sum], end: End);
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Summand for $type {
            type Sum = $type;
            const ZERO: $type = 0;
            const NOTHING: $type = 0;

            fn as_sums(x: &mut [Self]) -> Option<&mut [Self]> {
                Some(x)
            }
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self {
                a.wrapping_add(b)
            }
            fn begin_all(sums: &mut [Self], x: &[Self]) {
                sums.copy_from_slice(x);
            }
            fn add_all(sums: &mut [Self], x: &[Self]) {
                sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = sum.wrapping_add(x));
            }
            fn end_all(to: &mut [Self], sums: &[Self], end: End) {
                let factor = match end {
                    End::Store => return to.copy_from_slice(sums),
                    End::Add => 1,
                    End::AddScaled(factor) => factor as i64 as $type,
                };
                let add = |(to, &sum): (&mut Self, &Self)| *to = to.wrapping_add(sum.wrapping_mul(factor));
                to.iter_mut().zip(sums).for_each(add);
            }
        }
    )*};
}

integer!(i64, i32, u8);

macro_rules! float {
    ($($type:ty: $sum:ty, $as_sums:expr;)*) => {$(
        impl Summand for $type {
            type Sum = $sum;
            const ZERO: $sum = 0.0;
            const NOTHING: $sum = -0.0;

            fn as_sums(x: &mut [Self]) -> Option<&mut [$sum]> {
                let as_sums: fn(&mut [Self]) -> Option<&mut [$sum]> = $as_sums;
                as_sums(x)
            }
            #[inline(always)]
            fn add(a: $sum, b: $sum) -> $sum {
                a + b
            }
            fn begin_all(sums: &mut [$sum], x: &[Self]) {
                Self::widen_all(x, sums);
            }
            fn add_all(sums: &mut [$sum], x: &[Self]) {
                dispatch(Add { sums, x });
            }
            fn end_all(to: &mut [Self], sums: &[$sum], end: End) {
                match end {
                    End::Store => Self::narrow_all(sums, to),
                    _ => dispatch(Finish { to, sums, end }),
                }
            }
        }
    )*};
}

float! {
    f64: f64, |x| Some(x);
    f32: f32, |x| Some(x);
    bf16: f32, |_| None;
    f16: f32, |_| None;
}

/// [`Summand::add_all`] of floats.
struct Add<'a, T: Real> {
    sums: &'a mut [T::Wide],
    x: &'a [T],
}

impl<T: Real> Kernel for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        for (sums, x) in self.sums.chunks_mut(lanes).zip(self.x.chunks(lanes)) {
            let sum = load::<<T::Wide as Float>::Vec<S>>(sums) + T::load::<S>(x);
            if sums.len() == lanes { sum.store(sums) } else { sum.store_partial(sums) }
        }
    }
}

/// Loads a vector of sums, partial if they are fewer than its lanes.
#[inline(always)]
fn load<V: Vector>(sums: &[V::Elem]) -> V {
    if sums.len() < V::LANES { V::load_partial(sums, V::Elem::ZERO) } else { V::load(sums) }
}

/// [`Summand::end_all`] of floats that are added to a row.
struct Finish<'a, T: Real> {
    to: &'a mut [T],
    sums: &'a [T::Wide],
    end: End,
}

impl<T: Real> Kernel for Finish<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        let factor = match self.end {
            End::AddScaled(factor) => Some(<T::Wide as Float>::Vec::<S>::splat(T::Wide::from_f64(factor))),
            _ => None,
        };
        for (to, sums) in self.to.chunks_mut(lanes).zip(self.sums.chunks(lanes)) {
            let sum: <T::Wide as Float>::Vec<S> = load(sums);
            let sum = match factor {
                Some(factor) => sum * factor,
                None => T::round::<S>(sum),
            };
            T::store::<S>(T::load::<S>(to) + sum, to);
        }
    }
}

/// Prefetches `bytes` bytes from `address` on.
pub(super) fn prefetch_bytes(address: *const f32, bytes: usize) {
    dispatch(PrefetchBytes { address, bytes });
}

struct PrefetchBytes {
    address: *const f32,
    bytes: usize,
}

impl Kernel for PrefetchBytes {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        const LINE: usize = 64;
        for line in 0..self.bytes.div_ceil(LINE) {
            S::F32::prefetch(self.address.wrapping_add(line * LINE / size_of::<f32>()));
        }
    }
}
