//! AVX-512: 16 lanes of f32, 8 of f64.
//!
//! Why the intrinsics may be called: the types' fields are private and [`Avx512`] cannot be named outside `simd`, so
//! the vectors exist only inside a kernel that `dispatch` runs, after it saw that the CPU has the features. Each
//! `SAFETY` note below that says "the CPU" means this.

#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::halves::Halves;
use super::vector::{Isa, Mask, PARTS_MAX, Vector};

/// AVX-512 F, BW, DQ and VL.
pub(crate) struct Avx512;

impl Isa for Avx512 {
    type F32 = F32x16;
    type F64 = F64x8;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn in_f64(from: &[f32], fill: f64) -> F64x8 {
        let first = F64x8::first(from.len());
        // SAFETY: the CPU, and only the first `from.len()` elements are read.
        unsafe {
            F64x8(match from.len() < F64x8::LANES {
                true => _mm512_mask_cvtps_pd(
                    _mm512_set1_pd(fill),
                    first,
                    _mm256_maskz_loadu_ps(first, from.as_ptr()),
                ),
                false => _mm512_cvtps_pd(_mm256_loadu_ps(from.as_ptr())),
            })
        }
    }
}

/// AVX-512 with BF16's dot product, which takes subnormal inputs for zero and makes subnormal sums zero.
pub(crate) struct Avx512Bf16;

impl Isa for Avx512Bf16 {
    type F32 = F32x16;
    type F64 = F64x8;
    const REGISTERS: usize = 32;
    const BF16_IN_LANE: usize = 2;

    #[inline(always)]
    fn dot_bf16(a: F32x16, b: F32x16, sum: F32x16) -> F32x16 {
        // SAFETY: the CPU, which `Runner::run_on_pairs` saw to have it; the types have the same bits. The last operand is the one that
        // the instruction can read from memory into every lane, as a tile's products read A.
        unsafe {
            let bits = |x: F32x16| std::mem::transmute::<__m512, __m512bh>(x.0);
            F32x16(_mm512_dpbf16_ps(sum.0, bits(b), bits(a)))
        }
    }
}

/// [`Vector::pinned`]: an assembly of no instruction that the compiler thinks reads memory.
#[inline]
#[target_feature(enable = "avx512f")]
fn pinned(mut x: __m512) -> __m512 {
    // SAFETY: it does nothing.
    unsafe { std::arch::asm!("/* {0} */", inout(zmm_reg) x, options(readonly, nostack, preserves_flags)) };
    x
}

