//! Instructions for which the whole warp comes together: matrices from and to shared memory, and their products.

use super::bytes::Site;
use super::run::Next;
use super::warp::{Warp, lanes};
use super::{Machine, Outcome};
use crate::FaultKind;
use crate::code::{Fragment, Instruction, Matrix, Op};
use crate::lanes::{LANES, Lanes};

/// An 8 by 8 matrix of 16-bit elements.
type Tile = [[u16; 8]; 8];

impl Machine<'_> {
    pub(crate) fn matrix(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        number: u32,
        mask: u32,
        active: u32,
    ) -> Outcome<Next> {
        if mask != warp.live {
            self.park(warp, at, mask, active);
            self.unpark(warp)?;
            return Ok(Next::Apart);
        }
        self.carry_out_matrix(warp, at, i, number)?;
        Ok(Next::On)
    }

    /// Carries out the instruction that a lane waits at if all others wait there too. The lanes that are settled with it.
    pub(crate) fn unpark_matrix(&mut self, warp: &mut Warp, lane: usize) -> Outcome<u32> {
        let at = warp.at[lane];
        let here = lanes(warp.parked).filter(|&l| warp.at[l] == at).fold(0u32, |m, l| m | 1 << l);
        let i = &self.program.code[at as usize];
        let Op::Matrix(number) = i.op else { return Ok(here) };
        if here == warp.live {
            self.carry_out_matrix(warp, at, i, number)?;
            warp.parked &= !here;
            warp.move_to(here, at + 1);
        }
        Ok(here)
    }

    fn carry_out_matrix(&mut self, warp: &mut Warp, at: u32, i: &Instruction, number: u32) -> Outcome<()> {
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
            Matrix::Fragment(fragment) if fragment.loads => self.load_fragment(warp, at, i, fragment),
            Matrix::Fragment(fragment) => self.store_fragment(warp, at, i, fragment),
            Matrix::Transpose => {
                let values = to_lanes(&from_lanes(warp.get(i.a)), true);
                warp.set(i.d, u32::MAX, &values);
                Ok(())
            }
            Matrix::Product(product) => {
                self.product(warp, product);
                Ok(())
            }
            Matrix::Tile(tile) if tile.loads => self.load_tile(warp, at, i, tile),
            Matrix::Tile(tile) => self.store_tile(warp, at, i, tile),
            Matrix::TileProduct(product) => {
                self.tile_product(warp, product);
                Ok(())
            }
            Matrix::Warpgroup(product) => self.warpgroup(warp, at, i, product),
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
                let groups = warp.held_groups;
                warp.held.retain(|_, group| *group + n >= groups);
                Ok(())
            }
        }
    }

    fn load_fragment(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        fragment: Fragment,
    ) -> Outcome<()> {
        for n in 0..fragment.count as usize {
            let mut tile: Tile = [[0; 8]; 8];
            for (row, elements) in tile.iter_mut().enumerate() {
                let site = Site { at, i, lane: n * 8 + row };
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
        at: u32,
        i: &Instruction,
        fragment: Fragment,
    ) -> Outcome<()> {
        self.idle = 0;
        for n in 0..fragment.count as usize {
            let tile = from_lanes(warp.get(self.program.lists[fragment.list as usize + n]));
            for row in 0..8 {
                let site = Site { at, i, lane: n * 8 + row };
                let address = warp.get(i.a)[site.lane].wrapping_add(i.offset as u64);
                let range = self.locate(warp, site, "matrix write", (fragment.space, address), (16, 16))?;
                self.touch(warp, site, range, true, 0)?;
                let Some(contents) = self.contents_of(range.target) else { continue };
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
fn to_lanes(tile: &Tile, transposed: bool) -> Lanes {
    let mut values = [0; LANES];
    for (lane, value) in values.iter_mut().enumerate() {
        let (row, pair) = (lane / 4, lane % 4 * 2);
        let element = |k: usize| if transposed { tile[k][row] } else { tile[row][k] } as u64;
        *value = element(pair) | element(pair + 1) << 16;
    }
    values
}

fn from_lanes(values: &Lanes) -> Tile {
    let mut tile = [[0; 8]; 8];
    for (lane, value) in values.iter().enumerate() {
        tile[lane / 4][lane % 4 * 2] = *value as u16;
        tile[lane / 4][lane % 4 * 2 + 1] = (*value >> 16) as u16;
    }
    tile
}
