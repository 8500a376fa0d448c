//! Shared memory that bulk copies to global memory still read: until the thread that started a copy has waited for its group
//! (`cp.async.bulk.wait_group`), nothing may be written there.
//!
//! The bytes are copied when the copy starts. So a wait that is missing changes no value here, and is looked for at each write.

use super::access::{Site, race_kind};
use super::state::{ByteRange, Machine, Outcome, Region, Source, Warp};
use crate::code::{Instruction, Space};
use crate::lanes::lanes;

impl Machine<'_> {
    /// A lane's copy reads a range from now on.
    pub(super) fn reads_from(&mut self, warp: &Warp, site: Site, range: ByteRange) {
        let Region::Shared { block } = range.region else { return };
        let Site { pc, lane, .. } = site;
        let source = Source { range, resident: warp.resident, lane, group: warp.bulk_groups[lane], pc };
        self.blocks[block].sources.push(source);
    }

    /// Lanes have waited until no more than `n` of their groups of bulk copies are under way. The sources of the others were read just
    /// now, as far as order is concerned.
    pub(super) fn bulk_waited(
        &mut self,
        warp: &Warp,
        pc: u32,
        i: &Instruction,
        mask: u32,
        n: u32,
    ) -> Outcome<()> {
        let size = self.cluster_size();
        let first = warp.block / size * size;
        let done = |s: &Source, lane: usize| {
            (s.resident, s.lane) == (warp.resident, lane)
                && s.group.saturating_add(n) < warp.bulk_groups[lane]
        };
        for lane in lanes(mask) {
            for block in first..first + size {
                let (over, left) = self.blocks[block].sources.iter().partition(|s| done(s, lane));
                self.blocks[block].sources = left;
                let over: Vec<Source> = over;
                for source in over {
                    self.touch(warp, Site { pc, i, lane }, source.range, false, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that no bulk copy still reads what lanes from `lane` on write: `bytes` bytes, `each` of a lane.
    #[inline(always)]
    pub(super) fn not_read(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        range: ByteRange,
        each: usize,
    ) -> Outcome<()> {
        match range.region {
            Region::Shared { block } if !self.blocks[block].sources.is_empty() => {
                self.not_source(warp, i, lane, (block, range), each)
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn not_source(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        (block, range): (usize, ByteRange),
        each: usize,
    ) -> Outcome<()> {
        let Some(kind) = race_kind(&self.checks, Space::Shared) else { return Ok(()) };
        let meets = |s: &&Source| {
            s.range.offset < range.offset + range.bytes && range.offset < s.range.offset + s.range.bytes
        };
        let Some(source) = self.blocks[block].sources.iter().find(meets) else { return Ok(()) };
        let lane = lane + source.range.offset.saturating_sub(range.offset) / each.max(1);
        let [x, y, z] = self.thread(source.resident % self.warps_a_block(), source.lane);
        let copy = self.place(&self.program.code[source.pc as usize]);
        let message = format!(
            "writes {each} bytes at {}, which the bulk copy at {copy} by thread ({x}, {y}, {z}) may still read: it has not waited \
             (cp.async.bulk.wait_group)",
            self.name(range.region, range.offset.max(source.range.offset))
        );
        self.fault(kind, warp, i, lane, message)
    }
}
