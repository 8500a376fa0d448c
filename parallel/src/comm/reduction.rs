//! [`Reduction`]: how the elements of several ranks become one, and in which order. [`Block`] does it on slices (for
//! threads), [`combine`] on the bytes of messages (for wires).

use std::fmt;

use phalanx_tensor::{DType, Element, bf16, f16};

use super::{Error, Result};

/// How elements of several ranks become one. They are combined in order of the ranks, the first one as it is:
/// `((x0 + x1) + x2) + ...`; bf16 and f16 in f32, rounded once at the end. Integers wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The largest; NaN if there is one. Of bools: whether any is true.
    Max,
    /// The smallest; NaN if there is one. Of bools: whether all are true.
    Min,
}

impl Reduction {
    pub(crate) const ALL: [Reduction; 4] = [Reduction::Sum, Reduction::Prod, Reduction::Max, Reduction::Min];

    /// Refuses to add and multiply truth values.
    pub(crate) fn check(self, op: &'static str, dtype: DType) -> Result<()> {
        if dtype == DType::Bool && matches!(self, Reduction::Sum | Reduction::Prod) {
            return Err(Error::invalid(
                op,
                format!("got the {self} of bools, wanted max (any) or min (all)"),
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduction::Sum => "sum",
            Reduction::Prod => "product",
            Reduction::Max => "max",
            Reduction::Min => "min",
        })
    }
}

/// An element that can be reduced, in a type that may be wider.
pub(crate) trait Summand: Element {
    /// The type of intermediate results.
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn mul(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Summand for $type {
            type Wide = $wide;
            #[inline]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline]
            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }
            #[inline]
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }
            #[inline]
            fn mul(a: $wide, b: $wide) -> $wide {
                a * b
            }
            #[inline]
            fn max(a: $wide, b: $wide) -> $wide {
                if b > a || b.is_nan() { b } else { a }
            }
            #[inline]
            fn min(a: $wide, b: $wide) -> $wide {
                if b < a || b.is_nan() { b } else { a }
            }
        }
    )*};
}

float! {
    f64, f64, |x| x, |x| x;
    f32, f32, |x| x, |x| x;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f16, f32, f16::to_f32, f16::from_f32;
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Summand for $type {
            type Wide = $type;
            #[inline]
            fn widen(self) -> $type {
                self
            }
            #[inline]
            fn narrow(wide: $type) -> $type {
                wide
            }
            #[inline]
            fn add(a: $type, b: $type) -> $type {
                a.wrapping_add(b)
            }
            #[inline]
            fn mul(a: $type, b: $type) -> $type {
                a.wrapping_mul(b)
            }
            #[inline]
            fn max(a: $type, b: $type) -> $type {
                Ord::max(a, b)
            }
            #[inline]
            fn min(a: $type, b: $type) -> $type {
                Ord::min(a, b)
            }
        }
    )*};
}

integer!(i64, i32, u8);

/// Elements whose intermediate results stay in the nearest cache.
pub(crate) const BLOCK: usize = 1024;

/// Intermediate results of up to [`BLOCK`] elements.
pub(crate) struct Block<T: Summand>([T::Wide; BLOCK]);

impl<T: Summand> Block<T> {
    pub(crate) fn new() -> Block<T> {
        Block([T::Wide::default(); BLOCK])
    }

    /// Takes the first rank's elements as they are.
    pub(crate) fn load(&mut self, from: &[T]) {
        self.0.iter_mut().zip(from).for_each(|(wide, &x)| *wide = x.widen());
    }

    /// Combines with the next rank's.
    pub(crate) fn combine(&mut self, with: &[T], by: Reduction) {
        let mut each = |f: fn(T::Wide, T::Wide) -> T::Wide| {
            self.0.iter_mut().zip(with).for_each(|(wide, &x)| *wide = f(*wide, x.widen()));
        };
        match by {
            Reduction::Sum => {
                self.0.iter_mut().zip(with).for_each(|(wide, &x)| *wide = T::add(*wide, x.widen()))
            }
            Reduction::Prod => each(T::mul),
            Reduction::Max => each(T::max),
            Reduction::Min => each(T::min),
        }
    }

    /// Rounds into place.
    pub(crate) fn store(&self, to: &mut [T]) {
        to.iter_mut().zip(&self.0).for_each(|(x, &wide)| *x = T::narrow(wide));
    }
}

/// Combines the ranks' parts, which are of one length, in order.
pub(crate) fn combine(dtype: DType, by: Reduction, parts: &[&[u8]]) -> Vec<u8> {
    match dtype {
        DType::F64 => typed::<f64>(by, parts),
        DType::F32 => typed::<f32>(by, parts),
        DType::BF16 => typed::<bf16>(by, parts),
        DType::F16 => typed::<f16>(by, parts),
        DType::I64 => typed::<i64>(by, parts),
        DType::I32 => typed::<i32>(by, parts),
        DType::U8 | DType::Bool => typed::<u8>(by, parts),
    }
}

fn typed<T: Summand>(by: Reduction, parts: &[&[u8]]) -> Vec<u8> {
    let length = parts.first().map_or(0, |part| part.len());
    let (mut out, step) = (vec![0; length], BLOCK * size_of::<T>());
    // Messages are not aligned for elements; these are.
    let (mut block, mut elements) = (Block::<T>::new(), vec![T::zeroed(); BLOCK]);
    for start in (0..length).step_by(step) {
        let range = start..length.min(start + step);
        let elements = &mut elements[..range.len() / size_of::<T>()];
        for (i, part) in parts.iter().enumerate() {
            bytemuck::cast_slice_mut(elements).copy_from_slice(&part[range.clone()]);
            if i == 0 { block.load(elements) } else { block.combine(elements, by) }
        }
        block.store(elements);
        out[range].copy_from_slice(bytemuck::cast_slice(elements));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<T: Summand>(values: &[T], by: Reduction) -> T {
        let mut block = Block::<T>::new();
        block.load(&values[..1]);
        values[1..].iter().for_each(|x| block.combine(std::slice::from_ref(x), by));
        let mut out = [values[0]];
        block.store(&mut out);
        out[0]
    }

    #[test]
    fn one_value_keeps_its_bits_and_sums_go_left_to_right() {
        assert_eq!(reduce(&[-0f32], Reduction::Sum).to_bits(), (-0f32).to_bits());
        assert_eq!(reduce(&[1f32, 1e8, -1e8], Reduction::Sum), 0.0);
        assert_eq!(reduce(&[1e8, -1e8, 1f32], Reduction::Sum), 1.0);
        // In bf16 itself 256 + 1 would stay 256 four times.
        let halves = [256f32, 1., 1., 1., 1.].map(bf16::from_f32);
        assert_eq!(reduce(&halves, Reduction::Sum), bf16::from_f32(260.0));
    }

    #[test]
    fn extremes_report_nan_and_integers_wrap() {
        assert!(reduce(&[1f32, f32::NAN, 2.], Reduction::Max).is_nan());
        assert!(reduce(&[f64::NAN, 1.], Reduction::Min).is_nan());
        assert_eq!(reduce(&[3i64, -7, 5], Reduction::Min), -7);
        assert_eq!(reduce(&[i32::MAX, 1], Reduction::Sum), i32::MIN);
        assert_eq!(reduce(&[200u8, 100], Reduction::Sum), 44);
        assert!(Reduction::Sum.check("test", DType::Bool).is_err());
    }
}
