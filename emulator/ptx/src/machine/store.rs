//! Stores (`st`).

use super::access::{Touch, contents_in, race_kind, strength};
use super::runs::{LaneRun, by_size};
use super::state::{ByteRange, Machine, Outcome, Warp};
use crate::FaultKind;
use crate::code::{Access, Instruction, Order, Space};
use crate::lanes::{LANES, Lanes, lanes};
use crate::memory::shadow::SAME;

impl Machine<'_> {
    pub(crate) fn store(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        mask: u32,
    ) -> Outcome<()> {
        let mut addresses = self.addresses(warp, i);
        let total = access.size as usize * access.count as usize;
        self.idle = 0;
        let mut rest = mask;
        while rest != 0 {
            let (space, mut same) = self.same_space(access.space, &mut addresses, rest);
            rest &= !same;
            if access.order != Order::Weak {
                self.publish(warp, (space, &addresses, same), (access.order, access.scope));
            }
            if space == Space::Global {
                self.report.global_bytes_written += total as u64 * same.count_ones() as u64;
            }
            let mut again = 0;
            if space != Space::Local {
                again = self.same_place(warp, i, access, space, &addresses, same)?;
                same &= !again;
            }
            while same != 0 {
                let run = LaneRun::take(space, &addresses, &mut same, total as u64);
                self.store_run(warp, pc, i, access, (space, addresses[run.lane], run), again != 0)?;
            }
        }
        Ok(())
    }

    /// Lanes whose store another lane makes too, with the same value. Different values are a race.
    #[inline(always)]
    fn same_place(
        &self,
        warp: &Warp,
        i: &Instruction,
        access: Access,
        space: Space,
        addresses: &Lanes,
        mask: u32,
    ) -> Outcome<u32> {
        let total = access.size as u64 * access.count as u64;
        let mut last = None;
        let mut rising = true;
        for l in 0..LANES {
            if mask >> l & 1 == 1 {
                rising &= last.is_none_or(|last: u64| addresses[l] >= last.wrapping_add(total));
                last = Some(addresses[l]);
            }
        }
        if rising { Ok(0) } else { self.overlaps(warp, i, access, space, addresses, mask) }
    }

    #[inline(never)]
    fn overlaps(
        &self,
        warp: &Warp,
        i: &Instruction,
        access: Access,
        space: Space,
        addresses: &Lanes,
        mask: u32,
    ) -> Outcome<u32> {
        let total = access.size as u64 * access.count as u64;
        let registers = &self.program.lists[access.list as usize..][..access.count as usize];
        let width = u64::MAX >> (64 - access.size as u32 * 8);
        // A misaligned address is a fault of its own, found later.
        if lanes(mask).any(|l| !addresses[l].is_multiple_of(total)) {
            return Ok(0);
        }
        let mut again = 0;
        for a in lanes(mask) {
            for b in lanes(mask & !(u32::MAX >> (31 - a))) {
                let apart = addresses[a].abs_diff(addresses[b]);
                if apart >= total {
                    continue;
                }
                let equal = |&r: &u32| (warp.get(r)[a] ^ warp.get(r)[b]) & width == 0;
                if apart == 0 && registers.iter().all(equal) {
                    again |= 1 << a;
                    continue;
                }
                let Some(kind) = race_kind(&self.checks, space) else { continue };
                if self.allowed_in(i) {
                    again |= ((apart == 0) as u32) << a;
                    continue;
                }
                let [x, y, z] = self.thread(warp.number, a);
                let address = addresses[b];
                let message = format!(
                    "writes {total} bytes at {address:#x}, to which thread ({x}, {y}, {z}) writes another value in the same instruction"
                );
                return self.fault(kind, warp, i, b, message);
            }
        }
        Ok(if race_kind(&self.checks, space).is_some() { again } else { 0 })
    }

    /// Stores a run's values. Out of line, so that `step`, which all other instructions pass through, stays small.
    #[inline(never)]
    fn store_run(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        (space, address, run): (Space, u64, LaneRun),
        again: bool,
    ) -> Outcome<()> {
        let (size, count) = (access.size as usize, access.count as usize);
        let total = size * count;
        // Of lanes that write the same place the last one's value stays.
        let run = if run.uniform { LaneRun::one(run.lane + run.lanes - 1) } else { run };
        let (lane, n) = (run.lane, run.lanes);
        let found = self.locate_run(warp, pc, i, "write", (space, address, run), total)?;
        let Some((region, offset)) = found else {
            return self.store_apart(warp, pc, i, access, (space, address, run), again);
        };
        let bytes = total * n;
        self.not_read(warp, i, lane, ByteRange { region, offset, bytes }, total)?;
        let race = race_kind(&self.checks, space);
        let resident = warp.resident;
        let Warp { local, registers, .. } = warp;
        let contents = contents_in(&mut self.spaces, &mut self.blocks, Some(local), region);
        let Some(contents) = contents else {
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, "write to the kernel's parameters");
        };
        let mut racing = None;
        if race.is_some() {
            let flags = strength(access.order, access.scope) | if again { SAME } else { 0 };
            let shared = space == Space::Shared;
            let touch = Touch { pc, resident, lane, lanes: n, offset, bytes: total, flags, shared };
            racing = touch.write(&mut self.clocks, contents).map(|_| touch);
        }
        if let (Some(touch), Some(kind)) = (racing, race) {
            self.racing_store((kind, region), warp, i, access, touch)?;
        } else {
            let list = &self.program.lists[access.list as usize..][..count];
            for (k, &reg) in list.iter().enumerate() {
                let values = &registers[reg as usize][lane..lane + n];
                store_values(&mut contents.data[offset..offset + total * n], values, size, total, k);
            }
            contents.written.set(offset, offset + total * n);
        }
        if !warp.unwritten.is_empty() {
            self.carry_unwritten(warp, pc, access, region, (lane, n, offset));
        }
        Ok(())
    }

    /// A run that does not lie in one region: lane by lane.
    #[cold]
    fn store_apart(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        (space, address, run): (Space, u64, LaneRun),
        again: bool,
    ) -> Outcome<()> {
        for (address, one) in run.apart(address, access.size as u64 * access.count as u64) {
            self.store_run(warp, pc, i, access, (space, address, one), again)?;
        }
        Ok(())
    }
}

/// Puts element `k` of each lane into its place.
#[inline(always)]
fn store_values(data: &mut [u8], values: &[u64], size: usize, total: usize, k: usize) {
    by_size!(size, T, {
        if total == size_of::<T>() {
            let (chunks, _) = data.as_chunks_mut::<{ size_of::<T>() }>();
            for (chunk, value) in chunks.iter_mut().zip(values) {
                *chunk = (*value as T).to_le_bytes();
            }
        } else {
            for (chunk, value) in data.chunks_exact_mut(total).zip(values) {
                chunk[k * size..(k + 1) * size].copy_from_slice(&(*value as T).to_le_bytes());
            }
        }
    })
}