macro_rules! vector {
    (
        $name:ident: $elem:ident x $lanes:literal in $reg:ident,
        $mask:ident($bits:ident),
        $set1:ident $loadu:ident $mask_loadu:ident $storeu:ident $mask_storeu:ident
        $add:ident $sub:ident $mul:ident $div:ident $fmadd:ident $sqrt:ident $min:ident $max:ident $roundscale:ident
        $cmp:ident $blend:ident $scalef:ident $getmant:ident $getexp:ident
        $to_int:ident $from_int:ident $ternary:ident
        $unpacklo:ident $unpackhi:ident $shuffle_parts:ident $align:ident
    ) => {
        /// A 512-bit register.
        #[derive(Clone, Copy)]
        pub(crate) struct $name($reg);

        /// A mask register.
        #[derive(Clone, Copy)]
        pub(crate) struct $mask($bits);

        impl Mask for $mask {
            #[inline(always)]
            fn any(self) -> bool {
                self.0 != 0
            }

            #[inline(always)]
            fn all(self) -> bool {
                self.0 == $bits::MAX
            }
        }

        impl BitAnd for $mask {
            type Output = Self;

            #[inline(always)]
            fn bitand(self, o: Self) -> Self {
                $mask(self.0 & o.0)
            }
        }

        impl BitOr for $mask {
            type Output = Self;

            #[inline(always)]
            fn bitor(self, o: Self) -> Self {
                $mask(self.0 | o.0)
            }
        }

        impl Not for $mask {
            type Output = Self;

            #[inline(always)]
            fn not(self) -> Self {
                $mask(!self.0)
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
                self.ternary::<0x3C>(Self::splat(-0.0), self) // a xor b
            }
        }

        impl $name {
            /// A bitwise function of three registers, given by its table over (a, b, c).
            #[inline(always)]
            fn ternary<const TABLE: i32>(self, b: Self, c: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($from_int($ternary::<TABLE>($to_int(self.0), $to_int(b.0), $to_int(c.0)))) }
            }

            /// The mask of the first `len` lanes, all of them if there are more.
            #[inline(always)]
            fn first(len: usize) -> $bits {
                if len >= $lanes { $bits::MAX } else { (1 << len) - 1 }
            }
        }

        impl Vector for $name {
            type Elem = $elem;
            type Mask = $mask;
            const LANES: usize = $lanes;
            const SPLATS_MEMORY: bool = true;

            #[inline(always)]
            fn pinned(self) -> Self {
                // SAFETY: the CPU; both types are 512 bits.
                unsafe { std::mem::transmute(pinned(std::mem::transmute::<Self, __m512>(self))) }
            }

            #[inline(always)]
            fn splat(x: $elem) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($set1(x)) }
            }

            #[inline(always)]
            fn load(src: &[$elem]) -> Self {
                assert!(src.len() >= $lanes);
                // SAFETY: the CPU, and `src` has the lanes that are read.
                unsafe { $name($loadu(src.as_ptr())) }
            }

            #[inline(always)]
            fn load_partial(src: &[$elem], fill: $elem) -> Self {
                // SAFETY: the CPU, and only the first `src.len()` lanes are read.
                unsafe { $name($mask_loadu($set1(fill), Self::first(src.len()), src.as_ptr())) }
            }

            #[inline(always)]
            unsafe fn load_where(src: *const $elem, lanes: u32) -> Self {
                // SAFETY: the CPU, and only the lanes named are read, which the caller vouches for.
                unsafe { $name($mask_loadu($set1(0.0), lanes as $bits, src)) }
            }

            #[inline(always)]
            fn store(self, dst: &mut [$elem]) {
                assert!(dst.len() >= $lanes);
                // SAFETY: the CPU, and `dst` has the lanes that are written.
                unsafe { $storeu(dst.as_mut_ptr(), self.0) }
            }

            #[inline(always)]
            fn store_partial(self, dst: &mut [$elem]) {
                // SAFETY: the CPU, and only the first `dst.len()` lanes are written.
                unsafe { $mask_storeu(dst.as_mut_ptr(), Self::first(dst.len()), self.0) }
            }

            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($fmadd(self.0, b.0, c.0)) }
            }

            #[inline(always)]
            fn min(self, o: Self) -> Self {
                // SAFETY: the CPU. The instruction returns its second operand for NaN and for two zeros.
                unsafe { $name($min(self.0, o.0)) }
            }

            #[inline(always)]
            fn max(self, o: Self) -> Self {
                // SAFETY: the CPU. The instruction returns its second operand for NaN and for two zeros.
                unsafe { $name($max(self.0, o.0)) }
            }

            #[inline(always)]
            fn abs(self) -> Self {
                self.ternary::<0x30>(Self::splat(-0.0), self) // a and not b
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($sqrt(self.0)) }
            }

            #[inline(always)]
            fn floor(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($roundscale::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(self.0)) }
            }

            #[inline(always)]
            fn trunc(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($roundscale::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(self.0)) }
            }

            #[inline(always)]
            fn round_even(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($roundscale::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                self.ternary::<0xD8>(sign, Self::splat(-0.0)) // b where c is set, else a
            }

            #[inline(always)]
            fn lt(self, o: Self) -> $mask {
                // SAFETY: the CPU.
                unsafe { $mask($cmp::<_CMP_LT_OQ>(self.0, o.0)) }
            }

            #[inline(always)]
            fn le(self, o: Self) -> $mask {
                // SAFETY: the CPU.
                unsafe { $mask($cmp::<_CMP_LE_OQ>(self.0, o.0)) }
            }

            #[inline(always)]
            fn eq(self, o: Self) -> $mask {
                // SAFETY: the CPU.
                unsafe { $mask($cmp::<_CMP_EQ_OQ>(self.0, o.0)) }
            }

            #[inline(always)]
            fn select(mask: $mask, if_true: Self, if_false: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($blend(mask.0, if_false.0, if_true.0)) }
            }

            #[inline(always)]
            fn scale_by_power(self, n: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($scalef(self.0, n.0)) }
            }

            #[inline(always)]
            fn split(self) -> (Self, Self) {
                // SAFETY: the CPU.
                unsafe {
                    let mantissa = $getmant::<_MM_MANT_NORM_1_2, _MM_MANT_SIGN_SRC>(self.0);
                    ($name(mantissa), $name($getexp(self.0)))
                }
            }

            #[inline(always)]
            fn prefetch(address: *const $elem) {
                // SAFETY: the CPU; a prefetch never faults.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
            }

            #[inline(always)]
            fn prefetch_far(address: *const $elem) {
                // SAFETY: the CPU; a prefetch never faults.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
            }

            #[inline(always)]
            fn one_on(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($from_int($align::<{ $lanes - 1 }>($to_int(self.0), $to_int(self.0)))) }
            }

            const PARTS: usize = PARTS_MAX;

            #[inline(always)]
            fn zip_parts(self, b: Self) -> (Self, Self) {
                // SAFETY: the CPU.
                unsafe { ($name($unpacklo(self.0, b.0)), $name($unpackhi(self.0, b.0))) }
            }

            #[inline(always)]
            fn transpose_parts([a, b, c, d]: [Self; PARTS_MAX]) -> [Self; PARTS_MAX] {
                // SAFETY: the CPU. Two parts of each register, lower ones or upper ones; then the first of each two, or the second.
                unsafe {
                    let (ab, ab_high) = ($shuffle_parts::<0x44>(a.0, b.0), $shuffle_parts::<0xEE>(a.0, b.0));
                    let (cd, cd_high) = ($shuffle_parts::<0x44>(c.0, d.0), $shuffle_parts::<0xEE>(c.0, d.0));
                    [
                        $name($shuffle_parts::<0x88>(ab, cd)),
                        $name($shuffle_parts::<0xDD>(ab, cd)),
                        $name($shuffle_parts::<0x88>(ab_high, cd_high)),
                        $name($shuffle_parts::<0xDD>(ab_high, cd_high)),
                    ]
                }
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

vector!(
    F32x16: f32 x 16 in __m512,
    Mask16(__mmask16),
    _mm512_set1_ps _mm512_loadu_ps _mm512_mask_loadu_ps _mm512_storeu_ps _mm512_mask_storeu_ps
    _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_div_ps _mm512_fmadd_ps _mm512_sqrt_ps _mm512_min_ps _mm512_max_ps
    _mm512_roundscale_ps
    _mm512_cmp_ps_mask _mm512_mask_blend_ps _mm512_scalef_ps _mm512_getmant_ps _mm512_getexp_ps
    _mm512_castps_si512 _mm512_castsi512_ps _mm512_ternarylogic_epi32
    _mm512_unpacklo_ps _mm512_unpackhi_ps _mm512_shuffle_f32x4 _mm512_alignr_epi32
);

vector!(
    F64x8: f64 x 8 in __m512d,
    Mask8(__mmask8),
    _mm512_set1_pd _mm512_loadu_pd _mm512_mask_loadu_pd _mm512_storeu_pd _mm512_mask_storeu_pd
    _mm512_add_pd _mm512_sub_pd _mm512_mul_pd _mm512_div_pd _mm512_fmadd_pd _mm512_sqrt_pd _mm512_min_pd _mm512_max_pd
    _mm512_roundscale_pd
    _mm512_cmp_pd_mask _mm512_mask_blend_pd _mm512_scalef_pd _mm512_getmant_pd _mm512_getexp_pd
    _mm512_castpd_si512 _mm512_castsi512_pd _mm512_ternarylogic_epi64
    _mm512_unpacklo_pd _mm512_unpackhi_pd _mm512_shuffle_f64x2 _mm512_alignr_epi64
);

/// At most 16 words, then zeros.
#[inline(always)]
fn load(src: &[u16]) -> __m256i {
    // SAFETY: the CPU, and only elements of `src` are read.
    unsafe {
        if src.len() >= 16 {
            _mm256_loadu_si256(src.as_ptr().cast())
        } else {
            _mm256_maskz_loadu_epi16(F32x16::first(src.len()), src.as_ptr().cast())
        }
    }
}

/// Writes as many words as `dst` has room for.
#[inline(always)]
fn store(words: __m256i, dst: &mut [u16]) {
    // SAFETY: the CPU, and only elements of `dst` are written.
    unsafe {
        if dst.len() >= 16 {
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), words);
        } else {
            _mm256_mask_storeu_epi16(dst.as_mut_ptr().cast(), F32x16::first(dst.len()), words);
        }
    }
}

