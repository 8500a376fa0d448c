//! AMX: products of bf16 in tiles of 16 rows of 64 bytes, which live in eight registers that only assembly names.
//!
//! `TDPBF16PS` adds to a tile of 16 x 16 sums the products of 32 steps: those of even steps are one chain of fused multiply-adds begun at zero,
//! those of odd steps another, and both chains' sum is added to what the tile held. Subnormal inputs count as zero and subnormal results
//! become zero. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (`TDPBF16PS`), and volume 1, chapter 18.

#![allow(unsafe_code)]

mod panels;

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

pub(crate) use panels::{Apart, PANELS_OF_FEW, PANELS_OF_ONE, multiply_one};

/// Lines of a tile.
pub(crate) const LINES: usize = 16;
/// Steps that a tile has of each line.
pub(crate) const STEPS: usize = 32;
/// Lines of [`Tiles::multiply`], and pairs at most: two tiles of them.
pub(crate) const BLOCK: usize = 2 * LINES;
/// How far ahead of itself a line is prefetched.
const AHEAD_BYTES: usize = 256;

/// Whether this CPU has tiles of bf16, and the system lets this process use them.
pub(super) fn is_usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        let features = __cpuid_count(7, 0).edx;
        let has = |bit: u32| features >> bit & 1 == 1;
        has(BF16_BIT) && has(TILE_BIT) && is_saved() && is_permitted()
    })
}

const BF16_BIT: u32 = 22;
const TILE_BIT: u32 = 24;

/// Whether the system saves tiles where it switches threads (XCR0's bits 17 and 18). A CPU with AVX-512 in use has the instruction.
fn is_saved() -> bool {
    let low: u32;
    // SAFETY: it reads a register.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags))
    };
    low >> 17 & 3 == 3
}

/// Asks Linux for tiles, which it gives to processes that ask: all threads, those of later too.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: this call changes what the process may do, and nothing in its memory.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// What a thread's tiles are. Intel's layout of the operand of `LDTILECFG`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// All eight have 16 rows, of 64 bytes where they hold lines. Those of pairs and of sums have as many elements as there are pairs.
    fn of(pairs: usize) -> Configuration {
        let bytes = |pairs: usize| (size_of::<f32>() * pairs) as u16;
        let (first, second) = (bytes(pairs.min(LINES)), bytes(pairs.saturating_sub(LINES).max(1)));
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        configuration.row_bytes[..8].copy_from_slice(&[first, second, first, second, 64, 64, first, second]);
        configuration
    }

    /// So many lines and rows of sums; the last tile has 16 rows of pairs.
    fn of_lines(lines: usize) -> Configuration {
        let mut configuration = Configuration::of(BLOCK);
        configuration.rows[..7].fill(lines as u8);
        configuration
    }
}

/// This thread's tiles, from here until the value is dropped.
pub(crate) struct Tiles {
    /// How many pairs stand side by side.
    pairs: usize,
    of_thread: PhantomData<*const ()>,
}

/// [`BLOCK`] lines whose steps are neighbours, in two tiles.
#[derive(Clone, Copy)]
pub(crate) struct Lines {
    pub(crate) first: *const u8,
    /// Line [`LINES`].
    pub(crate) second: *const u8,
    /// Bytes from a line to the next.
    pub(crate) stride: usize,
    /// Bytes from the first [`STEPS`] to the next ones.
    pub(crate) next: usize,
}

impl Lines {
    /// The same so many bytes on.
    pub(crate) fn skip(self, bytes: usize) -> Lines {
        let [first, second] = [self.first, self.second].map(|line| line.wrapping_add(bytes));
        Lines { first, second, ..self }
    }
}

/// Sums of a block of lines by a block of pairs.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    pub(crate) first: *mut f32,
    /// Elements from a row to the next.
    pub(crate) row: usize,
}

impl Tiles {
    /// Tiles for so many pairs side by side: 1 to [`BLOCK`] of them.
    ///
    /// # Safety
    ///
    /// [`is_usable`] was seen to hold, and this thread has no other value.
    pub(crate) unsafe fn new(pairs: usize) -> Tiles {
        debug_assert!((1..=BLOCK).contains(&pairs), "pairs of two tiles");
        // SAFETY: the caller's.
        unsafe { Tiles::configured(&Configuration::of(pairs), pairs) }
    }

    /// Tiles for [`Tiles::multiply_panels`] of so many lines: 1 to [`LINES`].
    ///
    /// # Safety
    ///
    /// [`Tiles::new`]'s.
    pub(crate) unsafe fn of_lines(lines: usize) -> Tiles {
        debug_assert!((1..=LINES).contains(&lines), "lines of a tile");
        // SAFETY: the caller's.
        unsafe { Tiles::configured(&Configuration::of_lines(lines), BLOCK) }
    }

    /// # Safety
    ///
    /// [`Tiles::new`]'s.
    unsafe fn configured(configuration: &Configuration, pairs: usize) -> Tiles {
        // SAFETY: the caller's; the operand is a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) configuration, options(nostack, readonly)) };
        Tiles { pairs, of_thread: PhantomData }
    }

