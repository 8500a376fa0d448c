//! Stores and atomic operations.

use super::access::{Run, Touch, bits, raced, run, strength};
use super::state::{Machine, Outcome, Target, Warp};
use crate::FaultKind;
use crate::code::{Access, Atomic, Instruction, Kind, Order, Space, Update};
use crate::lanes::round::{self, Mode, odd_sum, round};
use crate::lanes::{LANES, Lanes, lanes};
use crate::memory::shadow::{SAME, STRONG};

impl Machine<'_> {
    pub(crate) fn store(
        &mut self,
        warp: &mut Warp,
        at: u32,
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
                self.publish(warp, space, &addresses, same, access.order);
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
                let run = match space {
                    Space::Local => Run { lane: same.trailing_zeros() as usize, lanes: 1, uniform: false },
                    _ => run(&addresses, same, total as u64),
                };
                same &= !bits(run.lane, run.lanes);
                self.store_run(warp, at, i, access, (space, addresses[run.lane], run), again != 0)?;
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
                let Some(kind) = raced(&self.checks, space) else { continue };
                let [x, y, z] = self.thread(warp.number, a);
                let address = addresses[b];
                let message = format!(
                    "writes {total} bytes at {address:#x}, to which thread ({x}, {y}, {z}) writes another value in the same instruction"
                );
                return self.fault(kind, warp, i, b, message);
            }
        }
        Ok(if raced(&self.checks, space).is_some() { again } else { 0 })
    }

    #[inline(always)]
    fn store_run(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        access: Access,
        (space, address, run): (Space, u64, Run),
        again: bool,
    ) -> Outcome<()> {
        let (size, count) = (access.size as usize, access.count as usize);
        let total = size * count;
        // Of lanes that write the same place the last one's value stays.
        let (lane, n) = if run.uniform { (run.lane + run.lanes - 1, 1) } else { (run.lane, run.lanes) };
        let Some((target, offset)) = self.find(warp, at, space, address, (total * n) as u64) else {
            if n > 1 {
                for k in 0..n {
                    let one = Run { lane: lane + k, lanes: 1, uniform: false };
                    self.store_run(
                        warp,
                        at,
                        i,
                        access,
                        (space, address.wrapping_add((k * total) as u64), one),
                        again,
                    )?;
                }
                return Ok(());
            }
            return self.outside(warp, i, lane, "write", (space, address, total as u64));
        };
        if address % total as u64 != 0 {
            return self.misaligned(warp, i, lane, "write", total, address);
        }
        let offset =
            if target == Target::Local { offset + lane * self.program.local_bytes as usize } else { offset };
        let race = raced(&self.checks, space);
        let resident = warp.resident;
        let Warp { local, registers, .. } = warp;
        let contents = match target {
            Target::Global { space, slot } => self.spaces[space].at(slot).map(|a| &mut a.contents),
            Target::Shared { block } => Some(&mut self.blocks[block].shared),
            Target::Local => Some(local),
            Target::Parameter => None,
        };
        let Some(contents) = contents else {
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, "write to the kernel's parameters");
        };
        let mut found = None;
        if race.is_some() {
            let flags = strength(access.order) | if again { SAME } else { 0 };
            let shared = space == Space::Shared;
            let touch = Touch { at, resident, lane, lanes: n, offset, bytes: total, flags, shared };
            found = touch.write(&mut self.clocks, contents);
        }
        let list = &self.program.lists[access.list as usize..][..count];
        for (k, &reg) in list.iter().enumerate() {
            let values = &registers[reg as usize][lane..lane + n];
            store_values(&mut contents.data[offset..offset + total * n], values, size, total, k);
        }
        contents.written.set(offset, offset + total * n);
        if let (Some((cell, lane, wrote)), Some(kind)) = (found, race) {
            let what = format!("{total} bytes at {}", self.name(target, offset));
            return self.race(kind, warp, i, (lane, true), (cell, wrote), &what);
        }
        if !warp.unwritten.is_empty() {
            self.carry_unwritten(warp, access, target, (lane, n, offset));
        }
        Ok(())
    }

    /// What a register carried without its ever having been written is not written at its new place either.
    #[cold]
    fn carry_unwritten(
        &mut self,
        warp: &mut Warp,
        access: Access,
        target: Target,
        (lane, n, offset): (usize, usize, usize),
    ) {
        let (size, count) = (access.size as usize, access.count as usize);
        for k in 0..count {
            let reg = self.program.lists[access.list as usize + k];
            let Some(missing) = warp.unwritten.get(&reg).copied() else { continue };
            let Some(contents) = self.contents(warp, target) else { continue };
            for l in 0..n {
                let start = offset + (l * count + k) * size;
                for byte in (0..size).filter(|b| missing[lane + l] >> b & 1 == 1) {
                    contents.written.unset(start + byte, start + byte + 1);
                }
            }
        }
    }
}

