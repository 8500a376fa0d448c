//! Instructions for which a whole warp comes together: matrices from and to shared memory (`ldmatrix`, `stmatrix`),
//! products (`mma`), and `wmma`.
//!
//! Sums of products are made in f64 and rounded once.

use super::access::Site;
use super::state::{ByteRange, Machine, Next, Outcome, Warp};
use crate::FaultKind;
use crate::code::{Element, Fragment, Instruction, Matrix, Op, Pairing, Product, Tile, TileProduct};
use crate::lanes::round::{self, Mode, round};
use crate::lanes::{LANES, Lanes, lanes};

/// An 8 by 8 matrix of 16-bit elements.
type Rows8 = [[u16; 8]; 8];

impl Machine<'_> {
    pub(crate) fn matrix(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        number: u32,
        mask: u32,
        active: u32,
    ) -> Outcome<Next> {
        if mask != warp.live {
            self.wait_at_warp_op(warp, pc, mask, active);
            self.finish_warp_ops(warp)?;
            return Ok(Next::Apart);
        }
        self.carry_out_matrix(warp, pc, i, number)?;
        Ok(Next::On)
    }

    /// Carries out the instruction that a lane waits at if all others wait there too. Gives the lanes that wait there.
    pub(crate) fn finish_matrix(&mut self, warp: &mut Warp, lane: usize) -> Outcome<u32> {
        let pc = warp.pc[lane];
        let here = lanes(warp.at_warp_op).filter(|&l| warp.pc[l] == pc).fold(0u32, |m, l| m | 1 << l);
        let i = &self.program.code[pc as usize];
        let Op::Matrix(number) = i.op else { return Ok(here) };
        if here == warp.live {
            self.carry_out_matrix(warp, pc, i, number)?;
            warp.at_warp_op &= !here;
            warp.move_to(here, pc + 1);
        }
        Ok(here)
    }

    fn carry_out_matrix(&mut self, warp: &mut Warp, pc: u32, i: &Instruction, number: u32) -> Outcome<()> {
        if warp.live != u32::MAX {
            let lane = (!warp.live).trailing_zeros();
            let message =
                format!("an instruction for all lanes, of which lane {lane} does not exist or has exited");
            return self.fault(
                FaultKind::DivergentShuffle,
                warp,
                i,
                warp.live.trailing_zeros() as usize,
                message,
            );
        }
        match self.program.matrices[number as usize] {
            Matrix::Fragment(fragment) if fragment.loads => self.load_fragment(warp, pc, i, fragment),
            Matrix::Fragment(fragment) => self.store_fragment(warp, pc, i, fragment),
            Matrix::Transpose => {
                let values = to_lanes(&from_lanes(warp.get(i.a)), true);
                warp.set(i.d, u32::MAX, &values);
                Ok(())
            }
            Matrix::Product(product) => {
                self.product(warp, product);
                Ok(())
            }
            Matrix::SparseProduct(product) => self.sparse_product(warp, i, product),
            Matrix::Tile(tile) if tile.loads => self.load_tile(warp, pc, i, tile),
            Matrix::Tile(tile) => self.store_tile(warp, pc, i, tile),
            Matrix::TileProduct(product) => {
                self.tile_product(warp, product);
                Ok(())
            }
            Matrix::Warpgroup(product) => self.warpgroup(warp, pc, i, product),
            Matrix::WarpgroupFence => {
                warp.fenced = true;
                warp.computed.clear();
                Ok(())
            }
            Matrix::WarpgroupCommit => {
                warp.held_groups += 1;
                Ok(())
            }
            Matrix::WarpgroupWait => {
                let n = warp.get(i.a)[0] as u32;
                self.multiplied(warp, n);
                Ok(())
            }
        }
    }

    fn load_fragment(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        fragment: Fragment,
    ) -> Outcome<()> {
        for n in 0..fragment.count as usize {
            let mut tile: Rows8 = [[0; 8]; 8];
            for (row, elements) in tile.iter_mut().enumerate() {
                let site = Site { pc, i, lane: n * 8 + row };
                let address = warp.get(i.a)[site.lane].wrapping_add(i.offset as u64);
                let bytes: [u8; 16] = self.take(warp, site, "matrix read", (fragment.space, address))?;
                for (element, pair) in elements.iter_mut().zip(bytes.as_chunks().0) {
                    *element = u16::from_le_bytes(*pair);
                }
            }
            let values = to_lanes(&tile, fragment.transposed);
            warp.set(self.program.lists[fragment.list as usize + n], u32::MAX, &values);
        }
        Ok(())
    }

    fn store_fragment(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        fragment: Fragment,
    ) -> Outcome<()> {
        self.idle = 0;
        for n in 0..fragment.count as usize {
            let tile = from_lanes(warp.get(self.program.lists[fragment.list as usize + n]));
            for row in 0..8 {
                let site = Site { pc, i, lane: n * 8 + row };
                let address = warp.get(i.a)[site.lane].wrapping_add(i.offset as u64);
                let range = self.locate(warp, site, "matrix write", (fragment.space, address), (16, 16))?;
                self.touch(warp, site, range, true, 0)?;
                let Some(contents) = self.contents_of(range.region) else { continue };
                for k in 0..8 {
                    let element = if fragment.transposed { tile[k][row] } else { tile[row][k] };
                    contents.set_number(range.offset + 2 * k, 2, element as u64);
                }
            }
        }
        Ok(())
    }
}

