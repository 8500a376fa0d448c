//! A warp: registers, where each lane is, and what it waits for.

use super::copies::PendingCopy;
use crate::code::{NOWHERE, Reg};
use crate::lanes::{LANES, Lanes, Map};
use crate::memory::Contents;
use std::collections::HashMap;

/// Every lane.
pub(crate) const ALL: u32 = u32::MAX;

/// Iterates over the lanes of a mask.
pub(crate) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let lane = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        Some(lane)
    })
}

/// Lanes that run together: at one instruction and one depth of calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) at: u32,
    pub(crate) lanes: u32,
    /// The next instruction at which other lanes wait for these.
    pub(crate) join: u32,
}

/// A warp of a block.
#[derive(Debug, Default)]
pub(crate) struct Warp {
    /// Its number in the block, and among all that are resident.
    pub(crate) number: usize,
    pub(crate) resident: usize,
    pub(crate) block: usize,
    pub(crate) registers: Vec<Lanes>,
    pub(crate) at: [u32; LANES],
    /// The calls of each lane: the instruction behind each.
    pub(crate) calls: Vec<Vec<u32>>,
    /// Lanes that there are, and those that have not exited.
    pub(crate) lanes: u32,
    pub(crate) live: u32,
    /// Lanes that wait at an operation of the warp, or at a barrier.
    pub(crate) parked: u32,
    pub(crate) stopped: u32,
    /// Lanes that have run long enough for others to have their turn.
    pub(crate) rested: u32,
    /// Lanes that have touched memory since others began to wait for them at an operation of the warp.
    pub(crate) worked: u32,
    /// Copies to shared memory that nothing has waited for, and the groups that each lane has made of its own.
    pub(crate) copies: Vec<PendingCopy>,
    pub(crate) groups: [u32; LANES],
    /// Accumulators of matrix products under way: register and group.
    pub(crate) held: HashMap<Reg, u32>,
    pub(crate) held_groups: u32,
    /// Registers of matrix products that were computed since the last `wgmma.fence`, with the instruction; whether there was one.
    pub(crate) computed: HashMap<Reg, u32>,
    pub(crate) fenced: bool,
    pub(crate) deep: bool,
    /// The round of the cluster's barrier that each lane has come to.
    pub(crate) cluster_round: [u32; LANES],
    /// Local memory, that of lane 0 first.
    pub(crate) local: Contents,
    /// Registers that carry bytes never written: by register, the bytes of each lane.
    pub(crate) unwritten: HashMap<Reg, [u8; LANES]>,
    pub(super) scratch: Box<Scratch>,
}

#[derive(Debug)]
pub(super) struct Scratch(Lanes);

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch([0; LANES])
    }
}

impl Warp {
    /// A warp that is none of any block's.
    pub(crate) fn nobody() -> Warp {
        Warp { number: usize::MAX, ..Warp::default() }
    }

    /// Lanes that have ended.
    pub(crate) fn exited(&self) -> u32 {
        self.lanes & !self.live
    }

    /// Lanes that can go on.
    pub(crate) fn runnable(&self) -> u32 {
        self.live & !(self.parked | self.stopped)
    }

    /// The lanes to run: the deepest in calls, of those the ones at the lowest instruction, so that the others are met.
    #[inline]
    pub(crate) fn choose(&mut self) -> Option<Group> {
        let mut candidates = self.runnable() & !self.rested;
        if candidates == 0 {
            self.rested = 0;
            candidates = self.runnable();
        }
        if candidates == 0 {
            return None;
        }
        if self.deep {
            let depth = lanes(candidates).map(|l| self.calls[l].len()).max().unwrap_or(0);
            candidates =
                lanes(candidates).filter(|&l| self.calls[l].len() == depth).fold(0, |m, l| m | 1 << l);
        }
        let first = self.at[candidates.trailing_zeros() as usize];
        if candidates == ALL && self.at.iter().all(|&at| at == first) {
            return Some(Group { at: first, lanes: ALL, join: u32::MAX });
        }
        let at = lanes(candidates).map(|l| self.at[l]).min()?;
        let mut group = Group { at, lanes: 0, join: u32::MAX };
        for l in lanes(candidates) {
            if self.at[l] == at {
                group.lanes |= 1 << l;
            } else {
                group.join = group.join.min(self.at[l]);
            }
        }
        Some(group)
    }

    /// Lets lanes go on at an instruction.
    #[inline(always)]
    pub(crate) fn move_to(&mut self, mask: u32, at: u32) {
        if mask == ALL {
            self.at = [at; LANES];
            return;
        }
        for l in lanes(mask) {
            self.at[l] = at;
        }
    }

    /// The lanes for which a predicate has the wanted value.
    #[inline(always)]
    pub(crate) fn holds(&self, predicate: Reg, wanted: bool) -> u32 {
        let bits = self.registers[predicate as usize].iter().rev().fold(0, |m, &p| m << 1 | (p & 1) as u32);
        if wanted { bits } else { !bits }
    }

    /// A register of all lanes.
    #[inline(always)]
    pub(crate) fn get(&self, reg: Reg) -> &Lanes {
        &self.registers[reg as usize]
    }

    /// Sets a register of some lanes.
    #[inline(always)]
    pub(crate) fn set(&mut self, reg: Reg, mask: u32, values: &Lanes) {
        if reg == NOWHERE {
            return;
        }
        let register = &mut self.registers[reg as usize];
        if mask == ALL {
            *register = *values;
            return;
        }
        for l in 0..LANES {
            if mask >> l & 1 == 1 {
                register[l] = values[l];
            }
        }
    }

    /// Carries out a map: where all lanes take part and no source is the destination, straight into that.
    #[inline(always)]
    pub(crate) fn map(&mut self, map: Map, d: Reg, sources: [Reg; 4], mask: u32) {
        let [a, b, c, e] = sources.map(|reg| reg as usize);
        if mask == ALL && d != NOWHERE && !sources.contains(&d) {
            let d = d as usize;
            let (left, rest) = self.registers.split_at_mut(d);
            if let Some((to, right)) = rest.split_first_mut() {
                let source = |i: usize| if i < d { &left[i] } else { &right[i - d - 1] };
                map(source(a), source(b), source(c), source(e), to);
            }
            return;
        }
        let r = &self.registers;
        map(&r[a], &r[b], &r[c], &r[e], &mut self.scratch.0);
        if d == NOWHERE {
            return;
        }
        let register = &mut self.registers[d as usize];
        if mask == ALL {
            *register = self.scratch.0;
            return;
        }
        for l in 0..LANES {
            if mask >> l & 1 == 1 {
                register[l] = self.scratch.0[l];
            }
        }
    }
}