/// Puts element `k` of each lane into its place.
#[inline(always)]
fn store_values(data: &mut [u8], values: &[u64], size: usize, total: usize, k: usize) {
    macro_rules! of {
        ($t:ty) => {
            if total == size_of::<$t>() {
                let (chunks, _) = data.as_chunks_mut::<{ size_of::<$t>() }>();
                for (chunk, value) in chunks.iter_mut().zip(values) {
                    *chunk = (*value as $t).to_le_bytes();
                }
            } else {
                for (chunk, value) in data.chunks_exact_mut(total).zip(values) {
                    chunk[k * size..(k + 1) * size].copy_from_slice(&(*value as $t).to_le_bytes());
                }
            }
        };
    }
    match size {
        1 => of!(u8),
        2 => of!(u16),
        4 => of!(u32),
        _ => of!(u64),
    }
}

impl Machine<'_> {
    pub(crate) fn atomic(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        atomic: Atomic,
        mask: u32,
    ) -> Outcome<()> {
        let mut addresses = warp.get(i.a).map(|a| a.wrapping_add(i.offset as u64));
        let count = atomic.count as usize;
        let list = atomic.list as usize;
        let mut old = [[0; LANES]; 8];
        let mut rest = mask;
        while rest != 0 {
            let (space, same) = self.same_space(atomic.space, &mut addresses, rest);
            rest &= !same;
            if self.clocks.listens() {
                self.listen(warp, space, &addresses, same);
            }
            for l in lanes(same) {
                let (size, total) = (atomic.size as usize, atomic.size as usize * count);
                let (target, offset) = self.place_of_atomic(warp, at, i, (space, addresses[l], total), l)?;
                let mut fresh = [0; 8];
                for k in 0..count {
                    let Some(contents) = self.contents(warp, target) else { continue };
                    let value = contents.number(offset + k * size, size);
                    old[k][l] = value;
                    let operand = warp.get(self.program.lists[list + k])[l];
                    fresh[k] = updated(atomic, value, operand, warp.get(i.c)[l]);
                }
                let Some(contents) = self.contents(warp, target) else { continue };
                let mut changed = false;
                for k in 0..count {
                    changed |= fresh[k] != old[k][l];
                    contents.set_number(offset + k * size, size, fresh[k]);
                }
                if changed {
                    self.idle = 0;
                }
                if space == Space::Global {
                    self.report.global_bytes_read += total as u64;
                    self.report.global_bytes_written += total as u64;
                }
            }
            self.publish(warp, space, &addresses, same, atomic.order);
        }
        for (k, old) in old.iter().enumerate().take(count) {
            warp.set(self.program.lists[list + count + k], mask, old);
        }
        Ok(())
    }

    /// Checks the place of a lane's operation.
    fn place_of_atomic(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        (space, address, total): (Space, u64, usize),
        lane: usize,
    ) -> Outcome<(Target, usize)> {
        let Some((target, offset)) = self.find(warp, at, space, address, total as u64) else {
            return self.outside(warp, i, lane, "atomic operation", (space, address, total as u64));
        };
        if address % total as u64 != 0 {
            return self.misaligned(warp, i, lane, "atomic operation", total, address);
        }
        if matches!(target, Target::Local | Target::Parameter) {
            return self.fault(
                FaultKind::InvalidOperand,
                warp,
                i,
                lane,
                "atomic operation on a thread's own memory",
            );
        }
        let (shared, resident) = (space == Space::Shared, warp.resident);
        let check = if shared { self.checks.shared_races } else { self.checks.global_races };
        let (uninitialised, clocks) = (self.checks.uninitialised, &mut self.clocks);
        let contents = match target {
            Target::Global { space, slot } => self.spaces[space].at(slot).map(|a| &mut a.contents),
            Target::Shared { block } => Some(&mut self.blocks[block].shared),
            _ => None,
        };
        let Some(contents) = contents else { return Ok((target, offset)) };
        let written = contents.written.all(offset, offset + total);
        let mut found = None;
        if check {
            let touch = Touch { at, resident, lane, lanes: 1, offset, bytes: total, flags: STRONG, shared };
            found = touch.write(clocks, contents);
        }
        let swaps = matches!(i.op, crate::code::Op::Atomic(Atomic { update: Update::Swap, .. }));
        if let Some((cell, lane, wrote)) = found
            && (wrote || !swaps)
        {
            let kind = if shared { FaultKind::SharedRace } else { FaultKind::GlobalRace };
            let what = format!("{total} bytes (atomically) at {}", self.name(target, offset));
            return self.race(kind, warp, i, (lane, true), (cell, wrote), &what);
        }
        if uninitialised
            && !written
            && !matches!(i.op, crate::code::Op::Atomic(Atomic { update: Update::Exchange, .. }))
        {
            let message = format!(
                "atomic operation on {total} bytes at {} that nothing has written",
                self.name(target, offset)
            );
            return self.fault(FaultKind::Uninitialised, warp, i, lane, message);
        }
        Ok((target, offset))
    }
}