/// Each lane's two elements: of row `lane / 4`, or column where it is transposed.
fn to_lanes(tile: &Rows8, transposed: bool) -> Lanes {
    let mut values = [0; LANES];
    for (lane, value) in values.iter_mut().enumerate() {
        let (row, pair) = (lane / 4, lane % 4 * 2);
        let element = |k: usize| if transposed { tile[k][row] } else { tile[row][k] } as u64;
        *value = element(pair) | element(pair + 1) << 16;
    }
    values
}

fn from_lanes(values: &Lanes) -> Rows8 {
    let mut tile = [[0; 8]; 8];
    for (lane, value) in values.iter().enumerate() {
        tile[lane / 4][lane % 4 * 2] = *value as u16;
        tile[lane / 4][lane % 4 * 2 + 1] = (*value >> 16) as u16;
    }
    tile
}

impl Element {
    /// The value of an element's bits.
    #[inline(always)]
    pub(crate) fn value(self, bits: u64) -> f64 {
        match self {
            Element::F16 => round::f16(bits as u16) as f64,
            Element::Bf16 => round::bf16(bits as u16) as f64,
            // The hardware does not look at the lower bits.
            Element::Tf32 => f32::from_bits(bits as u32 & 0xffff_e000) as f64,
            Element::F32 => f32::from_bits(bits as u32) as f64,
            Element::F64 => f64::from_bits(bits),
            Element::B1 => (bits & 1) as f64,
            Element::S4 => ((bits as u8) << 4) as i8 as f64 / 16.0,
            Element::U4 => (bits & 15) as f64,
            Element::S8 => bits as u8 as i8 as f64,
            Element::U8 => bits as u8 as f64,
            Element::S32 => bits as i32 as f64,
            Element::E4m3 => crate::lanes::convert::f8(bits as u8, false),
            Element::E5m2 => crate::lanes::convert::f8(bits as u8, true),
        }
    }

    /// The values of element `e` of a register, of all lanes.
    pub(crate) fn values(self, register: &Lanes, e: usize) -> [f64; LANES] {
        let shift = e as u32 * self.bits();
        macro_rules! each {
            ($($kind:ident)*) => {
                match self {
                    $(Element::$kind => std::array::from_fn(|l| Element::$kind.value(register[l] >> shift)),)*
                }
            };
        }
        each!(F16 Bf16 Tf32 F32 F64 B1 S4 U4 S8 U8 S32 E4m3 E5m2)
    }

    /// The bits of a sum.
    #[inline(always)]
    pub(crate) fn rounded(self, sum: f64) -> u64 {
        match self {
            Element::F16 => round::f16_bits(round(sum, Mode::Nearest, round::F16)) as u64,
            // Sums of whole numbers are exact, and wrap.
            Element::S32 => sum as i64 as u32 as u64,
            Element::F64 => sum.to_bits(),
            _ if sum.is_nan() => crate::lanes::float::CANONICAL_NAN as u64,
            _ => (sum as f32).to_bits() as u64,
        }
    }
}

/// 16 rows of up to 32 elements.
pub(crate) type Rows = [[f64; 32]; 16];

/// Up to 32 rows of 8 columns.
pub(crate) type Columns = [[f64; 8]; 32];

