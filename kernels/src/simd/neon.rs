//! NEON: 4 lanes of f32, 2 of f64.
//!
//! Why the intrinsics may be called: the types' fields are private and [`Neon`] cannot be named outside `simd`, so
//! the vectors exist only inside a kernel that `dispatch` runs, after it saw that the CPU has the features. Each
//! `SAFETY` note below that says "the CPU" means this.

#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use super::halves::Halves;
use super::vector::{Isa, Mask, Vector};

/// AArch64's baseline.
pub(crate) struct Neon;

impl Isa for Neon {
    type F32 = F32x4;
    type F64 = F64x2;
    const REGISTERS: usize = 32;
    // A multiplication takes one factor from a vector's lane, and the compiler loads two of them or more ahead: where 14 rows
    // of sums leave 4 registers, it puts a sum on the stack.
    const FACTORS: usize = 8;
}

impl Halves for F32x4 {}

macro_rules! vector {
    (
        $name:ident: $elem:ident x $lanes:literal in $reg:ident,
        $mask:ident($bits:ident), $int:ident, mantissa $mantissa_bits:literal, bias $bias:literal,
        $dup:ident $dup_u:ident $dup_s:ident $ld1:ident $st1:ident
        $add:ident $sub:ident $mul:ident $div:ident $fma:ident $sqrt:ident $floor:ident $trunc:ident $round:ident
        $abs:ident $neg:ident $lt:ident $le:ident $eq:ident $bsl:ident $words:ident
        $and:ident $or:ident $xor:ident $zip1:ident $zip2:ident
        $to_u:ident $from_s:ident $s_from_u:ident $to_int:ident $from_int:ident $add_s:ident $sub_s:ident
        $shl:ident $shr:ident $from_u:ident
    ) => {
        /// A 128-bit register.
        #[derive(Clone, Copy)]
        pub(crate) struct $name($reg);

        /// All ones or all zeros in each lane.
        #[derive(Clone, Copy)]
        pub(crate) struct $mask($bits);

        impl Mask for $mask {
            #[inline(always)]
            fn any(self) -> bool {
                // SAFETY: the CPU.
                unsafe { vmaxvq_u32($words(self.0)) != 0 }
            }

            #[inline(always)]
            fn all(self) -> bool {
                // SAFETY: the CPU.
                unsafe { vminvq_u32($words(self.0)) != 0 }
            }
        }

        vector!(@operator $mask BitAnd bitand $and);
        vector!(@operator $mask BitOr bitor $or);

        impl Not for $mask {
            type Output = Self;

            #[inline(always)]
            fn not(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $mask($xor(self.0, $dup_u(!0))) }
            }
        }

        vector!(@operator $name Add add $add);
        vector!(@operator $name Sub sub $sub);
        vector!(@operator $name Mul mul $mul);
        vector!(@operator $name Div div $div);

        impl Neg for $name {
            type Output = Self;

            #[inline(always)]
            fn neg(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($neg(self.0)) }
            }
        }

        impl Vector for $name {
            type Elem = $elem;
            type Mask = $mask;
            const LANES: usize = $lanes;

            #[inline(always)]
            fn splat(x: $elem) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($dup(x)) }
            }

            #[inline(always)]
            fn load(src: &[$elem]) -> Self {
                assert!(src.len() >= $lanes);
                // SAFETY: the CPU, and `src` has the lanes that are read.
                unsafe { $name($ld1(src.as_ptr())) }
            }

            #[inline(always)]
            fn load_partial(src: &[$elem], fill: $elem) -> Self {
                // A lane at a time: a copy of unknown length is a call, with all vectors around it in memory.
                let mut lanes = [fill; $lanes];
                for (i, lane) in lanes.iter_mut().enumerate() {
                    if let Some(&x) = src.get(i) {
                        *lane = x;
                    }
                }
                Self::load(&lanes)
            }

            #[inline(always)]
            fn store(self, dst: &mut [$elem]) {
                assert!(dst.len() >= $lanes);
                // SAFETY: the CPU, and `dst` has the lanes that are written.
                unsafe { $st1(dst.as_mut_ptr(), self.0) }
            }

            #[inline(always)]
            fn store_partial(self, dst: &mut [$elem]) {
                let mut lanes = [0.0; $lanes];
                self.store(&mut lanes);
                for (i, lane) in lanes.into_iter().enumerate() {
                    if let Some(x) = dst.get_mut(i) {
                        *x = lane;
                    }
                }
            }

            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: the CPU. The intrinsic takes the addend first.
                unsafe { $name($fma(c.0, self.0, b.0)) }
            }

            #[inline(always)]
            fn min(self, o: Self) -> Self {
                Self::select(self.lt(o), self, o)
            }

            #[inline(always)]
            fn max(self, o: Self) -> Self {
                Self::select(o.lt(self), self, o)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($abs(self.0)) }
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($sqrt(self.0)) }
            }

            #[inline(always)]
            fn floor(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($floor(self.0)) }
            }

            #[inline(always)]
            fn trunc(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($trunc(self.0)) }
            }

            #[inline(always)]
            fn round_even(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($round(self.0)) }
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($bsl($to_u($dup(-0.0)), sign.0, self.0)) }
            }

            #[inline(always)]
            fn lt(self, o: Self) -> $mask {
                // SAFETY: the CPU.
                unsafe { $mask($lt(self.0, o.0)) }
            }

            #[inline(always)]
            fn le(self, o: Self) -> $mask {
                // SAFETY: the CPU.
                unsafe { $mask($le(self.0, o.0)) }
            }

            #[inline(always)]
            fn eq(self, o: Self) -> $mask {
                // SAFETY: the CPU.
                unsafe { $mask($eq(self.0, o.0)) }
            }

            #[inline(always)]
            fn select(mask: $mask, if_true: Self, if_false: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($bsl(mask.0, if_true.0, if_false.0)) }
            }

            #[inline(always)]
            fn scale_by_power(self, n: Self) -> Self {
                // Two steps, of which only the second can leave the normal range and round.
                let half = (n * Self::splat(0.5)).floor();
                // SAFETY: the CPU.
                unsafe {
                    let power = |n: $reg| $from_s($shl::<$mantissa_bits>($add_s($to_int(n), $dup_s($bias))));
                    $name($mul($mul(self.0, power(half.0)), power($sub(n.0, half.0))))
                }
            }

            #[inline(always)]
            fn split(self) -> (Self, Self) {
                // A subnormal is lifted into the normal range first.
                let lift = ($mantissa_bits + 1) as $elem;
                let tiny = self.lt(Self::splat($elem::MIN_POSITIVE));
                let lifted = self * Self::splat((1u64 << ($mantissa_bits + 1)) as $elem);
                let x = Self::select(tiny, lifted, self);
                // SAFETY: the CPU.
                unsafe {
                    let biased = $s_from_u($shr::<$mantissa_bits>($to_u(x.0)));
                    let exponent = $name($from_int($sub_s(biased, $dup_s($bias))));
                    let exponent = Self::select(tiny, exponent - Self::splat(lift), exponent);
                    let fraction = $and($to_u(x.0), $dup_u((1 << $mantissa_bits) - 1));
                    ($name($from_u($or(fraction, $to_u($dup(1.0))))), exponent)
                }
            }

            #[inline(always)]
            fn zip_parts(self, b: Self) -> (Self, Self) {
                // SAFETY: the CPU.
                unsafe { ($name($zip1(self.0, b.0)), $name($zip2(self.0, b.0))) }
            }
        }
    };
    (@operator $name:ident $trait:ident $method:ident $intrinsic:ident) => {
        impl $trait for $name {
            type Output = Self;

            #[inline(always)]
            fn $method(self, o: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($intrinsic(self.0, o.0)) }
            }
        }
    };
}

