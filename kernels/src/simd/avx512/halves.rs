//! Half types in 16 lanes of f32. Why the intrinsics may be called, see the module above.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::*;
use crate::simd::halves::Halves;

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
