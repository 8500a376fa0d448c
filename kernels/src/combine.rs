//! [`Reduction`]: how the elements of several ranks become one, and in which order. [`Block`] does it on slices (for
//! threads), [`combine`] on the bytes of messages (for wires).

use std::fmt;

use phalanx_tensor::{DType, Element, Error, Result, bf16, f16};

/// How elements of several ranks become one. They are combined in order of the ranks, the first one as it is:
/// `((x0 + x1) + x2) + ...`; bf16 and f16 in f32, rounded once at the end. Integers wrap. [`Reduction::check`] says which dtypes
/// each takes.
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
    /// The sum divided by the number of ranks, rounded once more. Of floats.
    Avg,
    /// Each bit: whether all have it. Of integers and bools.
    BitAnd,
    /// Each bit: whether any has it. Of integers and bools.
    BitOr,
    /// Each bit: whether an odd number have it. Of integers and bools.
    BitXor,
}

impl Reduction {
    /// All of them, in the order of their numbers in messages between ranks.
    pub const ALL: [Reduction; 8] = [
        Reduction::Sum,
        Reduction::Prod,
        Reduction::Max,
        Reduction::Min,
        Reduction::Avg,
        Reduction::BitAnd,
        Reduction::BitOr,
        Reduction::BitXor,
    ];

    /// Whether bits are combined, not numbers.
    pub fn is_bitwise(self) -> bool {
        matches!(self, Reduction::BitAnd | Reduction::BitOr | Reduction::BitXor)
    }

    /// Refuses a dtype that this reduction is not defined for: bools are not added, multiplied or averaged, integers not
    /// averaged, and floats have no bits to combine.
    ///
    /// # Errors
    /// If `dtype` is one of these; the text names it, and what is wanted.
    pub fn check(self, op: &'static str, dtype: DType) -> Result<()> {
        let wanted = match self {
            Reduction::Avg if !dtype.is_float() => "a floating-point dtype",
            Reduction::Sum | Reduction::Prod if dtype == DType::Bool => "max (any) or min (all)",
            by if by.is_bitwise() && dtype.is_float() => "an integer dtype or bool",
            _ => return Ok(()),
        };
        let elements = if dtype == DType::Bool { "bools".into() } else { dtype.to_string() };
        Err(Error::invalid(op, format!("got the {self} of {elements}, wanted {wanted}")))
    }
}

