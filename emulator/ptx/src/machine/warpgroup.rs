//! `wgmma`: products of four warps whose matrices lie in shared memory, described by 64 bits each.
//!
//! Their registers must not be touched before the product is waited for, nor be computed and handed to a product with
//! no `wgmma.fence` between.

use super::access::Site;
use super::matrix::{add, quads, register, rows, tile};
use super::state::{Machine, Outcome, Warp};
use crate::FaultKind;
use crate::code::{Element, Instruction, MOVE, Matrix, NOWHERE, Op, Reg, Space, WarpgroupProduct};
use crate::lanes::LANES;
use crate::tensor_map::Swizzle;

/// A matrix in shared memory: the 64 bits of its descriptor, decoded.
#[derive(Clone, Copy, Debug)]
struct MatrixDescriptor {
    start: u64,
    /// Byte offsets between core matrices ("leading" and "stride").
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
    /// Neighbours in memory are neighbours along M or N, not along K.
    across: bool,
    bytes: u64,
}

impl MatrixDescriptor {
    fn new(bits: u64, kind: Element, across: bool) -> MatrixDescriptor {
        let field = |at: u32| (bits >> at & 0x3fff) << 4;
        let swizzle =
            [Swizzle::None, Swizzle::Bytes128, Swizzle::Bytes64, Swizzle::Bytes32][(bits >> 62) as usize];
        let bytes = kind.bits() as u64 / 8;
        MatrixDescriptor { start: field(0), leading: field(16), stride: field(32), swizzle, across, bytes }
    }

    /// 16-byte pieces of a row of the pattern that is repeated.
    fn pieces(&self) -> u64 {
        match self.swizzle {
            Swizzle::None => 1,
            Swizzle::Bytes32 => 2,
            Swizzle::Bytes64 => 4,
            Swizzle::Bytes128 => 8,
        }
    }

    /// The address of the element at `outer` along M or N and `k` along K.
    fn address(&self, outer: u64, k: u64) -> u64 {
        let (each, pieces) = (16 / self.bytes, self.pieces());
        let offset = match (self.across, self.swizzle) {
            (false, Swizzle::None) => {
                outer / 8 * self.stride + outer % 8 * 16 + k / each * self.leading + k % each * self.bytes
            }
            (false, _) => outer / 8 * self.stride + outer % 8 * pieces * 16 + k * self.bytes,
            (true, Swizzle::None) => {
                outer % each * self.bytes + outer / each * self.stride + k % 8 * 16 + k / 8 * self.leading
            }
            (true, _) => {
                let row = each * pieces;
                outer % row * self.bytes
                    + outer / row * self.leading
                    + k % 8 * pieces * 16
                    + k / 8 * self.stride
            }
        };
        self.swizzle.apply(self.start + offset)
    }
}

impl Machine<'_> {
    /// The part of the product that is this warp's: 16 rows of the 64.
    pub(crate) fn warpgroup(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        p: WarpgroupProduct,
    ) -> Outcome<()> {
        self.ready(warp, i, p)?;
        let (n, k) = (p.n as usize, p.k as usize);
        let site = Site { pc, i, lane: 0 };
        let a = match p.a_count {
            0 => {
                let matrix = MatrixDescriptor::new(warp.get(i.a)[0], p.kind, p.transpose_a);
                let first = warp.number as u64 % 4 * 16;
                let mut a = [[0.0; 32]; 16];
                self.read_matrix(warp, site, matrix, p.kind, (first, 16), k, |row, at, x| a[row][at] = x)?;
                a
            }
            count => {
                let list = &self.program.lists[p.a as usize..][..count as usize];
                rows(p.kind, list.iter().map(|&reg| warp.get(reg)))
            }
        };
        let mut b = vec![[[0.0; 8]; 32]; n / 8];
        let matrix = MatrixDescriptor::new(warp.get(i.b)[0], p.b_kind, p.transpose_b);
        let put = |column: usize, at: usize, x| b[column / 8][at][column % 8] = x;
        self.read_matrix(warp, site, matrix, p.b_kind, (0, n as u64), k, put)?;
        let sign = if p.negate_a != p.negate_b { -1.0 } else { 1.0 };
        let adds = warp.get(i.c)[0] & 1 == 1;
        let list = &self.program.lists[p.d as usize..][..p.d_count as usize];
        for (b, registers) in b.iter().zip(list.chunks(4 * p.d_kind.bits() as usize / 32)) {
            let mut sums = [[0.0; LANES]; 4];
            if adds {
                sums = quads(p.d_kind, registers.iter().map(|&reg| warp.get(reg)));
            }
            add(&mut sums, sign, &tile(&a, b, k));
            for (r, &reg) in registers.iter().enumerate() {
                warp.set(reg, u32::MAX, &register(p.d_kind, r, &sums));
                warp.held.insert(reg, warp.held_groups);
            }
        }
        Ok(())
    }

    /// Reads `count` rows or columns of a matrix, in pieces of 16 bytes: `put` gets the row or column, the index along
    /// K, and the value.
    #[allow(clippy::too_many_arguments)]
    fn read_matrix(
        &mut self,
        warp: &mut Warp,
        site: Site,
        matrix: MatrixDescriptor,
        kind: Element,
        (first, count): (u64, u64),
        k: usize,
        mut put: impl FnMut(usize, usize, f64),
    ) -> Outcome<()> {
        let size = matrix.bytes as usize;
        let each = 16 / size;
        // Which of the two runs along a piece.
        let steps = if matrix.across { (each, 1) } else { (1, each) };
        for o in (0..count as usize).step_by(steps.0) {
            for c in (0..k).step_by(steps.1) {
                let address = matrix.address(first + o as u64, c as u64);
                let piece = self.locate(warp, site, "wgmma read", (Space::Shared, address), (16, 16))?;
                self.seen_by_async_proxy(warp, site, "reads", piece)?;
                self.touch(warp, site, piece, false, 0)?;
                self.written(warp, site, piece)?;
                self.multiplies(warp, piece);
                let Some(contents) = self.contents_of(piece.region) else { continue };
                for e in 0..each {
                    let value = kind.value(contents.number(piece.offset + e * size, size));
                    let (o, c) = if matrix.across { (o + e, c) } else { (o, c + e) };
                    put(o, c, value);
                }
            }
        }
        Ok(())
    }
}

