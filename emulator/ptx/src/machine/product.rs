//! Products of matrices that a warp holds in registers.
//!
//! Whole registers are converted at a time and eight columns summed side by side, so that compilers find vectors in it.
//!
//! An element of the result is the sum of its products and the addend, in f64 and rounded once; hardware sums in an order of its own
//! and rounds in between, so it may differ in the last bits.

use super::Machine;
use super::warp::Warp;
use crate::code::{Element, Product};
use crate::lanes::round::{self, Mode, round};
use crate::lanes::{LANES, Lanes};

impl Element {
    /// The value of an element's bits.
    #[inline(always)]
    pub(crate) fn value(self, bits: u32) -> f64 {
        match self {
            Element::F16 => round::f16(bits as u16) as f64,
            Element::Bf16 => round::bf16(bits as u16) as f64,
            // The hardware does not look at the lower bits.
            Element::Tf32 => f32::from_bits(bits & 0xffff_e000) as f64,
            Element::F32 => f32::from_bits(bits) as f64,
            Element::S8 => bits as u8 as i8 as f64,
            Element::U8 => bits as u8 as f64,
            Element::S32 => bits as i32 as f64,
            Element::E4m3 => crate::lanes::packed::f8(bits as u8, false),
            Element::E5m2 => crate::lanes::packed::f8(bits as u8, true),
        }
    }

    /// The values of element `e` of a register, of all lanes.
    pub(crate) fn values(self, register: &Lanes, e: usize) -> [f64; LANES] {
        let shift = e as u32 * self.bits();
        macro_rules! each {
            ($($kind:ident)*) => {
                match self {
                    $(Element::$kind => std::array::from_fn(|l| Element::$kind.value((register[l] >> shift) as u32)),)*
                }
            };
        }
        each!(F16 Bf16 Tf32 F32 S8 U8 S32 E4m3 E5m2)
    }

    /// The bits of a sum.
    #[inline(always)]
    pub(crate) fn rounded(self, sum: f64) -> u32 {
        match self {
            Element::F16 => round::f16_bits(round(sum, Mode::Nearest, round::F16)) as u32,
            // Sums of whole numbers of 8 bits are exact, and wrap.
            Element::S32 => sum as i64 as u32,
            _ if sum.is_nan() => crate::lanes::float::NAN,
            _ => (sum as f32).to_bits(),
        }
    }
}

/// 16 rows of up to 32 elements.
pub(crate) type Rows = [[f64; 32]; 16];

/// Up to 32 rows of 8 columns.
pub(crate) type Columns = [[f64; 8]; 32];

/// A fragment of A (16 rows) as rows: register `r` of a lane holds elements of row `lane / 4 + 8 (r % 2)`, those of columns that the
/// lane's place in its group of four and `r / 2` say.
pub(crate) fn rows<'r>(kind: Element, registers: impl Iterator<Item = &'r Lanes>) -> Rows {
    let each = 32 / kind.bits() as usize;
    let mut rows = [[0.0; 32]; 16];
    for (r, register) in registers.enumerate() {
        for e in 0..each {
            for (lane, value) in kind.values(register, e).into_iter().enumerate() {
                rows[lane / 4 + 8 * (r % 2)][lane % 4 * each + e + r / 2 * 4 * each] = value;
            }
        }
    }
    rows
}

/// A's rows times B's columns, over the first `k` elements: each sum in four chains.
pub(crate) fn tile(a: &Rows, b: &Columns, k: usize) -> [[f64; 8]; 16] {
    let k = k.min(32);
    let mut sums = [[0.0; 8]; 16];
    for (a, sums) in a.iter().zip(&mut sums) {
        let mut chains = [[0.0; 8]; 4];
        for (i, chain) in chains.iter_mut().enumerate() {
            for at in (i..k).step_by(4) {
                for (sum, b) in chain.iter_mut().zip(&b[at]) {
                    *sum += a[at] * b;
                }
            }
        }
        for (column, sum) in sums.iter_mut().enumerate() {
            *sum = (chains[0][column] + chains[1][column]) + (chains[2][column] + chains[3][column]);
        }
    }
    sums
}

/// Four elements of C or D of each lane: element `e` is in row `lane / 4 + 8 (e / 2)` and column `2 (lane % 4) + e % 2` of a tile.
pub(crate) type Quads = [[f64; LANES]; 4];

/// The elements that registers hold.
pub(crate) fn quads<'r>(kind: Element, registers: impl Iterator<Item = &'r Lanes>) -> Quads {
    let per = 32 / kind.bits() as usize;
    let mut quads = [[0.0; LANES]; 4];
    for (r, register) in registers.enumerate() {
        for part in 0..per {
            quads[r * per + part] = kind.values(register, part);
        }
    }
    quads
}

/// Adds a tile.
pub(crate) fn add(quads: &mut Quads, sign: f64, tile: &[[f64; 8]; 16]) {
    for (e, quad) in quads.iter_mut().enumerate() {
        for (lane, sum) in quad.iter_mut().enumerate() {
            *sum += sign * tile[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
        }
    }
}

/// Register `r` of those that hold the rounded elements.
pub(crate) fn register(kind: Element, r: usize, quads: &Quads) -> Lanes {
    let per = 32 / kind.bits() as usize;
    let mut values = [0; LANES];
    for part in 0..per {
        for (value, &sum) in values.iter_mut().zip(&quads[r * per + part]) {
            *value |= (kind.rounded(sum) as u64) << (part as u32 * kind.bits());
        }
    }
    values
}

impl Machine<'_> {
    pub(crate) fn product(&mut self, warp: &mut Warp, p: Product) {
        let count = (p.k * p.a_kind.bits() / 64) as usize;
        let list = |start: u32, n: usize| &self.program.lists[start as usize..][..n];
        let a = rows(p.a_kind, list(p.a, count).iter().map(|&reg| warp.get(reg)));
        // B's columns: register `r` of a lane holds elements of column `lane / 4`.
        let each = 32 / p.b_kind.bits() as usize;
        let mut b = [[0.0; 8]; 32];
        for (r, &reg) in list(p.b, count / 2).iter().enumerate() {
            for e in 0..each {
                for (lane, value) in p.b_kind.values(warp.get(reg), e).into_iter().enumerate() {
                    b[lane % 4 * each + e + r * 4 * each][lane / 4] = value;
                }
            }
        }
        let c = list(p.c, 4 * p.c_kind.bits() as usize / 32);
        let mut sums = quads(p.c_kind, c.iter().map(|&reg| warp.get(reg)));
        add(&mut sums, 1.0, &tile(&a, &b, p.k as usize));
        for (r, &reg) in list(p.d, 4 * p.d_kind.bits() as usize / 32).iter().enumerate() {
            warp.set(reg, u32::MAX, &register(p.d_kind, r, &sums));
        }
    }
}