/// The new value at the place.
pub(crate) fn updated(atomic: Atomic, old: u64, operand: u64, new: u64) -> u64 {
    let bits = atomic.size as u32 * 8;
    let width = u64::MAX >> (64 - bits);
    let operand = operand & width;
    match (atomic.update, atomic.kind) {
        (Update::And, _) => old & operand,
        (Update::Or, _) => old | operand,
        (Update::Xor, _) => old ^ operand,
        (Update::Exchange, _) => operand,
        (Update::Swap, _) => {
            if old == operand {
                new & width
            } else {
                old
            }
        }
        (Update::Increment, _) => {
            if old >= operand {
                0
            } else {
                old + 1
            }
        }
        (Update::Decrement, _) => {
            if old == 0 || old > operand {
                operand
            } else {
                old - 1
            }
        }
        (Update::Add, Kind::Bits | Kind::Signed) => old.wrapping_add(operand) & width,
        (Update::Min, Kind::Bits) => old.min(operand),
        (Update::Max, Kind::Bits) => old.max(operand),
        (Update::Min, Kind::Signed) => signed(old, bits).min(signed(operand, bits)) as u64 & width,
        (Update::Max, Kind::Signed) => signed(old, bits).max(signed(operand, bits)) as u64 & width,
        (update, kind) => float(update, kind, old, operand),
    }
}

fn signed(value: u64, bits: u32) -> i64 {
    (value << (64 - bits)) as i64 >> (64 - bits)
}

fn joined(update: Update, a: f64, b: f64) -> f64 {
    match update {
        Update::Min => crate::lanes::half::least(a, b),
        Update::Max => crate::lanes::half::greatest(a, b),
        _ => odd_sum(a, b),
    }
}

fn half(update: Update, a: u16, b: u16) -> u16 {
    let sum = joined(update, round::f16(a) as f64, round::f16(b) as f64);
    round::f16_bits(round(sum, Mode::Nearest, round::F16))
}

fn brain(update: Update, a: u16, b: u16) -> u16 {
    let sum = joined(update, round::bf16(a) as f64, round::bf16(b) as f64);
    round::bf16_bits(round(sum, Mode::Nearest, round::BF16))
}

fn float(update: Update, kind: Kind, a: u64, b: u64) -> u64 {
    let both = |f: fn(Update, u16, u16) -> u16| {
        f(update, a as u16, b as u16) as u64 | (f(update, (a >> 16) as u16, (b >> 16) as u16) as u64) << 16
    };
    match kind {
        Kind::F16 => half(update, a as u16, b as u16) as u64,
        Kind::Bf16 => brain(update, a as u16, b as u16) as u64,
        Kind::F16x2 => both(half),
        Kind::Bf16x2 => both(brain),
        Kind::F32 => {
            let sum = f32::from_bits(a as u32) + f32::from_bits(b as u32);
            if sum.is_nan() { crate::lanes::float::NAN as u64 } else { sum.to_bits() as u64 }
        }
        _ => (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
    }
}