/// A fragment of A (16 rows) as rows: register `r` of a lane holds elements of row `lane / 4 + 8 (r % 2)`, those of
/// columns that the lane's place in its group of four and `r / 2` say.
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
            for p in (i..k).step_by(4) {
                for (sum, b) in chain.iter_mut().zip(&b[p]) {
                    *sum += a[p] * b;
                }
            }
        }
        for (column, sum) in sums.iter_mut().enumerate() {
            *sum = (chains[0][column] + chains[1][column]) + (chains[2][column] + chains[3][column]);
        }
    }
    sums
}

/// Four elements of C or D of each lane: element `e` is in row `lane / 4 + 8 (e / 2)` and column `2 (lane % 4) + e %
/// 2` of a tile.
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
            *value |= kind.rounded(sum) << (part as u32 * kind.bits());
        }
    }
    values
}

impl Machine<'_> {
    pub(crate) fn product(&mut self, warp: &mut Warp, p: Product) {
        if p.a_kind.is_whole() || p.a_kind == Element::F64 {
            return self.exact_product(warp, p);
        }
        let count = p.counts()[0] as usize;
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

/// Where an element is: the lane, the register, and the bit at which it begins there.
pub(super) type Place = (usize, usize, u32);

/// Where the element of a fragment of A is: in one of `lines` rows, and a column. B's columns are as A's rows.
pub(super) fn operand_place(kind: Element, lines: usize, line: usize, at: usize) -> Place {
    let each = (32 / kind.bits()).max(1) as usize;
    let (quad, within) = (at / (4 * each), at % (4 * each));
    let register = quad * (lines / 8) + line / 8;
    (line % 8 * 4 + within / each, register, (within % each) as u32 * kind.bits())
}

/// A's row and B's column joined, and added to an element of C.
fn sum_of(pairing: Pairing, c: f64, pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    match pairing {
        Pairing::Product => pairs.fold(c, |sum, (a, b)| a.mul_add(b, sum)),
        Pairing::And => c + pairs.filter(|(a, b)| a + b == 2.0).count() as f64,
        Pairing::Xor => c + pairs.filter(|(a, b)| a != b).count() as f64,
    }
}

/// A sum as it is stored: those of whole numbers may stay at the ends of their type.
fn stored(sum: f64, kind: Element, saturate: bool) -> u64 {
    let ends = (i32::MIN as f64, i32::MAX as f64);
    kind.rounded(if saturate && kind == Element::S32 { sum.clamp(ends.0, ends.1) } else { sum })
}

impl Machine<'_> {
    /// Products of f64, each sum a chain over ascending k, and of whole numbers, which are exact in any order.
    fn exact_product(&mut self, warp: &mut Warp, p: Product) {
        let (m, k) = (p.m as usize, p.k as usize);
        let element = |kind: Element, list: u32, (lane, register, shift): Place| {
            kind.value(warp.get(self.program.lists[list as usize + register])[lane] >> shift)
        };
        let read = |kind: Element, list: u32, lines: usize| -> Vec<f64> {
            let places = (0..lines * k).map(|n| operand_place(kind, lines, n / k, n % k));
            places.map(|place| element(kind, list, place)).collect()
        };
        let (a, b) = (read(p.a_kind, p.a, m), read(p.b_kind, p.b, 8));
        let mut sums = vec![[0; LANES]; m / 4];
        for (row, column) in (0..m * 8).map(|n| (n / 8, n % 8)) {
            let (lane, register) = (row % 8 * 4 + column / 2, row / 8 * 2 + column % 2);
            let pairs = a[row * k..][..k].iter().copied().zip(b[column * k..][..k].iter().copied());
            let sum = sum_of(p.pairing, element(p.c_kind, p.c, (lane, register, 0)), pairs);
            sums[register][lane] = stored(sum, p.d_kind, p.saturate);
        }
        for (sums, &reg) in sums.iter().zip(&self.program.lists[p.d as usize..]) {
            warp.set(reg, u32::MAX, sums);
        }
    }
}

/// Where element `n` of the `elements` of a tile is.
fn place(n: usize, elements: usize, kind: Element) -> Place {
    let (each, bits) = (elements / LANES, kind.bits());
    let per = (32 / bits).max(1) as usize;
    (n / each, n % each / per, (n % each % per) as u32 * bits)
}

