//! The key of an element: an unsigned integer; keys have the order of the elements.

use bytemuck::Pod;
use phalanx_tensor::DType;

use crate::simd::{Isa, Kernel};

/// Keys of a chunk, of which the smallest is stored.
pub(super) const CHUNK: usize = 32;

/// An element's bits.
pub(super) trait Bits: Pod + Send + Sync {
    /// What orders it.
    type Key: Key;

    /// How elements of a dtype of this size are ordered.
    fn map(dtype: DType, descending: bool) -> Map<Self>;
    /// The element's key: all NaN have the largest, both zeros have one.
    fn key(self, map: Map<Self>) -> Self::Key;
}

/// A key.
pub(super) trait Key: Pod + Ord + Send + Sync {
    /// The largest.
    const MAX: Self;

    /// The key, whatever its size.
    fn wide(self) -> u64;
}

impl Key for u32 {
    const MAX: u32 = u32::MAX;

    #[inline(always)]
    fn wide(self) -> u64 {
        self.into()
    }
}

impl Key for u64 {
    const MAX: u64 = u64::MAX;

    #[inline(always)]
    fn wide(self) -> u64 {
        self
    }
}

/// One formula for the keys of all dtypes of a size.
#[derive(Clone, Copy)]
pub(super) struct Map<U> {
    /// Changed in every element: the sign of signed ones.
    sign: U,
    /// Changed in elements whose sign is set: the other bits of floats.
    negative: U,
    /// Taken for zero: the floats' -0.
    zero: U,
    /// Larger magnitudes are NaN.
    infinity: U,
    /// Changed in every key: all bits, if the order descends.
    last: U,
}

macro_rules! bits {
    ($($bits:ident: $key:ident, $infinity:expr;)*) => {$(
        impl Bits for $bits {
            type Key = $key;

            fn map(dtype: DType, descending: bool) -> Map<$bits> {
                let sign = 1 << ($bits::BITS - 1);
                let infinity: fn(DType) -> $bits = $infinity;
                let [sign, negative, zero, infinity] = match dtype {
                    _ if dtype.is_float() => [sign, sign - 1, sign, infinity(dtype)],
                    DType::I64 | DType::I32 => [sign, 0, 0, $bits::MAX],
                    _ => [0, 0, 0, $bits::MAX],
                };
                Map { sign, negative, zero, infinity, last: if descending { $bits::MAX } else { 0 } }
            }

            #[inline(always)]
            fn key(self, map: Map<$bits>) -> $key {
                let bits = if self == map.zero { 0 } else { self };
                let sign: $bits = bits >> ($bits::BITS - 1);
                let ordered = bits ^ map.sign ^ (map.negative & (0 as $bits).wrapping_sub(sign));
                let is_nan = self & ($bits::MAX >> 1) > map.infinity;
                $key::from((if is_nan { $bits::MAX } else { ordered }) ^ map.last)
            }
        }
    )*};
}

bits! {
    u8: u32, |_| u8::MAX;
    u16: u32, |dtype| if dtype == DType::BF16 { 0x7f80 } else { 0x7c00 };
    u32: u32, |_| f32::INFINITY.to_bits();
    u64: u64, |_| f64::INFINITY.to_bits();
}

/// The keys of `from`, and the smallest of each [`CHUNK`].
pub(super) struct Keys<'a, U: Bits> {
    pub from: &'a [U],
    pub to: &'a mut [U::Key],
    pub least: &'a mut [U::Key],
    pub map: Map<U>,
}

impl<U: Bits> Kernel for Keys<'_, U> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for ((from, to), least) in self.from.chunks(CHUNK).zip(self.to.chunks_mut(CHUNK)).zip(self.least) {
            *least = match (<&[U; CHUNK]>::try_from(from), <&mut [U::Key; CHUNK]>::try_from(&mut *to)) {
                (Ok(from), Ok(to)) => fill(from, to, self.map),
                _ => fill(from, to, self.map),
            };
        }
    }
}

/// Makes keys and gives the smallest. Inlined for as many as are known when compiling, and for any other number.
#[inline(always)]
fn fill<U: Bits>(from: &[U], to: &mut [U::Key], map: Map<U>) -> U::Key {
    let mut least = U::Key::MAX;
    for (to, &x) in to.iter_mut().zip(from) {
        *to = x.key(map);
        least = least.min(*to);
    }
    least
}
