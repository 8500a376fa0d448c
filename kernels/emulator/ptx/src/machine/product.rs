//! Products of matrices that a warp holds in registers.
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

/// Element `part` of a register of elements of a type.
#[inline(always)]
pub(crate) fn part(kind: Element, register: u64, part: usize) -> f64 {
    let bits = kind.bits();
    kind.value((register >> (part as u32 * bits)) as u32)
}

/// A fragment of A (16 rows) as rows: register `r` of a lane holds elements of row `lane / 4 + 8 (r % 2)`, those of columns that the
/// lane's place in its group of four and `r / 2` say.
pub(crate) fn rows<'r>(
    kind: Element,
    k: usize,
    registers: impl Iterator<Item = &'r Lanes>,
) -> [[f64; 32]; 16] {
    let each = 32 / kind.bits() as usize;
    let mut rows = [[0.0; 32]; 16];
    for (r, register) in registers.enumerate() {
        for (lane, &bits) in register.iter().enumerate() {
            for e in 0..each {
                let column = lane % 4 * each + e + r / 2 * 4 * each;
                if column < k {
                    rows[lane / 4 + 8 * (r % 2)][column] = part(kind, bits, e);
                }
            }
        }
    }
    rows
}

impl Machine<'_> {
    pub(crate) fn product(&mut self, warp: &mut Warp, p: Product) {
        let k = p.k as usize;
        let count = (p.k * p.a_kind.bits() / 64) as usize;
        let list = |start: u32, n: usize| &self.program.lists[start as usize..][..n];
        let a = rows(p.a_kind, k, list(p.a, count).iter().map(|&reg| warp.get(reg)));
        // B's columns: register `r` of a lane holds elements of column `lane / 4`.
        let each = 32 / p.b_kind.bits() as usize;
        let mut b = [[0.0; 32]; 8];
        for (r, &reg) in list(p.b, count / 2).iter().enumerate() {
            for (lane, &bits) in warp.get(reg).iter().enumerate() {
                for e in 0..each {
                    b[lane / 4][lane % 4 * each + e + r * 4 * each] = part(p.b_kind, bits, e);
                }
            }
        }
        let per = 32 / p.c_kind.bits() as usize;
        let mut sums = [[0.0; 4]; LANES];
        for (r, &reg) in list(p.c, 4 / per).iter().enumerate() {
            for (lane, &bits) in warp.get(reg).iter().enumerate() {
                for e in 0..per {
                    sums[lane][r * per + e] = part(p.c_kind, bits, e);
                }
            }
        }
        for (lane, sums) in sums.iter_mut().enumerate() {
            for (e, sum) in sums.iter_mut().enumerate() {
                let (row, column) = (lane / 4 + e / 2 * 8, lane % 4 * 2 + e % 2);
                *sum += dot(&a[row][..k], &b[column][..k]);
            }
        }
        let per = 32 / p.d_kind.bits() as usize;
        for (r, &reg) in list(p.d, 4 / per).iter().enumerate() {
            let mut values = [0; LANES];
            for (value, sums) in values.iter_mut().zip(&sums) {
                for e in 0..per {
                    *value |= (p.d_kind.rounded(sums[r * per + e]) as u64) << (e as u32 * p.d_kind.bits());
                }
            }
            warp.set(reg, u32::MAX, &values);
        }
    }
}

/// The sum of products, four chains side by side.
#[inline(always)]
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    for (a, b) in a.chunks_exact(4).zip(b.chunks_exact(4)) {
        for i in 0..4 {
            sums[i] += a[i] * b[i];
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}
