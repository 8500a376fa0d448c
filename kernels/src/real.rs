//! The floating-point element types and the type that each is computed in.

use phalanx_tensor::{Element, bf16, f16};

use crate::simd::Float;

/// An element type of floating-point tensors. f64 and f32 are computed as they are; bf16 and f16 are widened to
/// f32, block by block, and rounded once at the end.
pub(crate) trait Real: Element {
    /// What it is computed in.
    type Wide: Float + Element;

    /// The elements as they are, where no conversion is needed.
    fn as_wide(x: &[Self]) -> Option<&[Self::Wide]>;
    /// The elements as they are, to write, where no conversion is needed.
    fn as_wide_mut(x: &mut [Self]) -> Option<&mut [Self::Wide]>;
    /// One element widened.
    fn widen(self) -> Self::Wide;
    /// The nearest element.
    fn narrow(x: Self::Wide) -> Self;
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
        }
    )*};
}

macro_rules! half {
    ($($type:ty),*) => {$(
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
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                <$type>::from_f32(x)
            }
        }
    )*};
}

wide!(f64, f32);
half!(bf16, f16);

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
