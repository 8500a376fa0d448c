//! Half types in 8 lanes of f32. Why the intrinsics may be called, see the module above.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::*;
use crate::simd::halves::{Halves, padded};

/// At most 8 words, then zeros.
#[inline(always)]
fn load(src: &[u16]) -> __m128i {
    let (at, len) = (src.as_ptr(), src.len());
    // SAFETY: the CPU, and only elements of `src` are read: four at the front, then two, then one, as many as there are.
    unsafe {
        if len >= 8 {
            return _mm_loadu_si128(at.cast());
        }
        let mut rest = 0;
        if len & 2 != 0 {
            rest = u64::from(at.add(len & 4).cast::<u32>().read_unaligned());
        }
        if len & 1 != 0 {
            rest |= u64::from(*at.add(len - 1)) << (16 * (len & 2));
        }
        match len & 4 {
            0 => _mm_set_epi64x(0, rest as i64),
            _ => _mm_set_epi64x(rest as i64, at.cast::<i64>().read_unaligned()),
        }
    }
}

/// Writes as many words as `dst` has room for.
#[inline(always)]
fn store(words: __m128i, dst: &mut [u16]) {
    let (at, len) = (dst.as_mut_ptr(), dst.len());
    // SAFETY: the CPU, and only elements of `dst` are written: four at the front, then two, then one, as many as there are.
    unsafe {
        if len >= 8 {
            return _mm_storeu_si128(at.cast(), words);
        }
        let mut rest = _mm_cvtsi128_si64(words);
        if len & 4 != 0 {
            at.cast::<i64>().write_unaligned(rest);
            rest = _mm_extract_epi64::<1>(words);
        }
        if len & 2 != 0 {
            at.add(len & 4).cast::<u32>().write_unaligned(rest as u32);
            rest >>= 32;
        }
        if len & 1 != 0 {
            at.add(len - 1).write(rest as u16);
        }
    }
}

/// Each word in the upper half of a lane.
#[inline(always)]
fn raise(words: __m128i) -> __m256i {
    // SAFETY: the CPU.
    unsafe { _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words)) }
}

impl F32x8 {
    #[inline(always)]
    fn of_bits(bits: __m256i) -> F32x8 {
        // SAFETY: the CPU.
        unsafe { F32x8(_mm256_castsi256_ps(bits)) }
    }

    /// The nearest bf16 in the upper halves; anything in the lower ones.
    #[inline(always)]
    fn rounded(self) -> __m256i {
        // SAFETY: the CPU.
        unsafe {
            let bits = self.bits();
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let rounded = F32x8::of_bits(_mm256_add_epi32(bits, half));
            F32x8::select(self.is_nan(), F32x8::of_bits(quiet), rounded).bits()
        }
    }
}

impl Halves for F32x8 {
    #[inline(always)]
    fn load_bf16(src: &[bf16]) -> Self {
        Self::of_bits(raise(load(src.reinterpret_cast())))
    }

    #[inline(always)]
    fn store_bf16(self, dst: &mut [bf16]) {
        // SAFETY: the CPU. The words fit 16 bits, so that packing does not saturate.
        let words = unsafe {
            let words = _mm256_srli_epi32::<16>(self.rounded());
            _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words))
        };
        store(words, dst.reinterpret_cast_mut());
    }

    #[inline(always)]
    fn round_bf16(self) -> Self {
        // SAFETY: the CPU.
        unsafe { Self::of_bits(_mm256_and_si256(self.rounded(), _mm256_set1_epi32(-1 << 16))) }
    }

    #[inline(always)]
    fn load_f16(src: &[f16]) -> Self {
        // SAFETY: the CPU.
        unsafe { F32x8(_mm256_cvtph_ps(load(src.reinterpret_cast()))) }
    }

    #[inline(always)]
    fn store_f16(self, dst: &mut [f16]) {
        // SAFETY: the CPU.
        let words = unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) };
        store(words, dst.reinterpret_cast_mut());
    }

    #[inline(always)]
    fn round_f16(self) -> Self {
        // SAFETY: the CPU.
        unsafe { F32x8(_mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))) }
    }

    #[inline(always)]
    fn load_pairs_of(first: &[bf16], next: &[bf16]) -> Self {
        let upper = raise(load(first.reinterpret_cast()));
        // SAFETY: the CPU.
        unsafe {
            let lower = _mm256_cvtepu16_epi32(load(next.reinterpret_cast()));
            Self::of_bits(_mm256_or_si256(upper, lower))
        }
    }

    #[inline(always)]
    fn load_pairs(src: &[bf16], beyond: bf16) -> Self {
        let words: [bf16; 16];
        let src = if src.len() >= 16 {
            src
        } else {
            words = padded(src, beyond);
            &words
        };
        // SAFETY: the CPU, and `src` has 16 elements.
        unsafe {
            let pairs = _mm256_loadu_si256(src.as_ptr().cast());
            let exchanged = _mm256_or_si256(_mm256_slli_epi32::<16>(pairs), _mm256_srli_epi32::<16>(pairs));
            Self::of_bits(exchanged)
        }
    }
}