    /// The sums of products of [`BLOCK`] lines by all pairs over `count` times [`STEPS`] steps: begun at zero, or going on from what `sums` holds.
    /// `pairs` has the other operand's lines side by side: for each two steps their pairs. With `AHEAD`, what [`BLOCK`] evenly spaced lines
    /// have [`AHEAD_BYTES`] later is prefetched meanwhile.
    ///
    /// # Safety
    ///
    /// All lines and pairs of these steps are valid to read, and the sums to read and write, and no other thread's. `count` is not 0.
    #[inline]
    pub(crate) unsafe fn multiply<const AHEAD: bool>(
        &mut self,
        lines: Lines,
        pairs: *const f32,
        count: usize,
        sums: Sums,
        goes_on: bool,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match self.pairs > LINES {
                true => self.multiply_by::<AHEAD, 0, true>(lines, pairs, count, sums, goes_on, pairs.cast()),
                false => {
                    self.multiply_by::<AHEAD, 0, false>(lines, pairs, count, sums, goes_on, pairs.cast())
                }
            }
        }
    }

    /// [`Tiles::multiply`] by [`BLOCK`] pairs, which prefetches meanwhile what lies at `ahead`, so many lines for each [`STEPS`] steps, into the
    /// second-level cache.
    ///
    /// # Safety
    ///
    /// [`Tiles::multiply`]'s.
    #[inline]
    pub(crate) unsafe fn multiply_ahead<const LINES_AHEAD: usize>(
        &mut self,
        lines: Lines,
        pairs: *const f32,
        count: usize,
        sums: Sums,
        goes_on: bool,
        ahead: *const u8,
    ) {
        debug_assert_eq!(self.pairs, BLOCK, "two tiles of pairs");
        // SAFETY: the caller's.
        unsafe { self.multiply_by::<false, LINES_AHEAD, true>(lines, pairs, count, sums, goes_on, ahead) }
    }

    /// [`Tiles::multiply`] and [`Tiles::multiply_ahead`], by one tile of pairs, or by two.
    #[inline]
    unsafe fn multiply_by<const AHEAD: bool, const LINES_AHEAD: usize, const TWO: bool>(
        &mut self,
        lines: Lines,
        pairs: *const f32,
        count: usize,
        sums: Sums,
        goes_on: bool,
        ahead: *const u8,
    ) {
        // SAFETY: the caller's; a value of this type means that the tiles are configured.
        unsafe {
            asm!(
                "test {ahead:e}, {ahead:e}",
                "jnz 3f",
                "tilezero tmm0",
                "tilezero tmm2",
                ".if {two}",
                "tilezero tmm1",
                "tilezero tmm3",
                ".endif",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{upper} + {row}]",
                "tileloadd tmm2, [{lower} + {row}]",
                ".if {two}",
                "tileloadd tmm1, [{upper} + {row} + 64]",
                "tileloadd tmm3, [{lower} + {row} + 64]",
                ".endif",
                "2:",
                "tileloadd tmm4, [{first} + {stride}]",
                "tileloadd tmm6, [{pairs} + {place}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                ".if {two}",
                "tileloadd tmm7, [{pairs} + {place} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                ".endif",
                "tileloadd tmm5, [{second} + {stride}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                ".if {two}",
                "tdpbf16ps tmm3, tmm5, tmm7",
                ".endif",
                ".if {has_ahead}",
                "lea {ahead}, [{first} + {ahead_bytes}]",
                ".rept 16",
                "prefetcht0 [{ahead}]",
                "prefetcht0 [{ahead} + {stride}]",
                "lea {ahead}, [{ahead} + 2*{stride}]",
                ".endr",
                ".endif",
                ".if {lines_ahead}",
                ".rept {lines_ahead}",
                "prefetcht1 [{far}]",
                "add {far}, 64",
                ".endr",
                ".endif",
                "add {first}, {next}",
                "add {second}, {next}",
                "lea {pairs}, [{pairs} + 8*{place}]",
                "lea {pairs}, [{pairs} + 8*{place}]",
                "dec {count}",
                "jnz 2b",
                "tilestored [{upper} + {row}], tmm0",
                "tilestored [{lower} + {row}], tmm2",
                ".if {two}",
                "tilestored [{upper} + {row} + 64], tmm1",
                "tilestored [{lower} + {row} + 64], tmm3",
                ".endif",
                first = inout(reg) lines.first => _,
                second = inout(reg) lines.second => _,
                pairs = inout(reg) pairs => _,
                count = inout(reg) count => _,
                stride = in(reg) lines.stride,
                next = in(reg) lines.next,
                place = in(reg) size_of::<f32>() * self.pairs,
                upper = in(reg) sums.first,
                lower = in(reg) sums.first.wrapping_add(LINES * sums.row),
                row = in(reg) size_of::<f32>() * sums.row,
                ahead = inout(reg) usize::from(goes_on) => _,
                far = inout(reg) ahead => _,
                lines_ahead = const LINES_AHEAD,
                ahead_bytes = const AHEAD_BYTES,
                has_ahead = const AHEAD as u32,
                two = const TWO as u32,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Four products of tiles `rounds` times, between registers: for a measurement. Returns the floating-point operations done.
    pub(crate) fn multiply_registers(&mut self, rounds: usize) -> f64 {
        // SAFETY: the tiles are configured, and nothing but them is touched.
        unsafe {
            asm!(
                "tilezero tmm4",
                "tilezero tmm5",
                "tilezero tmm6",
                "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack),
            );
        }
        (rounds.max(1) * 2 * BLOCK * BLOCK * STEPS) as f64
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: it gives this thread's tiles back.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}
