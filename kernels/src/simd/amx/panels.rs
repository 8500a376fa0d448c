//! Products of a few lines by pairs that lie in panels, which are read from memory once: of one line by vectors, which are faster there
//! (`benches/NOTES.md`) and add in the tiles' order; of more by tiles.

#![allow(unsafe_code)]

use std::arch::asm;

use super::{BLOCK, STEPS, Tiles};

/// Panels that are read together at most: by [`multiply_one`], and by [`Tiles::multiply_panels`].
pub(crate) const PANELS_OF_ONE: usize = 4;
pub(crate) const PANELS_OF_FEW: usize = 3;
/// How many bytes ahead panels are prefetched into the second-level cache: by vectors, and by tiles.
const AHEAD_BYTES: usize = 3 << 10;
const TILES_AHEAD_BYTES: usize = 5 << 10;
/// A value of the register MXCSR: subnormal operands count as zero and subnormal results become zero, without exceptions.
const FLUSHING: u32 = 0x9FC0;

/// [`BLOCK`] pairs, or sums, in each of several panels, so many elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Apart<P> {
    pub(crate) first: P,
    pub(crate) apart: usize,
}

/// The sums of products of one line by the pairs of N panels, [`PANELS_OF_ONE`] at most, over `count` times [`STEPS`] steps, begun at zero. The line is
/// widened. The bits are those of [`Tiles::multiply`].
///
/// # Safety
///
/// The CPU has AVX-512. The line and the pairs of these steps are valid to read, and the sums to write, and no other thread's. `count` is not 0.
#[inline]
pub(crate) unsafe fn multiply_one<const N: usize>(
    line: *const f32,
    panels: Apart<*const f32>,
    count: usize,
    sums: Apart<*mut f32>,
) {
    const { assert!(N >= 1 && N <= PANELS_OF_ONE, "sums of a panel take six of 24 registers") };
    const { assert!(STEPS == 32 && BLOCK == 32, "what the assembly counts on") };
    let mut mxcsr = [0, FLUSHING];
    // SAFETY: the caller's; MXCSR is what it was before.
    unsafe {
        asm!(
            // A pair of 16 columns: the even step goes to one sum, the odd one to another.
            ".macro phalanx_pairs even, odd, at",
            "vmovdqu32 zmm24, [\\at]",
            "prefetcht1 [\\at + {ahead}]",
            "vpslld zmm25, zmm24, 16",
            "vpandd zmm24, zmm24, zmm26",
            "vfmadd231ps \\even, zmm25, zmm27",
            "vfmadd231ps \\odd, zmm24, zmm28",
            ".endm",
            // Both chains of a block of steps are added up.
            ".macro phalanx_add sum, even, odd",
            "vaddps \\even, \\even, \\odd",
            "vaddps \\sum, \\sum, \\even",
            ".endm",
            "stmxcsr [{mxcsr}]",
            "ldmxcsr [{mxcsr} + 4]",
            "vpternlogd zmm26, zmm26, zmm26, 255",
            "vpslld zmm26, zmm26, 16",
            "lea {third}, [{apart} + 2 * {apart}]",
            ".irp nth, 0, 1, 2, 3, 4, 5, 6, 7",
            "vpxord zmm\\nth, zmm\\nth, zmm\\nth",
            ".endr",
            "2:",
            ".irp nth, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23",
            "vpxord zmm\\nth, zmm\\nth, zmm\\nth",
            ".endr",
            "mov {pairs:e}, 16",
            "3:",
            "vbroadcastss zmm27, [{line}]",
            "vbroadcastss zmm28, [{line} + 4]",
            "phalanx_pairs zmm8, zmm16, {first}",
            "phalanx_pairs zmm9, zmm17, {first} + 64",
            ".if {panels} > 1",
            "phalanx_pairs zmm10, zmm18, {first} + {apart}",
            "phalanx_pairs zmm11, zmm19, {first} + {apart} + 64",
            ".endif",
            ".if {panels} > 2",
            "phalanx_pairs zmm12, zmm20, {first} + 2 * {apart}",
            "phalanx_pairs zmm13, zmm21, {first} + 2 * {apart} + 64",
            ".endif",
            ".if {panels} > 3",
            "phalanx_pairs zmm14, zmm22, {first} + {third}",
            "phalanx_pairs zmm15, zmm23, {first} + {third} + 64",
            ".endif",
            "add {line}, 8",
            "add {first}, 128",
            "dec {pairs:e}",
            "jnz 3b",
            "phalanx_add zmm0, zmm8, zmm16",
            "phalanx_add zmm1, zmm9, zmm17",
            "phalanx_add zmm2, zmm10, zmm18",
            "phalanx_add zmm3, zmm11, zmm19",
            "phalanx_add zmm4, zmm12, zmm20",
            "phalanx_add zmm5, zmm13, zmm21",
            "phalanx_add zmm6, zmm14, zmm22",
            "phalanx_add zmm7, zmm15, zmm23",
            "dec {count}",
            "jnz 2b",
            "ldmxcsr [{mxcsr}]",
            "vmovups [{sums}], zmm0",
            "vmovups [{sums} + 64], zmm1",
            ".if {panels} > 1",
            "vmovups [{sums} + {sums_apart}], zmm2",
            "vmovups [{sums} + {sums_apart} + 64], zmm3",
            ".endif",
            ".if {panels} > 2",
            "lea {sums}, [{sums} + 2 * {sums_apart}]",
            "vmovups [{sums}], zmm4",
            "vmovups [{sums} + 64], zmm5",
            ".endif",
            ".if {panels} > 3",
            "vmovups [{sums} + {sums_apart}], zmm6",
            "vmovups [{sums} + {sums_apart} + 64], zmm7",
            ".endif",
            ".purgem phalanx_pairs",
            ".purgem phalanx_add",
            line = inout(reg) line => _,
            first = inout(reg) panels.first => _,
            apart = in(reg) size_of::<f32>() * panels.apart,
            third = out(reg) _,
            count = inout(reg) count => _,
            pairs = out(reg) _,
            mxcsr = in(reg) mxcsr.as_mut_ptr(),
            sums = inout(reg) sums.first => _,
            sums_apart = in(reg) size_of::<f32>() * sums.apart,
            ahead = const AHEAD_BYTES,
            panels = const N,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
            out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
            out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _,
            options(nostack),
        );
    }
}

