//! Races that are no mistakes: those that [`crate::Checks::allowed`] names, a plain read that meets a
//! compare-and-swap, and lanes that write the same value by one instruction at different times.
//!
//! A run of lanes that may race comes here, and is looked at lane by lane.

use super::access::{Touch, contents_in};
use super::state::{Machine, Outcome, Region, Warp};
use crate::code::{Access, Atomic, Instruction, Op, Update};
use crate::memory::shadow::{Cell, SAME, instruction, instruction_number, record};
use crate::{Fault, FaultKind};

impl Machine<'_> {
    /// The instruction of the access in a cell.
    pub(crate) fn instruction_of(&self, cell: Cell) -> &Instruction {
        &self.program.code[instruction(cell) as usize]
    }

    /// Whether the program means to have the race of an instruction with the access in a cell.
    #[cold]
    pub(crate) fn allowed(&self, i: &Instruction, cell: Cell, equal: bool) -> bool {
        let line = |i: &Instruction| self.program.locations.get((i.location as usize).checked_sub(1)?);
        let lines = [line(i), line(self.instruction_of(cell))];
        self.checks.allowed.iter().any(|allowed| allowed.allows(&self.kernel.name, &lines, equal))
    }

    /// Whether the program means lanes to write different values to one place by an instruction.
    pub(crate) fn allowed_in(&self, i: &Instruction) -> bool {
        let line = |i: &Instruction| self.program.locations.get((i.location as usize).checked_sub(1)?);
        self.checks.allowed.iter().any(|allowed| allowed.allows(&self.kernel.name, &[line(i), None], false))
    }

    /// Whether the access in a cell is a compare-and-swap. A plain read may meet one: such a loop begins with it
    /// (CUDA programming guide, atomic functions), and the swap itself finds out whether the value was right.
    fn swapped(&self, cell: Cell) -> bool {
        matches!(self.instruction_of(cell).op, Op::Atomic(Atomic { update: Update::Swap, .. }))
    }

    /// A read of a run of lanes, one of which races.
    #[cold]
    pub(crate) fn racing_read(
        &mut self,
        (kind, region): (FaultKind, Region),
        warp: &Warp,
        i: &Instruction,
        touch: Touch,
    ) -> Outcome<()> {
        for n in 0..touch.lanes {
            let one = touch.lane_of_run(n);
            let Some(contents) = contents_in(&mut self.spaces, &mut self.blocks, None, region) else {
                continue;
            };
            let Some((cell, lane, wrote)) = one.read(&mut self.clocks, contents) else { continue };
            if self.swapped(cell) || self.allowed(i, cell, false) {
                continue;
            }
            let what = format!("{} bytes at {}", one.bytes, self.name(region, one.offset));
            return self.race(kind, warp, i, (lane, false), (cell, wrote), &what);
        }
        Ok(())
    }

    /// A store of a run of lanes, one of which races.
    #[cold]
    pub(crate) fn racing_store(
        &mut self,
        (kind, region): (FaultKind, Region),
        warp: &Warp,
        i: &Instruction,
        access: Access,
        touch: Touch,
    ) -> Outcome<()> {
        let own = self.clocks.record(touch.resident);
        for n in 0..touch.lanes {
            let one = touch.lane_of_run(n);
            let range = one.offset..one.offset + one.bytes;
            let registers = &self.program.lists[access.list as usize..][..access.count as usize];
            let value =
                |&reg: &u32| warp.get(reg)[one.lane].to_le_bytes().into_iter().take(access.size as usize);
            let bytes: Vec<u8> = registers.iter().flat_map(value).collect();
            let Some(contents) = contents_in(&mut self.spaces, &mut self.blocks, None, region) else {
                continue;
            };
            let equal = contents.data[range.clone()] == bytes[..];
            if let Some((cell, lane, wrote)) = one.write(&mut self.clocks, contents) {
                let equal = equal && wrote;
                let at_once =
                    equal && record(cell) == own && instruction(cell) == instruction_number(touch.pc);
                if !at_once && !self.allowed(i, cell, equal) {
                    let what = format!("{} bytes at {}", one.bytes, self.name(region, one.offset));
                    let raced = self.race(kind, warp, i, (lane, true), (cell, wrote), &what);
                    return raced.map_err(|fault| if equal { self.how_to_allow(fault) } else { fault });
                }
                let Some(contents) = contents_in(&mut self.spaces, &mut self.blocks, None, region) else {
                    continue;
                };
                one.note_write(&mut self.clocks, contents, if at_once { SAME } else { 0 });
            }
            let Some(contents) = contents_in(&mut self.spaces, &mut self.blocks, None, region) else {
                continue;
            };
            contents.data[range.clone()].copy_from_slice(&bytes);
            contents.written.set(range.start, range.end);
        }
        Ok(())
    }

    /// Says how a race of stores of equal values can be allowed.
    fn how_to_allow(&self, mut fault: Box<Fault>) -> Box<Fault> {
        fault.message += &format!(
            "; both write the same value, which `equal@{}` in `Checks::allowed` or PHALANX_EMULATOR_ALLOW_RACES allows",
            self.kernel.name
        );
        fault
    }
}