/// Each word in the upper half of a lane.
#[inline(always)]
fn raise(words: __m256i) -> __m512i {
    // SAFETY: the CPU.
    unsafe { _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)) }
}

/// 16 words in the lower half and 16 in the upper one, which needs no permutation as they come from memory.
#[inline(always)]
fn joined(low: &[bf16], high: &[bf16]) -> __m512 {
    assert!(low.len() >= 16 && high.len() >= 16, "words of a half");
    // SAFETY: the CPU, and there are 16 elements in each.
    unsafe {
        let low = _mm512_castpd256_pd512(_mm256_loadu_pd(low.as_ptr().cast()));
        _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_loadu_pd(high.as_ptr().cast())))
    }
}

impl F32x16 {
    #[inline(always)]
    fn of_bits(bits: __m512i) -> F32x16 {
        // SAFETY: the CPU.
        unsafe { F32x16(_mm512_castsi512_ps(bits)) }
    }

    /// The nearest bf16 in the upper halves; anything in the lower ones.
    #[inline(always)]
    fn rounded(self) -> __m512i {
        // SAFETY: the CPU.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
            let half = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            _mm512_mask_add_epi32(quiet, number, bits, half)
        }
    }
}

impl Halves for F32x16 {
    const SPLITS_NEIGHBOURS: bool = true;

