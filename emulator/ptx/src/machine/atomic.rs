//! Atomic operations (`atom`, `red`): each lane in turn reads the old value, computes the new one and writes it.

use super::access::{Touch, contents_in, race_kind, strength};
use super::state::{ByteRange, Machine, Outcome, Region, Warp};
use crate::FaultKind;
use crate::code::{Atomic, AtomicType, Instruction, Order, Space, Update};
use crate::lanes::float::{self, CANONICAL_NAN};
use crate::lanes::round::{self, Mode, odd_sum, round};
use crate::lanes::{LANES, lanes};

impl Machine<'_> {
    pub(crate) fn atomic(
        &mut self,
        warp: &mut Warp,
        pc: u32,
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
            self.order.polls += (space == Space::Global) as u64;
            if self.clocks.listens() {
                self.listen(warp, (space, &addresses, same), (atomic.order, atomic.scope), true);
            }
            for l in lanes(same) {
                let (size, total) = (atomic.size as usize, atomic.size as usize * count);
                let (region, offset) =
                    self.place_of_atomic(warp, pc, i, atomic, (space, addresses[l], total), l)?;
                let mut fresh = [0; 8];
                // A swap of 128 bits compares both words before it changes either.
                let mut same = true;
                for k in 0..count {
                    let Some(contents) = self.contents(warp, region) else { continue };
                    let value = contents.number(offset + k * size, size);
                    old[k][l] = value;
                    let operand = warp.get(self.program.lists[list + k])[l];
                    same &= value == operand;
                    let new = self.program.lists[list + 2 * count + k];
                    fresh[k] = updated(atomic, value, operand, warp.get(new)[l]);
                }
                if atomic.update == Update::Swap && count > 1 && !same {
                    (0..count).for_each(|k| fresh[k] = old[k][l]);
                }
                let Some(contents) = self.contents(warp, region) else { continue };
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
            self.publish(warp, (space, &addresses, same), (atomic.order, atomic.scope));
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
        pc: u32,
        i: &Instruction,
        atomic: Atomic,
        (space, address, total): (Space, u64, usize),
        lane: usize,
    ) -> Outcome<(Region, usize)> {
        let Some((region, offset)) = self.find(warp, pc, space, address, total as u64) else {
            return self.outside(warp, i, lane, "atomic operation", (space, address, total as u64));
        };
        if address % total as u64 != 0 {
            return self.misaligned(warp, i, lane, "atomic operation", total, address);
        }
        if matches!(region, Region::Local | Region::Parameter) {
            return self.fault(
                FaultKind::InvalidOperand,
                warp,
                i,
                lane,
                "atomic operation on a thread's own memory",
            );
        }
        self.not_read(warp, i, lane, ByteRange { region, offset, bytes: total }, total)?;
        let (shared, resident) = (space == Space::Shared, warp.resident);
        let race = race_kind(&self.checks, space);
        let (uninitialised, clocks) = (self.checks.uninitialised, &mut self.clocks);
        let contents = contents_in(&mut self.spaces, &mut self.blocks, None, region);
        let Some(contents) = contents else { return Ok((region, offset)) };
        let written = contents.written.all(offset, offset + total);
        let mut found = None;
        if race.is_some() {
            let flags = strength(Order::Relaxed, atomic.scope);
            let touch = Touch { pc, resident, lane, lanes: 1, offset, bytes: total, flags, shared };
            found = touch.write(clocks, contents);
        }
        if let (Some((cell, lane, wrote)), Some(kind)) = (found, race)
            && (wrote || atomic.update != Update::Swap)
            && !self.allowed(i, cell, false)
        {
            let what = format!("{total} bytes (atomically) at {}", self.name(region, offset));
            return self.race(kind, warp, i, (lane, true), (cell, wrote), &what);
        }
        if uninitialised && !written && atomic.update != Update::Exchange {
            let message = format!(
                "atomic operation on {total} bytes at {} that nothing has written",
                self.name(region, offset)
            );
            return self.fault(FaultKind::Uninitialised, warp, i, lane, message);
        }
        Ok((region, offset))
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
        (Update::Add, AtomicType::Bits | AtomicType::Signed) => old.wrapping_add(operand) & width,
        (Update::Min, AtomicType::Bits) => old.min(operand),
        (Update::Max, AtomicType::Bits) => old.max(operand),
        (Update::Min, AtomicType::Signed) => signed(old, bits).min(signed(operand, bits)) as u64 & width,
        (Update::Max, AtomicType::Signed) => signed(old, bits).max(signed(operand, bits)) as u64 & width,
        (update, kind) => float_updated(update, kind, old, operand),
    }
}

fn signed(value: u64, bits: u32) -> i64 {
    (value << (64 - bits)) as i64 >> (64 - bits)
}

fn joined(update: Update, a: f64, b: f64) -> f64 {
    match update {
        Update::Min => float::min(a, b),
        Update::Max => float::max(a, b),
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

fn float_updated(update: Update, kind: AtomicType, a: u64, b: u64) -> u64 {
    let both = |f: fn(Update, u16, u16) -> u16| {
        f(update, a as u16, b as u16) as u64 | (f(update, (a >> 16) as u16, (b >> 16) as u16) as u64) << 16
    };
    match kind {
        AtomicType::F16 => half(update, a as u16, b as u16) as u64,
        AtomicType::Bf16 => brain(update, a as u16, b as u16) as u64,
        AtomicType::F16x2 => both(half),
        AtomicType::Bf16x2 => both(brain),
        AtomicType::F32 => {
            let sum = f32::from_bits(a as u32) + f32::from_bits(b as u32);
            if sum.is_nan() { CANONICAL_NAN as u64 } else { sum.to_bits() as u64 }
        }
        _ => (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
    }
}
