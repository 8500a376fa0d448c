//! AVX2 with FMA and F16C: 8 lanes of f32, 4 of f64.
//!
//! Why the intrinsics may be called: the types' fields are private and [`Avx2`] cannot be named outside `simd`, so
//! the vectors exist only inside a kernel that `dispatch` runs, after it saw that the CPU has the features. Each
//! `SAFETY` note below that says "the CPU" means this.

#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::halves::{Halves, padded};
use super::vector::{Isa, Mask, PARTS_MAX, Vector};

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

impl Isa for Avx2 {
    type F32 = F32x8;
    type F64 = F64x4;
    const REGISTERS: usize = 16;

    #[inline(always)]
    fn in_f64(from: &[f32], fill: f64) -> F64x4 {
        if from.len() >= F64x4::LANES {
            // SAFETY: the CPU, and there are four elements.
            return unsafe { F64x4(_mm256_cvtps_pd(_mm_loadu_ps(from.as_ptr()))) };
        }
        let mut lanes = [fill; F64x4::LANES];
        lanes.iter_mut().zip(from).for_each(|(lane, &x)| *lane = f64::from(x));
        F64x4::load(&lanes)
    }
}

macro_rules! vector {
    (
        $name:ident: $elem:ident x $lanes:literal in $reg:ident,
        $mask:ident, $int:ident, mantissa $mantissa_bits:literal, bias $bias:literal,
        $set1:ident $set1_int:ident $loadu:ident $maskload:ident $storeu:ident $maskstore:ident
        $add:ident $sub:ident $mul:ident $div:ident $fmadd:ident $sqrt:ident $min:ident $max:ident
        $floor:ident $round:ident $cmp:ident $blend:ident $movemask:ident $and:ident $or:ident $xor:ident $andnot:ident
        $unpacklo:ident $unpackhi:ident $permute:ident
        $to_int:ident $from_int:ident $add_int:ident $eq_int:ident $shl:ident $shr:ident
    ) => {
        /// A 256-bit register.
        #[derive(Clone, Copy)]
        pub(crate) struct $name($reg);

        /// All ones or all zeros in each lane.
        #[derive(Clone, Copy)]
        pub(crate) struct $mask($reg);

        impl Mask for $mask {
            #[inline(always)]
            fn any(self) -> bool {
                // SAFETY: the CPU.
                unsafe { $movemask(self.0) != 0 }
            }

            #[inline(always)]
            fn all(self) -> bool {
                // SAFETY: the CPU.
                unsafe { $movemask(self.0) == (1 << $lanes) - 1 }
            }
        }

        vector!(@operator $mask BitAnd bitand $and);
        vector!(@operator $mask BitOr bitor $or);

        impl Not for $mask {
            type Output = Self;

            #[inline(always)]
            fn not(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $mask($xor(self.0, $from_int($set1_int(-1)))) }
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
                unsafe { $name($xor(self.0, $set1(-0.0))) }
            }
        }

        impl $name {
            /// All ones in the first `len` lanes.
            #[inline(always)]
            fn first(len: usize) -> __m256i {
                // Lane i is on where i < len, read from a run of ones before a run of zeros.
                const ONES_THEN_ZEROS: [$int; 2 * $lanes] = {
                    let mut run = [0; 2 * $lanes];
                    let mut i = 0;
                    while i < $lanes {
                        run[i] = -1;
                        i += 1;
                    }
                    run
                };
                let start = $lanes - if len > $lanes { $lanes } else { len };
                // SAFETY: the CPU; `start` is at most LANES, so the 32 bytes read lie within the table.
                unsafe { _mm256_loadu_si256(ONES_THEN_ZEROS.as_ptr().add(start).cast()) }
            }

            /// All ones where bit i of `lanes` is set.
            #[inline(always)]
            fn named(lanes: u32) -> __m256i {
                const BITS: [$int; $lanes] = {
                    let mut bits = [1; $lanes];
                    let mut i = 0;
                    while i < $lanes {
                        bits[i] <<= i;
                        i += 1;
                    }
                    bits
                };
                // SAFETY: the CPU; the table has 32 bytes.
                unsafe {
                    let bits = _mm256_loadu_si256(BITS.as_ptr().cast());
                    $eq_int(_mm256_and_si256($set1_int(lanes as $int), bits), bits)
                }
            }

            /// The bits as integers.
            #[inline(always)]
            fn bits(self) -> __m256i {
                // SAFETY: the CPU.
                unsafe { $to_int(self.0) }
            }

            /// A small integer held in `x` plus 1.5 * 2^mantissa has its two's complement in the low bits.
            #[inline(always)]
            fn integer_bias() -> Self {
                Self::splat(((3 as $int) << ($mantissa_bits - 1)) as $elem)
            }

            /// `2^self` for an integral lane with a normal result.
            #[inline(always)]
            fn power(self) -> Self {
                let n = self + Self::integer_bias();
                // SAFETY: the CPU.
                unsafe {
                    $name($from_int($shl::<$mantissa_bits>($add_int(n.bits(), $set1_int($bias)))))
                }
            }
        }

        impl Vector for $name {
            type Elem = $elem;
            type Mask = $mask;
            const LANES: usize = $lanes;

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
                let first = Self::first(src.len());
                // SAFETY: the CPU, and only the first `src.len()` lanes are read.
                unsafe { $name($blend($set1(fill), $maskload(src.as_ptr(), first), $from_int(first))) }
            }

            #[inline(always)]
            unsafe fn load_where(src: *const $elem, lanes: u32) -> Self {
                // SAFETY: the CPU, and only the lanes named are read, which the caller vouches for.
                unsafe { $name($maskload(src, Self::named(lanes))) }
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
                unsafe { $maskstore(dst.as_mut_ptr(), Self::first(dst.len()), self.0) }
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
                // SAFETY: the CPU.
                unsafe { $name($andnot($set1(-0.0), self.0)) }
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
                unsafe { $name($round::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(self.0)) }
            }

            #[inline(always)]
            fn round_even(self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($round::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                // SAFETY: the CPU.
                unsafe { $name($or(self.abs().0, $and($set1(-0.0), sign.0))) }
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
                unsafe { $name($blend(if_false.0, if_true.0, mask.0)) }
            }

            #[inline(always)]
            fn scale_by_power(self, n: Self) -> Self {
                // Two steps, of which only the second can leave the normal range and round.
                let half = (n * Self::splat(0.5)).floor();
                self * half.power() * (n - half).power()
            }

            #[inline(always)]
            fn split(self) -> (Self, Self) {
                // A subnormal is lifted into the normal range first.
                let lift = ($mantissa_bits + 1) as $elem;
                let tiny = self.lt(Self::splat($elem::MIN_POSITIVE));
                let x = Self::select(tiny, self * Self::splat((1u64 << ($mantissa_bits + 1)) as $elem), self);
                let one = Self::splat(1.0);
                // SAFETY: the CPU.
                unsafe {
                    // The biased exponent in the low bits of 1.5 * 2^mantissa, to read it as a float.
                    let biased = $shr::<$mantissa_bits>(x.bits());
                    let exponent = $name($from_int($add_int(biased, Self::integer_bias().bits())));
                    let exponent = exponent - Self::integer_bias() - Self::splat($bias as $elem);
                    let exponent = Self::select(tiny, exponent - Self::splat(lift), exponent);
                    let fraction = $set1_int(((1 as $int) << $mantissa_bits) - 1);
                    let mantissa = _mm256_or_si256(_mm256_and_si256(x.bits(), fraction), one.bits());
                    ($name($from_int(mantissa)), exponent)
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
                const BYTES: i32 = 16 - size_of::<$elem>() as i32;
                // SAFETY: the CPU. Each half is moved on and takes in the last lane of the other.
                unsafe {
                    let lanes = $to_int(self.0);
                    let other = _mm256_permute2x128_si256::<1>(lanes, lanes);
                    $name($from_int(_mm256_alignr_epi8::<BYTES>(lanes, other)))
                }
            }

            const PARTS: usize = 2;

            #[inline(always)]
            fn zip_parts(self, b: Self) -> (Self, Self) {
                // SAFETY: the CPU.
                unsafe { ($name($unpacklo(self.0, b.0)), $name($unpackhi(self.0, b.0))) }
            }

            #[inline(always)]
            fn transpose_parts([a, b, ..]: [Self; PARTS_MAX]) -> [Self; PARTS_MAX] {
                // SAFETY: the CPU.
                unsafe { [$name($permute::<0x20>(a.0, b.0)), $name($permute::<0x31>(a.0, b.0)), a, b] }
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
    F32x8: f32 x 8 in __m256,
    Mask32x8, i32, mantissa 23, bias 127,
    _mm256_set1_ps _mm256_set1_epi32 _mm256_loadu_ps _mm256_maskload_ps _mm256_storeu_ps _mm256_maskstore_ps
    _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_div_ps _mm256_fmadd_ps _mm256_sqrt_ps _mm256_min_ps _mm256_max_ps
    _mm256_floor_ps _mm256_round_ps _mm256_cmp_ps _mm256_blendv_ps _mm256_movemask_ps
    _mm256_and_ps _mm256_or_ps _mm256_xor_ps _mm256_andnot_ps
    _mm256_unpacklo_ps _mm256_unpackhi_ps _mm256_permute2f128_ps
    _mm256_castps_si256 _mm256_castsi256_ps _mm256_add_epi32 _mm256_cmpeq_epi32 _mm256_slli_epi32 _mm256_srli_epi32
);

vector!(
    F64x4: f64 x 4 in __m256d,
    Mask64x4, i64, mantissa 52, bias 1023,
    _mm256_set1_pd _mm256_set1_epi64x _mm256_loadu_pd _mm256_maskload_pd _mm256_storeu_pd _mm256_maskstore_pd
    _mm256_add_pd _mm256_sub_pd _mm256_mul_pd _mm256_div_pd _mm256_fmadd_pd _mm256_sqrt_pd _mm256_min_pd _mm256_max_pd
    _mm256_floor_pd _mm256_round_pd _mm256_cmp_pd _mm256_blendv_pd _mm256_movemask_pd
    _mm256_and_pd _mm256_or_pd _mm256_xor_pd _mm256_andnot_pd
    _mm256_unpacklo_pd _mm256_unpackhi_pd _mm256_permute2f128_pd
    _mm256_castpd_si256 _mm256_castsi256_pd _mm256_add_epi64 _mm256_cmpeq_epi64 _mm256_slli_epi64 _mm256_srli_epi64
);

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
    const SPLITS_NEIGHBOURS: bool = true;

    #[inline(always)]
    fn load_neighbours([a, b, ..]: [&[bf16]; PARTS_MAX]) -> [Self; PARTS_MAX] {
        assert!(a.len() >= 16 && b.len() >= 16, "two elements for each lane");
        let (a, b): (*const f32, *const f32) = (a.as_ptr().cast(), b.as_ptr().cast());
        // SAFETY: the CPU, and there are 16 elements. A part that is put into a register on its way from memory needs no permutation.
        let [low, high] = unsafe {
            let low = _mm256_castps128_ps256(_mm_loadu_ps(a));
            let high = _mm256_castps128_ps256(_mm_loadu_ps(a.add(4)));
            [
                F32x8(_mm256_insertf128_ps::<1>(low, _mm_loadu_ps(b))),
                F32x8(_mm256_insertf128_ps::<1>(high, _mm_loadu_ps(b.add(4)))),
            ]
        };
        [low, high, low, high]
    }

    #[inline(always)]
    fn split_neighbours(self) -> [Self; 2] {
        // SAFETY: the CPU.
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            let upper = _mm256_and_si256(bits, _mm256_set1_epi32(-1 << 16));
            [Self::of_bits(_mm256_slli_epi32::<16>(bits)), Self::of_bits(upper)]
        }
    }

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
    fn load_twos(src: &[bf16]) -> Self {
        assert!(src.len() >= 16, "two elements for each lane");
        // SAFETY: the CPU, and there are 16 elements.
        unsafe { F32x8(_mm256_loadu_ps(src.as_ptr().cast())) }
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
