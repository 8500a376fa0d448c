//! `wmma`: matrices that a warp holds in an order of the machine's own. Here each lane has elements that follow each other by rows; where
//! there are more registers than elements, as of f16 operands, all over again.

use super::bytes::{Range, Site};
use super::warp::Warp;
use super::{Machine, Outcome};
use crate::code::{Element, Instruction, Tile, TileProduct};
use crate::lanes::{LANES, Lanes};

/// The lane, the register and the part of it where element `n` of `elements` is.
fn place(n: usize, elements: usize, kind: Element) -> (usize, usize, u32) {
    let (each, bits) = (elements / LANES, kind.bits());
    let per = 32 / bits as usize;
    (n / each, n % each / per, (n % each % per) as u32 * bits)
}

impl Machine<'_> {
    /// The lines of a tile, rows or columns, in memory.
    fn lines(&mut self, warp: &Warp, (at, i): (u32, &Instruction), tile: Tile) -> Outcome<Vec<Range>> {
        let size = tile.kind.bits() as usize / 8;
        let (lines, len) = if tile.by_rows { (tile.rows, tile.columns) } else { (tile.columns, tile.rows) };
        let (start, stride) =
            (warp.get(i.a)[0].wrapping_add(i.offset as u64), warp.get(i.b)[0] as u32 as u64);
        let verb = if tile.loads { "matrix read" } else { "matrix write" };
        let mut ranges = Vec::new();
        for line in 0..lines as usize {
            let site = Site { at, i, lane: line % LANES };
            let address = start.wrapping_add(line as u64 * stride * size as u64);
            let bytes = len as usize * size;
            let range = self.locate(warp, site, verb, (tile.space, address), (bytes, bytes.min(16)))?;
            self.touch(warp, site, range, !tile.loads, 0)?;
            if tile.loads {
                self.written(warp, site, range)?;
            }
            ranges.push(range);
        }
        Ok(ranges)
    }

    pub(crate) fn load_tile(&mut self, warp: &mut Warp, at: u32, i: &Instruction, tile: Tile) -> Outcome<()> {
        let lines = self.lines(warp, (at, i), tile)?;
        let (size, elements) = (tile.kind.bits() as usize / 8, (tile.rows * tile.columns) as usize);
        let count = tile.count as usize;
        let once = elements * size / 4 / LANES;
        let mut registers = vec![[0; LANES]; count];
        for n in 0..elements {
            let (row, column) = (n / tile.columns as usize, n % tile.columns as usize);
            let (line, along) = if tile.by_rows { (row, column) } else { (column, row) };
            let range = lines[line];
            let Some(contents) = self.contents_of(range.target) else { continue };
            let bits = contents.number(range.offset + along * size, size);
            let (lane, register, shift) = place(n, elements, tile.kind);
            registers[register][lane] |= bits << shift;
        }
        for (r, &reg) in self.program.lists[tile.list as usize..][..count].iter().enumerate() {
            warp.set(reg, u32::MAX, &registers[r % once]);
        }
        Ok(())
    }

    pub(crate) fn store_tile(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        tile: Tile,
    ) -> Outcome<()> {
        self.idle = 0;
        let lines = self.lines(warp, (at, i), tile)?;
        let (size, elements) = (tile.kind.bits() as usize / 8, (tile.rows * tile.columns) as usize);
        let list = &self.program.lists[tile.list as usize..];
        for n in 0..elements {
            let (row, column) = (n / tile.columns as usize, n % tile.columns as usize);
            let (line, along) = if tile.by_rows { (row, column) } else { (column, row) };
            let (lane, register, shift) = place(n, elements, tile.kind);
            let bits = warp.get(list[register])[lane] >> shift;
            let range = lines[line];
            let Some(contents) = self.contents_of(range.target) else { continue };
            contents.set_number(range.offset + along * size, size, bits);
        }
        Ok(())
    }

    pub(crate) fn tile_product(&mut self, warp: &mut Warp, p: TileProduct) {
        let [m, n, k] = p.shape.map(|side| side as usize);
        let element = |which: usize, elements: usize, at: usize| {
            let (lane, register, shift) = place(at, elements, p.kinds[which]);
            let reg = self.program.lists[p.lists[which] as usize + register];
            p.kinds[which].value((warp.get(reg)[lane] >> shift) as u32)
        };
        let a: Vec<f64> = (0..m * k).map(|at| element(0, m * k, at)).collect();
        let b: Vec<f64> = (0..k * n).map(|at| element(1, k * n, at)).collect();
        let mut results: Vec<Lanes> = vec![[0; LANES]; p.counts[3] as usize];
        for at in 0..m * n {
            let (row, column) = (at / n, at % n);
            let products = (0..k).map(|i| a[row * k + i] * b[i * n + column]);
            let sum = element(2, m * n, at) + products.sum::<f64>();
            let (lane, register, shift) = place(at, m * n, p.kinds[3]);
            results[register][lane] |= (p.kinds[3].rounded(sum) as u64) << shift;
        }
        for (r, values) in results.iter().enumerate() {
            warp.set(self.program.lists[p.lists[3] as usize + r], u32::MAX, values);
        }
    }
}