impl Machine<'_> {
    /// The lines of a tile, rows or columns, in memory.
    fn lines(&mut self, warp: &Warp, (pc, i): (u32, &Instruction), tile: Tile) -> Outcome<Vec<ByteRange>> {
        let bits = tile.kind.bits() as usize;
        let (lines, len) = if tile.by_rows { (tile.rows, tile.columns) } else { (tile.columns, tile.rows) };
        let (start, stride) =
            (warp.get(i.a)[0].wrapping_add(i.offset as u64), warp.get(i.b)[0] as u32 as u64);
        let verb = if tile.loads { "matrix read" } else { "matrix write" };
        let mut ranges = Vec::new();
        for line in 0..lines as usize {
            let site = Site { pc, i, lane: line % LANES };
            let address = start.wrapping_add(line as u64 * stride * bits as u64 / 8);
            let bytes = len as usize * bits / 8;
            let range = self.locate(warp, site, verb, (tile.space, address), (bytes, bytes.min(16)))?;
            self.touch(warp, site, range, !tile.loads, 0)?;
            if tile.loads {
                self.written(warp, site, range)?;
            }
            ranges.push(range);
        }
        Ok(ranges)
    }

    pub(crate) fn load_tile(&mut self, warp: &mut Warp, pc: u32, i: &Instruction, tile: Tile) -> Outcome<()> {
        let lines = self.lines(warp, (pc, i), tile)?;
        let (bits, elements) = (tile.kind.bits() as usize, (tile.rows * tile.columns) as usize);
        let count = tile.count as usize;
        let once = elements * bits / bits.max(32) / LANES;
        let mut registers = vec![[0; LANES]; count];
        for n in 0..elements {
            let (row, column) = (n / tile.columns as usize, n % tile.columns as usize);
            let (line, along) = if tile.by_rows { (row, column) } else { (column, row) };
            let range = lines[line];
            let Some(contents) = self.contents_of(range.region) else { continue };
            let value =
                contents.number(range.offset + along * bits / 8, bits.div_ceil(8)) >> (along * bits % 8);
            let (lane, register, shift) = place(n, elements, tile.kind);
            registers[register][lane] |= (value & (u64::MAX >> (64 - bits))) << shift;
        }
        for (r, &reg) in self.program.lists[tile.list as usize..][..count].iter().enumerate() {
            warp.set(reg, u32::MAX, &registers[r % once]);
        }
        Ok(())
    }

    pub(crate) fn store_tile(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        tile: Tile,
    ) -> Outcome<()> {
        self.idle = 0;
        let lines = self.lines(warp, (pc, i), tile)?;
        let (size, elements) = (tile.kind.bits() as usize / 8, (tile.rows * tile.columns) as usize);
        let list = &self.program.lists[tile.list as usize..];
        for n in 0..elements {
            let (row, column) = (n / tile.columns as usize, n % tile.columns as usize);
            let (line, along) = if tile.by_rows { (row, column) } else { (column, row) };
            let (lane, register, shift) = place(n, elements, tile.kind);
            let bits = warp.get(list[register])[lane] >> shift;
            let range = lines[line];
            let Some(contents) = self.contents_of(range.region) else { continue };
            contents.set_number(range.offset + along * size, size, bits);
        }
        Ok(())
    }

    pub(crate) fn tile_product(&mut self, warp: &mut Warp, p: TileProduct) {
        let [m, n, k] = p.shape.map(|side| side as usize);
        let element = |which: usize, elements: usize, at: usize| {
            let (lane, register, shift) = place(at, elements, p.kinds[which]);
            let reg = self.program.lists[p.lists[which] as usize + register];
            p.kinds[which].value(warp.get(reg)[lane] >> shift)
        };
        let a: Vec<f64> = (0..m * k).map(|at| element(0, m * k, at)).collect();
        let b: Vec<f64> = (0..k * n).map(|at| element(1, k * n, at)).collect();
        let mut results: Vec<Lanes> = vec![[0; LANES]; p.counts[3] as usize];
        for at in 0..m * n {
            let (row, column) = (at / n, at % n);
            let pairs = (0..k).map(|i| (a[row * k + i], b[i * n + column]));
            let sum = sum_of(p.pairing, element(2, m * n, at), pairs);
            let (lane, register, shift) = place(at, m * n, p.kinds[3]);
            results[register][lane] |= stored(sum, p.kinds[3], p.saturate) << shift;
        }
        for (r, values) in results.iter().enumerate() {
            warp.set(self.program.lists[p.lists[3] as usize + r], u32::MAX, values);
        }
    }
}