    #[inline(always)]
    fn load_neighbours(lines: [&[bf16]; PARTS_MAX]) -> [Self; PARTS_MAX] {
        let [a, b, c, d] = lines;
        let (ab, ab_high) = (joined(&a[..16], &b[..16]), joined(&a[16..32], &b[16..32]));
        let (cd, cd_high) = (joined(&c[..16], &d[..16]), joined(&c[16..32], &d[16..32]));
        // SAFETY: the CPU.
        unsafe {
            [
                F32x16(_mm512_shuffle_f32x4::<0x88>(ab, cd)),
                F32x16(_mm512_shuffle_f32x4::<0xDD>(ab, cd)),
                F32x16(_mm512_shuffle_f32x4::<0x88>(ab_high, cd_high)),
                F32x16(_mm512_shuffle_f32x4::<0xDD>(ab_high, cd_high)),
            ]
        }
    }

    #[inline(always)]
    fn split_neighbours(self) -> [Self; 2] {
        // SAFETY: the CPU.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let upper = _mm512_and_si512(bits, _mm512_set1_epi32(-1 << 16));
            [Self::of_bits(_mm512_slli_epi32::<16>(bits)), Self::of_bits(upper)]
        }
    }

    #[inline(always)]
    fn load_bf16(src: &[bf16]) -> Self {
        Self::of_bits(raise(load(src.reinterpret_cast())))
    }

    #[inline(always)]
    fn store_bf16(self, dst: &mut [bf16]) {
        // SAFETY: the CPU.
        let words = unsafe { _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(self.rounded())) };
        store(words, dst.reinterpret_cast_mut());
    }

    #[inline(always)]
    fn round_bf16(self) -> Self {
        // SAFETY: the CPU.
        unsafe { Self::of_bits(_mm512_and_si512(self.rounded(), _mm512_set1_epi32(-1 << 16))) }
    }

    #[inline(always)]
    fn load_f16(src: &[f16]) -> Self {
        // SAFETY: the CPU.
        unsafe { F32x16(_mm512_cvtph_ps(load(src.reinterpret_cast()))) }
    }

    #[inline(always)]
    fn store_f16(self, dst: &mut [f16]) {
        // SAFETY: the CPU.
        let words = unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) };
        store(words, dst.reinterpret_cast_mut());
    }

    #[inline(always)]
    fn round_f16(self) -> Self {
        // SAFETY: the CPU.
        unsafe { F32x16(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))) }
    }

    #[inline(always)]
    fn load_pairs_of(first: &[bf16], next: &[bf16]) -> Self {
        let upper = raise(load(first.reinterpret_cast()));
        // SAFETY: the CPU.
        unsafe {
            let lower = _mm512_cvtepu16_epi32(load(next.reinterpret_cast()));
            Self::of_bits(_mm512_or_si512(upper, lower))
        }
    }

    #[inline(always)]
    fn load_twos(src: &[bf16]) -> Self {
        assert!(src.len() >= 32, "two elements for each lane");
        // SAFETY: the CPU, and there are 32 elements.
        unsafe { F32x16(_mm512_loadu_ps(src.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_pairs(src: &[bf16], beyond: bf16) -> Self {
        let words: &[u16] = src.reinterpret_cast();
        // SAFETY: the CPU, and only elements of `src` are read.
        unsafe {
            let pairs = if src.len() >= 32 {
                _mm512_loadu_si512(words.as_ptr().cast())
            } else {
                let missing = _mm512_set1_epi16(beyond.to_bits() as i16);
                _mm512_mask_loadu_epi16(missing, (1 << src.len()) - 1, words.as_ptr().cast())
            };
            Self::of_bits(_mm512_rol_epi32::<16>(pairs))
        }
    }
}