/// A mask register as 32-bit words: it already is one.
#[inline(always)]
fn words_of_u32(mask: uint32x4_t) -> uint32x4_t {
    mask
}

vector!(
    F32x4: f32 x 4 in float32x4_t,
    Mask32x4(uint32x4_t), i32, mantissa 23, bias 127,
    vdupq_n_f32 vdupq_n_u32 vdupq_n_s32 vld1q_f32 vst1q_f32
    vaddq_f32 vsubq_f32 vmulq_f32 vdivq_f32 vfmaq_f32 vsqrtq_f32 vrndmq_f32 vrndq_f32 vrndnq_f32
    vabsq_f32 vnegq_f32 vcltq_f32 vcleq_f32 vceqq_f32 vbslq_f32 words_of_u32
    vandq_u32 vorrq_u32 veorq_u32 vzip1q_f32 vzip2q_f32
    vreinterpretq_u32_f32 vreinterpretq_f32_s32 vreinterpretq_s32_u32 vcvtq_s32_f32 vcvtq_f32_s32 vaddq_s32 vsubq_s32
    vshlq_n_s32 vshrq_n_u32 vreinterpretq_f32_u32
);

vector!(
    F64x2: f64 x 2 in float64x2_t,
    Mask64x2(uint64x2_t), i64, mantissa 52, bias 1023,
    vdupq_n_f64 vdupq_n_u64 vdupq_n_s64 vld1q_f64 vst1q_f64
    vaddq_f64 vsubq_f64 vmulq_f64 vdivq_f64 vfmaq_f64 vsqrtq_f64 vrndmq_f64 vrndq_f64 vrndnq_f64
    vabsq_f64 vnegq_f64 vcltq_f64 vcleq_f64 vceqq_f64 vbslq_f64 vreinterpretq_u32_u64
    vandq_u64 vorrq_u64 veorq_u64 vzip1q_f64 vzip2q_f64
    vreinterpretq_u64_f64 vreinterpretq_f64_s64 vreinterpretq_s64_u64 vcvtq_s64_f64 vcvtq_f64_s64 vaddq_s64 vsubq_s64
    vshlq_n_s64 vshrq_n_u64 vreinterpretq_f64_u64
);
