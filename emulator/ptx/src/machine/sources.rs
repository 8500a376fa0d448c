//! Shared memory that is still read beside the threads: by bulk copies to global memory until the thread that started one has waited for its
//! group (`cp.async.bulk.wait_group`), and by products of warpgroups until their warp has (`wgmma.wait_group`). Nothing may be written there.
//!
//! The bytes are read when the copy or the product starts. So a wait that is missing changes no value here, and is looked for at each write.
//! What a copy writes to global memory is there when its thread has waited for more than the reads.

use super::access::{Site, race_kind};
use super::state::{
    Block, BulkGroup, ByteRange, Landing, Machine, Outcome, PendingStore, Region, Source, Warp,
};
use crate::code::{Instruction, Space};
use crate::lanes::lanes;

impl Machine<'_> {
    /// A lane's copy reads a range from now on.
    pub(super) fn reads_from(&mut self, warp: &Warp, site: Site, range: ByteRange) {
        let Region::Shared { block } = range.region else { return };
        let Site { pc, lane, .. } = site;
        self.blocks[block].sources.push(Source { range, group: warp.bulk_group(lane), pc });
    }

    /// A lane's copy writes to global memory from now on.
    pub(super) fn stores_to(&mut self, warp: &Warp, lane: usize, landing: Landing) {
        let ByteRange { region, offset, bytes } = landing.range;
        if let Some(contents) = self.contents_of(region) {
            contents.announce(offset, offset + bytes);
        }
        self.stores.push(PendingStore { landing, group: warp.bulk_group(lane) });
    }

    /// Copies of these groups have written.
    pub(super) fn stored(&mut self, is_over: impl Fn(&BulkGroup) -> bool) {
        let (over, left) = std::mem::take(&mut self.stores).into_iter().partition(|s| is_over(&s.group));
        self.stores = left;
        let over: Vec<PendingStore> = over;
        for PendingStore { landing: Landing { range, data, written }, .. } in over {
            if let Some(contents) = self.contents_of(range.region) {
                contents.land(range.offset, &data, |byte| written[byte]);
            }
        }
    }

    /// A product of a warp reads 16 bytes of shared memory from now on.
    pub(super) fn multiplies(&mut self, warp: &mut Warp, piece: ByteRange) {
        let Region::Shared { block } = piece.region else { return };
        let Block { operands, shared, .. } = &mut self.blocks[block];
        operands.resize(shared.data.len().div_ceil(16), 0);
        operands[piece.offset / 16] += 1;
        warp.operands.push((warp.held_groups, block, piece.offset / 16));
    }

    /// A warp has waited until no more than `n` groups of its products are under way.
    pub(super) fn multiplied(&mut self, warp: &mut Warp, n: u32) {
        let groups = warp.held_groups;
        warp.held.retain(|_, group| *group + n >= groups);
        warp.operands.retain(|&(group, block, piece)| {
            let is_read = group + n >= groups;
            if !is_read && let Some(count) = self.blocks[block].operands.get_mut(piece) {
                *count = count.saturating_sub(1);
            }
            is_read
        });
    }

    /// Lanes have waited until no more than `n` of their groups of bulk copies are under way, or only of those that have not `read` yet. The
    /// sources of the others were read just now, as far as order is concerned.
    pub(super) fn bulk_waited(
        &mut self,
        warp: &Warp,
        Site { pc, i, .. }: Site,
        mask: u32,
        (n, read): (u32, bool),
    ) -> Outcome<()> {
        let size = self.cluster_size();
        let first = warp.block / size * size;
        let done = |group: &BulkGroup, lane: usize| {
            (group.resident, group.lane) == (warp.resident, lane)
                && group.number.saturating_add(n) < warp.bulk_groups[lane]
        };
        for lane in lanes(mask) {
            if !read && !self.stores.is_empty() {
                self.stored(|group| done(group, lane));
            }
            for block in first..first + size {
                let (over, left) = self.blocks[block].sources.iter().partition(|s| done(&s.group, lane));
                self.blocks[block].sources = left;
                let over: Vec<Source> = over;
                for source in over {
                    self.touch(warp, Site { pc, i, lane }, source.range, false, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that no bulk copy and no product still reads what lanes from `lane` on write: `bytes` bytes, `each` of a lane.
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
            Region::Shared { block }
                if !self.blocks[block].sources.is_empty() || !self.blocks[block].operands.is_empty() =>
            {
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
        let Some(source) = self.blocks[block].sources.iter().find(meets) else {
            return self.not_operand(warp, i, lane, (block, range), each);
        };
        let lane = lane + source.range.offset.saturating_sub(range.offset) / each.max(1);
        let [x, y, z] = self.thread(source.group.resident % self.warps_a_block(), source.group.lane);
        let copy = self.place(&self.program.code[source.pc as usize]);
        let message = format!(
            "writes {each} bytes at {}, which the bulk copy at {copy} by thread ({x}, {y}, {z}) may still read: it has not waited \
             (cp.async.bulk.wait_group)",
            self.name(range.region, range.offset.max(source.range.offset))
        );
        self.fault(kind, warp, i, lane, message)
    }
    fn not_operand(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        (block, range): (usize, ByteRange),
        each: usize,
    ) -> Outcome<()> {
        let Some(kind) = race_kind(&self.checks, Space::Shared) else { return Ok(()) };
        let (first, end) = (range.offset / 16, (range.offset + range.bytes).div_ceil(16));
        let operands = &self.blocks[block].operands;
        let Some(at) = (first..end.min(operands.len())).find(|&piece| operands[piece] > 0) else {
            return Ok(());
        };
        let lane = lane + (at * 16).saturating_sub(range.offset) / each.max(1);
        let message = format!(
            "writes {each} bytes at {}, which a wgmma may still read: its warp has not waited (wgmma.wait_group)",
            self.name(range.region, range.offset.max(at * 16))
        );
        self.fault(kind, warp, i, lane, message)
    }
}
