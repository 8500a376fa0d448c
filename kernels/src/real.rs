//! The floating-point element types and the type that each is computed in.

use phalanx_tensor::{Element, bf16, f16};

use crate::gemm::Scratch;
use crate::simd::{Isa, Kernel, dispatch};

/// An element type of floating-point tensors. f64 and f32 are computed as they are; bf16 and f16 are widened to
/// f32, block by block, and rounded once at the end.
pub(crate) trait Real: Element {
    /// What it is computed in.
    type Wide: Scratch + Element;

    /// The elements as they are, where no conversion is needed.
    fn as_wide(x: &[Self]) -> Option<&[Self::Wide]>;
    /// The elements as they are, to write, where no conversion is needed.
    fn as_wide_mut(x: &mut [Self]) -> Option<&mut [Self::Wide]>;
    /// One element widened.
    fn widen(self) -> Self::Wide;
    /// The nearest element.
    fn narrow(x: Self::Wide) -> Self;
    /// All elements widened, into a slice of the same length.
    fn widen_all(from: &[Self], to: &mut [Self::Wide]);
    /// All values rounded, into a slice of the same length.
    fn narrow_all(from: &[Self::Wide], to: &mut [Self]);
}

macro_rules! wide {
    ($($type:ty),*) => {$(
        impl Real for $type {
            type Wide = $type;
            #[inline(always)]
            fn as_wide(x: &[Self]) -> Option<&[Self]> {
                Some(x)
            }
            #[inline(always)]
            fn as_wide_mut(x: &mut [Self]) -> Option<&mut [Self]> {
                Some(x)
            }
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(x: Self) -> Self {
                x
            }
            fn widen_all(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            fn narrow_all(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
        }
    )*};
}

macro_rules! half {
    ($($type:ident: $widen:ident $narrow:ident),*) => {$(
        impl Real for $type {
            type Wide = f32;
            #[inline(always)]
            fn as_wide(_: &[Self]) -> Option<&[f32]> {
                None
            }
            #[inline(always)]
            fn as_wide_mut(_: &mut [Self]) -> Option<&mut [f32]> {
                None
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                $narrow(x)
            }
            fn widen_all(from: &[Self], to: &mut [f32]) {
                dispatch(Convert { from, to, f: $widen });
            }
            fn narrow_all(from: &[f32], to: &mut [Self]) {
                dispatch(Convert { from, to, f: $narrow });
            }
        }
    )*};
}

wide!(f64, f32);
half!(bf16: widen_bf16 narrow_bf16, f16: widen_f16 narrow_f16);

/// A plain loop, which the compiler turns into vectors of the instruction set that it is dispatched to.
struct Convert<'a, A, B, F> {
    from: &'a [A],
    to: &'a mut [B],
    f: F,
}

impl<A: Copy, B, F: Fn(A) -> B> Kernel for Convert<'_, A, B, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = (self.f)(from);
        }
    }
}

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// To nearest even: adds half of the last place kept, less one for an even result, and cuts. A NaN stays one.
#[inline(always)]
fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16)
}

/// The exponent is moved by a product, which makes subnormals right too.
#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let shifted = (bits & 0x7fff) << 13;
    let value = f32::from_bits(shifted) * f32::from_bits((127 + 112) << 23); // 2^112
    // Infinity and NaN became numbers from 2^16 up.
    let magnitude = if value >= 65536.0 { shifted | 0x7f80_0000 } else { value.to_bits() };
    f32::from_bits(magnitude | ((bits & 0x8000) << 16))
}

/// To nearest even.
#[inline(always)]
fn narrow_f16(x: f32) -> f16 {
    let (sign, magnitude) = ((x.to_bits() >> 16) & 0x8000, x.to_bits() & 0x7fff_ffff);
    // Normal: as for bf16, with the exponent moved from bias 127 to 15.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal: the last place of 1/2 is 2^-24, which is f16's smallest step, so the sum rounds there.
    let subnormal = (x.abs() + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    let infinite = if x.is_nan() { 0x7e00 } else { 0x7c00 };
    f16::from_bits((sign | if magnitude >= 143 << 23 { infinite } else { finite }) as u16)
}

/// Runs `$body` with `$T` standing for the element type of a floating-point `$dtype`; any other dtype is an error
/// that names `$op`.
macro_rules! for_real {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx_tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            phalanx_tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            phalanx_tensor::DType::BF16 => {
                type $T = phalanx_tensor::bf16;
                $body
            }
            phalanx_tensor::DType::F16 => {
                type $T = phalanx_tensor::f16;
                $body
            }
            other => Err(phalanx_tensor::Error::dtype($op, other, "a floating-point dtype")),
        }
    };
}

/// Runs `$body` with `$T` standing for the stored type of any `$dtype`; bools are bytes.
macro_rules! for_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx_tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            phalanx_tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            phalanx_tensor::DType::BF16 => {
                type $T = phalanx_tensor::bf16;
                $body
            }
            phalanx_tensor::DType::F16 => {
                type $T = phalanx_tensor::f16;
                $body
            }
            phalanx_tensor::DType::I64 => {
                type $T = i64;
                $body
            }
            phalanx_tensor::DType::I32 => {
                type $T = i32;
                $body
            }
            phalanx_tensor::DType::U8 | phalanx_tensor::DType::Bool => {
                type $T = u8;
                $body
            }
        }
    };
}

pub(crate) use {for_element, for_real};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_widen_exactly() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(widen_bf16(b) == b.to_f32() || b.is_nan() && widen_bf16(b).is_nan());
            assert!(widen_f16(h) == h.to_f32() || h.is_nan() && widen_f16(h).is_nan());
        }
    }

    #[test]
    fn halves_narrow_to_the_nearest() {
        // All exponents, with the bits around the roundings set in every combination.
        for high in 0..1u32 << 13 {
            for low in [0, 1, 0x7ff, 0xfff, 0x1000, 0x1001, 0x1fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x1_8000]
            {
                let x = f32::from_bits(high << 19 | low);
                let (b, h) = (narrow_bf16(x), narrow_f16(x));
                assert!(b.to_bits() == bf16::from_f32(x).to_bits() || x.is_nan() && b.is_nan(), "{x:e}");
                assert!(h.to_bits() == f16::from_f32(x).to_bits() || x.is_nan() && h.is_nan(), "{x:e}");
            }
        }
    }
}
