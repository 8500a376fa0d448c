//! Lanes in runs: neighbours that touch bytes one behind the other, or all the same. A warp that loads or stores a row is
//! one run, so its bytes are looked up, checked and copied at once.

use super::state::{Machine, Outcome, Region, Warp};
use crate::code::{Instruction, Space};
use crate::lanes::Lanes;

/// Neighbouring lanes whose bytes lie one behind the other, or are the same.
#[derive(Clone, Copy)]
pub(super) struct LaneRun {
    pub(super) lane: usize,
    pub(super) lanes: usize,
    pub(super) uniform: bool,
}

impl LaneRun {
    /// A lane alone.
    pub(super) fn one(lane: usize) -> LaneRun {
        LaneRun { lane, lanes: 1, uniform: false }
    }

    /// Takes the run that begins at the first lane of a mask out of the mask; `bytes` are a lane's. Each lane has a
    /// local memory of its own.
    #[inline(always)]
    pub(super) fn take(space: Space, addresses: &Lanes, mask: &mut u32, bytes: u64) -> LaneRun {
        let run = match space {
            Space::Local => LaneRun::one(mask.trailing_zeros() as usize),
            _ => LaneRun::first(addresses, *mask, bytes),
        };
        *mask &= !((u32::MAX >> (32 - run.lanes)) << run.lane);
        run
    }

    #[inline(always)]
    fn first(addresses: &Lanes, mask: u32, bytes: u64) -> LaneRun {
        let lane = mask.trailing_zeros() as usize;
        let most = (!(mask >> lane)).trailing_zeros().min(32 - lane as u32) as usize;
        let first = addresses[lane];
        let mut n = 1;
        if most > 1 && addresses[lane + 1] == first {
            while n < most && addresses[lane + n] == first {
                n += 1;
            }
            return LaneRun { lane, lanes: n, uniform: true };
        }
        while n < most && addresses[lane + n] == first.wrapping_add(n as u64 * bytes) {
            n += 1;
        }
        LaneRun { lane, lanes: n, uniform: false }
    }

    /// Its lanes one by one, each with its address.
    pub(super) fn apart(self, address: u64, bytes: u64) -> impl Iterator<Item = (u64, LaneRun)> {
        (0..self.lanes).map(move |n| (address.wrapping_add(n as u64 * bytes), LaneRun::one(self.lane + n)))
    }
}

impl Machine<'_> {
    /// Finds the bytes that a run `verb`s, `bytes` of each lane: the region, and where in its contents they begin.
    /// `None` if several lanes do not lie in one region: then each has to be looked up by itself.
    #[inline(always)]
    pub(super) fn locate_run(
        &mut self,
        warp: &Warp,
        pc: u32,
        i: &Instruction,
        verb: &str,
        (space, address, run): (Space, u64, LaneRun),
        bytes: usize,
    ) -> Outcome<Option<(Region, usize)>> {
        let all = if run.uniform { bytes } else { bytes * run.lanes };
        let Some((region, offset)) = self.find(warp, pc, space, address, all as u64) else {
            if run.lanes > 1 && !run.uniform {
                return Ok(None);
            }
            return self.outside(warp, i, run.lane, verb, (space, address, bytes as u64));
        };
        if address % bytes as u64 != 0 {
            return self.misaligned(warp, i, run.lane, verb, bytes, address);
        }
        let own = if region == Region::Local { run.lane * self.program.local_bytes as usize } else { 0 };
        Ok(Some((region, offset + own)))
    }
}

/// The expression for `$t`, the unsigned integer of `$size` bytes.
macro_rules! by_size {
    ($size:expr, $t:ident, $of:expr) => {
        match $size {
            1 => {
                type $t = u8;
                $of
            }
            2 => {
                type $t = u16;
                $of
            }
            4 => {
                type $t = u32;
                $of
            }
            _ => {
                type $t = u64;
                $of
            }
        }
    };
}
pub(super) use by_size;