impl Reduction {
    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Prod => "product",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Avg => "average",
            Reduction::BitAnd => "bitwise and",
            Reduction::BitOr => "bitwise or",
            Reduction::BitXor => "bitwise xor",
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An element that can be combined, in a type that may be wider. Its functions are compiled here, once for each type.
pub trait Summand: Element {
    /// The type of intermediate results.
    type Wide: Copy + Default;
    /// Takes the first rank's elements as they are.
    fn load(wide: &mut [Self::Wide], from: &[Self]);
    /// Combines with the next rank's.
    fn combine(wide: &mut [Self::Wide], with: &[Self], by: Reduction);
    /// Divides the sum of `ranks` ranks, if their average is wanted.
    fn finish(wide: &mut [Self::Wide], by: Reduction, ranks: usize);
    /// Rounds into place.
    fn store(wide: &[Self::Wide], to: &mut [Self]);
}

/// What the functions of a [`Summand`] do with one element.
trait Arithmetic: Summand {
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn mul(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn div(a: Self::Wide, ranks: usize) -> Self::Wide;
    fn and(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn or(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn xor(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Arithmetic for $type {
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
            #[inline]
            fn div(a: $wide, ranks: usize) -> $wide {
                a / ranks as $wide
            }
            // `Reduction::check` refuses bits of floats.
            #[inline]
            fn and(a: $wide, b: $wide) -> $wide {
                <$wide>::from_bits(a.to_bits() & b.to_bits())
            }
            #[inline]
            fn or(a: $wide, b: $wide) -> $wide {
                <$wide>::from_bits(a.to_bits() | b.to_bits())
            }
            #[inline]
            fn xor(a: $wide, b: $wide) -> $wide {
                <$wide>::from_bits(a.to_bits() ^ b.to_bits())
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
        impl Arithmetic for $type {
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
            // `Reduction::check` refuses the average of integers.
            #[inline]
            fn div(a: $type, ranks: usize) -> $type {
                (i128::from(a) / ranks as i128) as $type
            }
            #[inline]
            fn and(a: $type, b: $type) -> $type {
                a & b
            }
            #[inline]
            fn or(a: $type, b: $type) -> $type {
                a | b
            }
            #[inline]
            fn xor(a: $type, b: $type) -> $type {
                a ^ b
            }
        }
    )*};
}

integer!(i64, i32, u8);

fn combine_with<T: Arithmetic>(wide: &mut [T::Wide], with: &[T], by: Reduction) {
    let mut each = |f: fn(T::Wide, T::Wide) -> T::Wide| {
        wide.iter_mut().zip(with).for_each(|(wide, &x)| *wide = f(*wide, x.widen()));
    };
    match by {
        Reduction::Sum | Reduction::Avg => {
            wide.iter_mut().zip(with).for_each(|(wide, &x)| *wide = T::add(*wide, x.widen()))
        }
        Reduction::Prod => each(T::mul),
        Reduction::Max => each(T::max),
        Reduction::Min => each(T::min),
        Reduction::BitAnd => each(T::and),
        Reduction::BitOr => each(T::or),
        Reduction::BitXor => each(T::xor),
    }
}

macro_rules! summand {
    ($($type:ty: $wide:ty),*) => {$(
        impl Summand for $type {
            type Wide = $wide;
            fn load(wide: &mut [Self::Wide], from: &[Self]) {
                wide.iter_mut().zip(from).for_each(|(wide, &x)| *wide = x.widen());
            }
            fn combine(wide: &mut [Self::Wide], with: &[Self], by: Reduction) {
                combine_with(wide, with, by);
            }
            fn finish(wide: &mut [Self::Wide], by: Reduction, ranks: usize) {
                if by == Reduction::Avg {
                    wide.iter_mut().for_each(|wide| *wide = Self::div(*wide, ranks));
                }
            }
            fn store(wide: &[Self::Wide], to: &mut [Self]) {
                to.iter_mut().zip(wide).for_each(|(x, &wide)| *x = Self::narrow(wide));
            }
        }
    )*};
}

summand!(f64: f64, f32: f32, bf16: f32, f16: f32, i64: i64, i32: i32, u8: u8);

/// Elements whose intermediate results stay in the nearest cache.
pub const BLOCK: usize = 1024;

/// Intermediate results of up to [`BLOCK`] elements.
pub struct Block<T: Summand>([T::Wide; BLOCK]);

impl<T: Summand> Default for Block<T> {
    fn default() -> Self {
        Block([T::Wide::default(); BLOCK])
    }
}

impl<T: Summand> Block<T> {
    /// Takes the next rank's part: the first one, or one to combine with those before it.
    ///
    /// # Panics
    /// If it has more than [`BLOCK`] elements, which the caller cuts it into.
    pub fn take(&mut self, part: &[T], is_first: bool, by: Reduction) {
        assert!(part.len() <= BLOCK, "a part of {} elements, wanted at most {BLOCK}", part.len());
        if is_first { T::load(&mut self.0, part) } else { T::combine(&mut self.0, part, by) }
    }

    /// Divides the sum of `ranks` ranks, if their average is wanted.
    pub fn finish(&mut self, by: Reduction, ranks: usize) {
        T::finish(&mut self.0, by, ranks);
    }

    /// Rounds into place.
    pub fn store(&self, to: &mut [T]) {
        T::store(&self.0, to);
    }
}

/// Combines the ranks' parts in order.
///
/// # Panics
/// If a part is shorter than the first: the caller has compared the ranks' calls.
pub fn combine(dtype: DType, by: Reduction, parts: &[&[u8]]) -> Vec<u8> {
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
    let (mut block, mut elements) = (Block::<T>::default(), vec![T::zeroed(); BLOCK]);
    for start in (0..length).step_by(step) {
        let range = start..length.min(start + step);
        let elements = &mut elements[..range.len() / size_of::<T>()];
        for (i, part) in parts.iter().enumerate() {
            bytemuck::cast_slice_mut(elements).copy_from_slice(&part[range.clone()]);
            block.take(elements, i == 0, by);
        }
        block.finish(by, parts.len());
        block.store(elements);
        out[range].copy_from_slice(bytemuck::cast_slice(elements));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<T: Summand>(values: &[T], by: Reduction) -> T {
        let mut block = Block::<T>::default();
        values.iter().enumerate().for_each(|(i, x)| block.take(std::slice::from_ref(x), i == 0, by));
        block.finish(by, values.len());
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
    }

    #[test]
    fn an_average_is_divided_before_it_is_rounded_and_bits_are_combined_one_by_one() {
        assert_eq!(reduce(&[1f32, 2.0, 4.0], Reduction::Avg), 7.0 / 3.0);
        // The sum is beyond what f16 holds, the average is not.
        let large = [60_000f32, 60_000.0].map(f16::from_f32);
        assert_eq!(reduce(&large, Reduction::Avg), large[0]);
        let bits = [0b1100u8, 0b1010, 0b1001];
        let by = |by| reduce(&bits, by);
        assert_eq!(
            [Reduction::BitAnd, Reduction::BitOr, Reduction::BitXor].map(by),
            [0b1000, 0b1111, 0b1111]
        );
        assert_eq!(reduce(&[-1i64, 1 << 40], Reduction::BitAnd), 1 << 40);
    }

    #[test]
    fn a_dtype_that_a_reduction_is_not_defined_for_is_named() {
        let refused =
            |by: Reduction, dtype| by.check("all_reduce", dtype).map_err(|e| e.to_string()).unwrap_err();
        let cases = [
            (Reduction::Sum, DType::Bool, "the sum of bools, wanted max (any) or min (all)"),
            (Reduction::Avg, DType::I64, "the average of i64, wanted a floating-point dtype"),
            (Reduction::Avg, DType::Bool, "the average of bools, wanted a floating-point dtype"),
            (Reduction::BitAnd, DType::F32, "the bitwise and of f32, wanted an integer dtype or bool"),
            (Reduction::BitXor, DType::BF16, "the bitwise xor of bf16, wanted an integer dtype or bool"),
        ];
        for (by, dtype, text) in cases {
            assert!(refused(by, dtype).contains(text), "{}", refused(by, dtype));
        }
        let defined =
            |by: Reduction| DType::ALL.iter().filter(|dtype| by.check("test", **dtype).is_ok()).count();
        assert_eq!(Reduction::ALL.map(defined), [7, 7, 8, 8, 4, 4, 4, 4]);
    }
}
