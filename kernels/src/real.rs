//! [`Real`]: the element types bf16, f16, f32 and f64, and the type [`Real::Wide`] that each is computed in.

use phalanx_tensor::{DType, Element, bf16, f16};

use crate::scratch::Scratch;
use crate::simd::{
    Float, Halves, Isa, Kernel, Vector, dispatch, narrow_bf16, narrow_f16, widen_bf16, widen_f16,
};

/// An input's elements.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a, W> {
    Wide(&'a [W]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    /// One element in every place.
    Same(W),
    /// One for each line, in every place of it.
    Each(&'a [W]),
}

/// Where the results go, each rounded once.
pub(crate) enum Output<'a, W> {
    Wide(&'a mut [W]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl<W> Input<'_, W> {
    /// The elements from place `at` on.
    pub(crate) fn from(self, at: usize) -> Self {
        match self {
            Input::Wide(x) => Input::Wide(&x[at..]),
            Input::Bf16(x) => Input::Bf16(&x[at..]),
            Input::F16(x) => Input::F16(&x[at..]),
            Input::Same(_) | Input::Each(_) => self,
        }
    }
}

impl<W> Output<'_, W> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Output::Wide(out) => out.len(),
            Output::Bf16(out) => out.len(),
            Output::F16(out) => out.len(),
        }
    }
}

/// An element type of floating-point tensors. f64 and f32 are computed as they are; bf16 and f16 are widened to
/// f32, block by block, and rounded once at the end.
pub(crate) trait Real: Element {
    /// What it is computed in.
    type Wide: Scratch + Element;

    /// The elements as they are, where no conversion is needed.
    fn as_wide(x: &[Self]) -> Option<&[Self::Wide]>;
    /// The elements as they are, to write, where no conversion is needed.
    fn as_wide_mut(x: &mut [Self]) -> Option<&mut [Self::Wide]>;
    /// The elements as an input of a block.
    fn input(x: &[Self]) -> Input<'_, Self::Wide>;
    /// The elements as the output of a block.
    fn output(x: &mut [Self]) -> Output<'_, Self::Wide>;
    /// One element widened.
    fn widen(self) -> Self::Wide;
    /// The nearest element.
    fn narrow(x: Self::Wide) -> Self;
    /// The elements of `from` widened, at most a vector's lanes; zeros beyond.
    fn load<S: Isa>(from: &[Self]) -> <Self::Wide as Float>::Vec<S>;
    /// The nearest elements of as many leading lanes as `to` has room for.
    fn store<S: Isa>(x: <Self::Wide as Float>::Vec<S>, to: &mut [Self]);
    /// What [`Real::store`] and then [`Real::load`] make of it.
    fn round<S: Isa>(x: <Self::Wide as Float>::Vec<S>) -> <Self::Wide as Float>::Vec<S>;

    /// All elements widened, into a slice of the same length.
    fn widen_all(from: &[Self], to: &mut [Self::Wide]) {
        dispatch(Widen { from, to });
    }

    /// All values rounded, into a slice of the same length.
    fn narrow_all(from: &[Self::Wide], to: &mut [Self]) {
        dispatch(Narrow { from, to });
    }
}

macro_rules! wide {
    ($($type:ident: $vector:ident),*) => {$(
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
            fn input(x: &[Self]) -> Input<'_, Self> {
                Input::Wide(x)
            }
            #[inline(always)]
            fn output(x: &mut [Self]) -> Output<'_, Self> {
                Output::Wide(x)
            }
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(x: Self) -> Self {
                x
            }
            #[inline(always)]
            fn load<S: Isa>(from: &[Self]) -> S::$vector {
                if from.len() < S::$vector::LANES {
                    S::$vector::load_partial(from, 0.0)
                } else {
                    S::$vector::load(from)
                }
            }
            #[inline(always)]
            fn store<S: Isa>(x: S::$vector, to: &mut [Self]) {
                if to.len() < S::$vector::LANES { x.store_partial(to) } else { x.store(to) }
            }
            #[inline(always)]
            fn round<S: Isa>(x: S::$vector) -> S::$vector {
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
    ($($type:ident: $form:ident $widen:ident $narrow:ident $load:ident $store:ident $round:ident),*) => {$(
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
            fn input(x: &[Self]) -> Input<'_, f32> {
                Input::$form(x)
            }
            #[inline(always)]
            fn output(x: &mut [Self]) -> Output<'_, f32> {
                Output::$form(x)
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                $narrow(x)
            }
            #[inline(always)]
            fn load<S: Isa>(from: &[Self]) -> S::F32 {
                S::F32::$load(from)
            }
            #[inline(always)]
            fn store<S: Isa>(x: S::F32, to: &mut [Self]) {
                x.$store(to);
            }
            #[inline(always)]
            fn round<S: Isa>(x: S::F32) -> S::F32 {
                x.$round()
            }
        }
    )*};
}