impl Tiles {
    /// The sums of products of these lines, `stride` bytes apart, by the pairs of N panels, [`PANELS_OF_FEW`] at most, over `count` times [`STEPS`] steps,
    /// begun at zero. A line's sums lie `sums_row` elements after those of the line before.
    ///
    /// # Safety
    ///
    /// They are [`Tiles::of_lines`]. The lines and pairs of these steps are valid to read, and the sums to write, and no other thread's. `count` is not 0.
    #[inline]
    pub(crate) unsafe fn multiply_panels<const N: usize>(
        &mut self,
        (line, stride): (*const u8, usize),
        panels: Apart<*const f32>,
        count: usize,
        (sums, sums_row): (Apart<*mut f32>, usize),
    ) {
        const { assert!(N >= 1 && N <= PANELS_OF_FEW, "sums of a panel take two of eight tiles") };
        let panel = |nth: usize| panels.first.wrapping_add(nth * panels.apart);
        // SAFETY: the caller's; a value of this type means that the tiles are configured.
        unsafe {
            asm!(
                // Adds the products of one tile of pairs, and prefetches as many bytes.
                ".macro phalanx_half sums, panel, half",
                "tileloadd tmm7, [\\panel + {place} + 64 * \\half]",
                "tdpbf16ps \\sums, tmm6, tmm7",
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                "prefetcht1 [\\panel + {ahead} + 1024 * \\half + \\line]",
                ".endr",
                ".endm",
                ".irp nth, 0, 1, 2, 3, 4, 5",
                "tilezero tmm\\nth",
                ".endr",
                "2:",
                "tileloadd tmm6, [{line} + {stride}]",
                "phalanx_half tmm0, {first}, 0",
                "phalanx_half tmm1, {first}, 1",
                ".if {panels} > 1",
                "phalanx_half tmm2, {second}, 0",
                "phalanx_half tmm3, {second}, 1",
                ".endif",
                ".if {panels} > 2",
                "phalanx_half tmm4, {third}, 0",
                "phalanx_half tmm5, {third}, 1",
                ".endif",
                "add {line}, 64",
                "add {first}, 2048",
                "add {second}, 2048",
                "add {third}, 2048",
                "dec {count}",
                "jnz 2b",
                "tilestored [{sums} + {row}], tmm0",
                "tilestored [{sums} + {row} + 64], tmm1",
                ".if {panels} > 1",
                "add {sums}, {sums_apart}",
                "tilestored [{sums} + {row}], tmm2",
                "tilestored [{sums} + {row} + 64], tmm3",
                ".endif",
                ".if {panels} > 2",
                "add {sums}, {sums_apart}",
                "tilestored [{sums} + {row}], tmm4",
                "tilestored [{sums} + {row} + 64], tmm5",
                ".endif",
                ".purgem phalanx_half",
                line = inout(reg) line => _,
                stride = in(reg) stride,
                first = inout(reg) panel(0) => _,
                second = inout(reg) panel(1) => _,
                third = inout(reg) panel(2) => _,
                place = in(reg) size_of::<f32>() * BLOCK,
                count = inout(reg) count => _,
                sums = inout(reg) sums.first => _,
                sums_apart = in(reg) size_of::<f32>() * sums.apart,
                row = in(reg) size_of::<f32>() * sums_row,
                ahead = const TILES_AHEAD_BYTES,
                panels = const N,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