impl Machine<'_> {
    /// An instruction that touches a register of a `wgmma`: it must not be one of a product under way. Notes which
    /// registers it computes.
    #[cold]
    pub(crate) fn watched(&mut self, warp: &mut Warp, pc: u32, i: &Instruction, lane: usize) -> Outcome<()> {
        // A plain move passes on what it moves: compilers rename accumulators between two products. A constant may be
        // moved at any time.
        if i.offset == MOVE && matches!(i.op, Op::Map(_)) {
            match warp.held.get(&i.a) {
                Some(&group) => warp.held.insert(i.d, group),
                None => warp.held.remove(&i.d),
            };
            match warp.computed.get(&i.a) {
                Some(&by) => warp.computed.insert(i.d, by),
                None => warp.computed.remove(&i.d),
            };
            return Ok(());
        }
        let program = self.program;
        let list = |start: u32, count: usize| &program.lists[start as usize..][..count];
        let (read, loaded): (&[Reg], &[Reg]) = match i.op {
            Op::Load(access) => (&[], list(access.list, access.count as usize)),
            Op::Store(access) => (list(access.list, access.count as usize), &[]),
            Op::Matrix(number) => {
                if let Matrix::Fragment(f) = program.matrices[number as usize]
                    && f.loads
                {
                    warp.computed.extend(list(f.list, f.count as usize).iter().map(|&reg| (reg, pc)));
                }
                return Ok(());
            }
            _ => (&[], &[]),
        };
        let touched = [i.d, i.a, i.b, i.c, i.e];
        if touched.iter().chain(read).chain(loaded).any(|reg| *reg != NOWHERE && warp.held.contains_key(reg))
        {
            let message = "register of a wgmma that was not waited for (wgmma.wait_group)";
            return self.fault(FaultKind::Pending, warp, i, lane, message);
        }
        warp.computed.extend([i.d].iter().chain(loaded).filter(|reg| **reg != NOWHERE).map(|&reg| (reg, pc)));
        Ok(())
    }

    /// Whether a product's registers are ready for it.
    pub(crate) fn ready(&self, warp: &Warp, i: &Instruction, p: WarpgroupProduct) -> Outcome<()> {
        if !warp.fenced {
            return self.fault(
                FaultKind::MissingFence,
                warp,
                i,
                0,
                "the first wgmma with no wgmma.fence before it",
            );
        }
        let lists = [("an accumulator", p.d, p.d_count), ("a register of A", p.a, p.a_count)];
        for (what, start, count) in lists {
            let list = &self.program.lists[start as usize..][..count as usize];
            if let Some(&by) = list.iter().find_map(|reg| warp.computed.get(reg)) {
                let place = self.place(&self.program.code[by as usize]);
                let message =
                    format!("{what} of the wgmma was computed at {place}, with no wgmma.fence between");
                return self.fault(FaultKind::MissingFence, warp, i, 0, message);
            }
        }
        Ok(())
    }
}