wide!(f64: F64, f32: F32);
half!(
    bf16: Bf16 widen_bf16 narrow_bf16 load_bf16 store_bf16 round_bf16,
    f16: F16 widen_f16 narrow_f16 load_f16 store_f16 round_f16
);

/// [`Real::widen_all`].
struct Widen<'a, T: Real> {
    from: &'a [T],
    to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        let whole = self.from.len() / lanes * lanes;
        let ((body, tail), (to, to_tail)) = (self.from.split_at(whole), self.to.split_at_mut(whole));
        for (from, to) in body.chunks_exact(lanes).zip(to.chunks_exact_mut(lanes)) {
            T::load::<S>(from).store(to);
        }
        if !tail.is_empty() {
            T::load::<S>(tail).store_partial(to_tail);
        }
    }
}

/// [`Real::narrow_all`].
struct Narrow<'a, T: Real> {
    from: &'a [T::Wide],
    to: &'a mut [T],
}

impl<T: Real> Kernel for Narrow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        let whole = self.from.len() / lanes * lanes;
        let ((body, tail), (to, to_tail)) = (self.from.split_at(whole), self.to.split_at_mut(whole));
        for (from, to) in body.chunks_exact(lanes).zip(to.chunks_exact_mut(lanes)) {
            T::store::<S>(Vector::load(from), to);
        }
        if !tail.is_empty() {
            T::store::<S>(Vector::load_partial(tail, T::Wide::ZERO), to_tail);
        }
    }
}

/// The dtype that elements of a floating-point `dtype` are computed in: that of [`Real::Wide`].
pub(crate) fn wide_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Runs `$body` with `$T` standing for the type beside `$dtype`; `$rest` if it is none of these.
macro_rules! for_dtype {
    ($dtype:expr, $T:ident => $body:expr; $($variant:ident)|+ = $type:ty $(, $($more:ident)|+ = $types:ty)* $(; $other:ident => $rest:expr)?) => {
        match $dtype {
            $(phalanx_tensor::DType::$variant)|+ => {
                type $T = $type;
                $body
            }
            $($(phalanx_tensor::DType::$more)|+ => {
                type $T = $types;
                $body
            })*
            $($other => $rest,)?
        }
    };
}

/// Runs `$body` with `$T` standing for the element type of a floating-point `$dtype`; any other dtype is an error
/// that names `$op`.
macro_rules! for_real {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::real::for_dtype!($dtype, $T => $body;
            F64 = f64, F32 = f32, BF16 = phalanx_tensor::bf16, F16 = phalanx_tensor::f16;
            other => Err(phalanx_tensor::Error::dtype($op, other, "a floating-point dtype")))
    };
}

/// Runs `$body` with `$T` standing for the stored type of any `$dtype`; bools are bytes.
macro_rules! for_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::real::for_dtype!($dtype, $T => $body;
            F64 = f64, F32 = f32, BF16 = phalanx_tensor::bf16, F16 = phalanx_tensor::f16,
            I64 = i64, I32 = i32, U8 | Bool = u8)
    };
}

/// Runs `$body` with `$T` standing for the stored type of an integer or bool `$dtype`; any other dtype is an error that
/// names `$op`.
macro_rules! for_integer {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::real::for_dtype!($dtype, $T => $body;
            I64 = i64, I32 = i32, U8 | Bool = u8;
            other => Err(phalanx_tensor::Error::dtype($op, other, "an integer dtype or bool")))
    };
}

/// Runs `$body` with `$T` standing for the element type of a `$dtype` of numbers, or of integers alone if it says so; any other
/// dtype, such as bool, is an error that names `$op`.
macro_rules! for_number {
    ($op:expr, $dtype:expr, integer $T:ident => $body:expr) => {
        $crate::real::for_dtype!($dtype, $T => $body;
            I64 = i64, I32 = i32, U8 = u8;
            other => Err(phalanx_tensor::Error::dtype($op, other, "a number dtype")))
    };
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::real::for_dtype!($dtype, $T => $body;
            F64 = f64, F32 = f32, BF16 = phalanx_tensor::bf16, F16 = phalanx_tensor::f16,
            I64 = i64, I32 = i32, U8 = u8;
            other => Err(phalanx_tensor::Error::dtype($op, other, "a number dtype")))
    };
}

pub(crate) use {for_dtype, for_element, for_integer, for_number, for_real};
