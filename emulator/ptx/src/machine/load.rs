//! Loads (`ld`).

use super::access::{Touch, contents_in, race_kind, strength};
use super::runs::{LaneRun, by_size};
use super::state::{Machine, Outcome, Region, Warp};
use crate::FaultKind;
use crate::code::{Access, Instruction, Order, Space};
use crate::lanes::{LANES, Lanes};
use crate::memory::Contents;
use crate::memory::shadow::{Cell, record};

impl Machine<'_> {
    pub(crate) fn load(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        mask: u32,
    ) -> Outcome<()> {
        match access.count {
            1 => self.load_n::<1>(warp, pc, i, access, mask),
            2 => self.load_n::<2>(warp, pc, i, access, mask),
            4 => self.load_n::<4>(warp, pc, i, access, mask),
            _ => self.load_n::<8>(warp, pc, i, access, mask),
        }
    }

    fn load_n<const N: usize>(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        mask: u32,
    ) -> Outcome<()> {
        let mut addresses = self.addresses(warp, i);
        let mut values = [[0; LANES]; N];
        let total = access.size as usize * N;
        if !warp.unwritten.is_empty() {
            let list = &self.program.lists[access.list as usize..][..access.count as usize];
            list.iter().for_each(|&reg| warp.forget_unwritten(reg, mask));
        }
        let mut rest = mask;
        while rest != 0 {
            let (space, mut same) = self.same_space(access.space, &mut addresses, rest);
            rest &= !same;
            if access.order != Order::Weak {
                self.order.polls += (space == Space::Global) as u64;
            }
            if access.order != Order::Weak && self.clocks.listens() {
                self.listen(warp, (space, &addresses, same), (access.order, access.scope), false);
            }
            if space == Space::Global {
                self.report.global_bytes_read += total as u64 * same.count_ones() as u64;
            }
            while same != 0 {
                let run = LaneRun::take(space, &addresses, &mut same, total as u64);
                self.load_run(warp, pc, i, access, (space, addresses[run.lane], run), &mut values)?;
            }
        }
        for k in 0..N.min(access.count as usize) {
            if access.extend != 0 {
                extend(&mut values[k], access.size, access.extend);
            }
            warp.set(self.program.lists[access.list as usize + k], mask, &values[k]);
        }
        Ok(())
    }

    #[inline(always)]
    fn load_run<const N: usize>(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        (space, address, run): (Space, u64, LaneRun),
        values: &mut [Lanes; N],
    ) -> Outcome<()> {
        let (size, total) = (access.size as usize, access.size as usize * N);
        let all = if run.uniform { total } else { total * run.lanes };
        let found = self.locate_run(warp, pc, i, "read", (space, address, run), total)?;
        let Some((region, offset)) = found else {
            return self.load_apart(warp, pc, i, access, (space, address, run), values);
        };
        if region == Region::Parameter {
            let number = |start: usize| {
                let mut bytes = [0; 8];
                bytes[..size].copy_from_slice(&self.parameters[start..start + size]);
                u64::from_le_bytes(bytes)
            };
            spread(values, run, size, offset, number);
            return Ok(());
        }
        let race = race_kind(&self.checks, space);
        let check = self.checks.uninitialised;
        let resident = warp.resident;
        let contents = contents_in(&mut self.spaces, &mut self.blocks, Some(&mut warp.local), region);
        let Some(contents) = contents else { return Ok(()) };
        let unwritten = check && !contents.written.all(offset, offset + all);
        if access.constant
            && race.is_some()
            && let Some(&cell) = (contents.shadow.writes(offset, all).iter())
                .find(|cell| self.clocks.is_of_launch(record(**cell)))
        {
            return self.not_constant(warp, i, run.lane, cell, (region, offset, total));
        }
        let mut racing = None;
        if race.is_some() {
            let (lane, lanes) = (run.lane, if run.uniform { 1 } else { run.lanes });
            let (bytes, flags, shared) =
                (total, strength(access.order, access.scope), space == Space::Shared);
            let touch = Touch { pc, resident, lane, lanes, offset, bytes, flags, shared };
            racing = touch.read(&mut self.clocks, contents).map(|_| touch);
            if run.uniform && racing.is_none() {
                // Any one writer differs from the first or the last of them.
                let last = Touch { lane: run.lane + run.lanes - 1, ..touch };
                racing = last.read(&mut self.clocks, contents).map(|_| last);
            }
        }
        load_values(values, run, size, offset, contents);
        if let (Some(touch), Some(kind)) = (racing, race) {
            self.racing_read((kind, region), warp, i, touch)?;
        }
        if unwritten {
            return self.unwritten(warp, pc, i, access, region, (run, offset));
        }
        Ok(())
    }

    /// `ld.global.nc` of what the same launch has written.
    #[cold]
    fn not_constant(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        cell: Cell,
        (region, offset, bytes): (Region, usize, usize),
    ) -> Outcome<()> {
        if self.allowed(i, cell, false) {
            return Ok(());
        }
        let message = format!(
            "reads {bytes} bytes at {} as constant (ld.global.nc: __ldg, or a const __restrict__ pointer), which the \
             same launch has written {}",
            self.name(region, offset),
            self.party(warp, cell)
        );
        self.fault(FaultKind::GlobalRace, warp, i, lane, message)
    }

    /// A run that does not lie in one region: lane by lane.
    #[cold]
    fn load_apart<const N: usize>(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        (space, address, run): (Space, u64, LaneRun),
        values: &mut [Lanes; N],
    ) -> Outcome<()> {
        for (address, one) in run.apart(address, access.size as u64 * N as u64) {
            self.load_run(warp, pc, i, access, (space, address, one), values)?;
        }
        Ok(())
    }
}

fn extend(values: &mut Lanes, size: u8, to: u8) {
    let (up, keep) = (64 - size as u32 * 8, u64::MAX >> (64 - to as u32));
    for value in values {
        *value = ((*value << up) as i64 >> up) as u64 & keep;
    }
}

/// The bits of an unsigned integer of any size, in a lane's 64.
#[inline(always)]
fn widened(x: impl Into<u64>) -> u64 {
    x.into()
}

/// Gives the lanes of a run their elements.
#[inline(always)]
fn spread<const N: usize>(
    values: &mut [Lanes; N],
    run: LaneRun,
    size: usize,
    offset: usize,
    number: impl Fn(usize) -> u64,
) {
    for n in 0..run.lanes {
        let start = offset + if run.uniform { 0 } else { n * size * N };
        for (k, values) in values.iter_mut().enumerate() {
            values[run.lane + n] = number(start + k * size);
        }
    }
}

#[inline(always)]
fn load_values<const N: usize>(
    values: &mut [Lanes; N],
    run: LaneRun,
    size: usize,
    offset: usize,
    contents: &Contents,
) {
    by_size!(size, T, {
        const BYTES: usize = size_of::<T>();
        let places = if run.uniform { 1 } else { run.lanes };
        let bytes = &contents.data[offset..offset + places * BYTES * N];
        let (chunks, _) = bytes.as_chunks::<BYTES>();
        if run.uniform {
            for k in 0..N {
                values[k][run.lane..run.lane + run.lanes].fill(widened(T::from_le_bytes(chunks[k])));
            }
            return;
        }
        for k in 0..N {
            let lanes = &mut values[k][run.lane..run.lane + run.lanes];
            for (n, value) in lanes.iter_mut().enumerate() {
                *value = widened(T::from_le_bytes(chunks[n * N + k]));
            }
        }
    })
}
