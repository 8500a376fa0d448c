//! Bytes that nothing has written, on their way through registers.
//!
//! A load notes in [`Warp::unwritten`] which bytes of its registers were never written, a shuffle what it read from a lane that does not
//! take part. Arithmetic and shuffles pass that on, a store makes the bytes unwritten at their new place. So a kernel may copy such bytes and
//! compute with them, as long as nothing depends on the result: a branch, an address, a vote
//! ([`Program::sinks`](crate::code::Program)) or the host ([`Memory::check_written`](crate::Memory::check_written)).
//!
//! A byte of a result depends on unwritten bytes if it changes with them. This is tried out with a few values in their
//! place, so that masks, shifts, selections and products with zero need no rules of their own.

use super::runs::LaneRun;
use super::state::{ByteRange, Machine, Origin, Outcome, Region, Unwritten, Warp};
use crate::FaultKind;
use crate::code::{Access, Instruction, NOWHERE, Reg};
use crate::lanes::{LANES, Lanes, Map, lanes};

/// Values that are tried in the place of unwritten bytes.
const TRIALS: u64 = 9;

/// The value of a trial, for a lane of a source whose instruction also has the source `other`.
fn trial(number: u64, place: u64, other: u64) -> u64 {
    match number {
        0 => 0,
        1 => u64::MAX,
        // Comparisons tell no other values apart.
        2 => other,
        3 => other.wrapping_add(1),
        4 => other.wrapping_sub(1),
        _ => {
            let mixed = (number << 32 | place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        }
    }
}

/// The bits of bytes.
fn bits(bytes: u8) -> u64 {
    (0..8).filter(|byte| bytes >> byte & 1 == 1).fold(0, |all, byte| all | 0xff << (8 * byte))
}

/// The bytes in which a bit is set.
fn bytes(bits: u64) -> u8 {
    (0..8).filter(|byte| bits >> (8 * byte) & 0xff != 0).fold(0, |all, byte| all | 1 << byte)
}

impl Warp {
    /// Lanes of a register get a value that depends on no unwritten byte.
    pub(super) fn forget_unwritten(&mut self, reg: Reg, mask: u32) {
        if let Some(found) = self.unwritten.get_mut(&reg) {
            lanes(mask).for_each(|l| found.bytes[l] = 0);
            if found.bytes.iter().all(|&bytes| bytes == 0) {
                self.unwritten.remove(&reg);
            }
        }
    }
}

impl Machine<'_> {
    /// Bytes that were never written have been loaded: a fault if more than arithmetic and stores depends on them.
    #[cold]
    pub(super) fn unwritten(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        access: Access,
        region: Region,
        (run, offset): (LaneRun, usize),
    ) -> Outcome<()> {
        let size = access.size as usize;
        let whole = u8::MAX >> (8 - size);
        for n in 0..run.lanes {
            for k in 0..access.count as usize {
                let reg = self.program.lists[access.list as usize + k];
                let place = if run.uniform { 0 } else { n };
                let start = offset + (place * access.count as usize + k) * size;
                let Some(contents) = self.contents(warp, region) else { continue };
                let mut missing = !contents.written.few(start, size) & whole;
                if missing == 0 || reg == NOWHERE {
                    continue;
                }
                if contents.under_way(start, start + size) {
                    let place = self.name(region, start);
                    let message = format!(
                        "read of {size} bytes at {place} before the asynchronous copy was waited for"
                    );
                    return self.fault(FaultKind::Pending, warp, i, run.lane + n, message);
                }
                if self.program.sinks[reg as usize] {
                    let place = self.name(region, start);
                    let byte = missing.trailing_zeros();
                    let message = if missing == whole {
                        format!("read of {size} bytes at {place} that nothing has written")
                    } else {
                        format!("read of {size} bytes at {place}, of which byte {byte} was never written")
                    };
                    return self.fault(FaultKind::Uninitialised, warp, i, run.lane + n, message);
                }
                if access.extend != 0 && missing >> (size - 1) & 1 == 1 {
                    missing |= !whole;
                }
                let origin = Origin::Memory(ByteRange { region, offset: start, bytes: size });
                let noted = warp.unwritten.entry(reg).or_insert(Unwritten { bytes: [0; LANES], pc, origin });
                noted.bytes[run.lane + n] = missing;
            }
        }
        Ok(())
    }

    /// What the result of a map has of unwritten bytes, from what its sources have. A fault if more than arithmetic and
    /// stores depends on the result. Comes before the map, whose destination may be a source.
    #[cold]
    pub(super) fn pass_unwritten(
        &self,
        warp: &mut Warp,
        i: &Instruction,
        map: Map,
        mask: u32,
    ) -> Outcome<()> {
        let sources = [i.a, i.b, i.c, i.e];
        let found = sources.map(|reg| warp.unwritten.get(&reg).copied());
        let Some(first) = found.iter().flatten().next().copied() else {
            warp.forget_unwritten(i.d, mask);
            return Ok(());
        };
        let values = sources.map(|reg| *warp.get(reg));
        let changed = depends(map, &values, &found.map(|noted| noted.map_or([0; LANES], |n| n.bytes)));
        self.note_unwritten(warp, i, mask, Unwritten { bytes: changed, ..first })
    }

    /// Lanes of the register that an instruction writes get what depends on unwritten bytes: a fault if more than arithmetic, shuffles and
    /// stores depends on it in turn.
    pub(super) fn note_unwritten(
        &self,
        warp: &mut Warp,
        i: &Instruction,
        mask: u32,
        found: Unwritten,
    ) -> Outcome<()> {
        let mut noted = warp.unwritten.get(&i.d).map_or([0; LANES], |n| n.bytes);
        lanes(mask).for_each(|l| noted[l] = found.bytes[l]);
        warp.unwritten.remove(&i.d);
        if i.d == NOWHERE || noted.iter().all(|&bytes| bytes == 0) {
            return Ok(());
        }
        if self.program.sinks[i.d as usize]
            && let Some(lane) = lanes(mask).find(|&l| found.bytes[l] != 0)
        {
            let (kind, message) = match found.origin {
                Origin::Lane { .. } => (FaultKind::DivergentShuffle, self.unwritten_read(&found)),
                Origin::Memory(_) => {
                    (FaultKind::Uninitialised, format!("depends on a {}", self.unwritten_read(&found)))
                }
            };
            return self.fault(kind, warp, i, lane, message);
        }
        warp.unwritten.insert(i.d, Unwritten { bytes: noted, ..found });
        Ok(())
    }

    /// What a register carried or computed from unwritten bytes is not written at its new place either.
    #[cold]
    pub(super) fn carry_unwritten(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        access: Access,
        region: Region,
        (lane, n, offset): (usize, usize, usize),
    ) {
        let (size, count) = (access.size as usize, access.count as usize);
        for k in 0..count {
            let reg = self.program.lists[access.list as usize + k];
            let Some(found) = warp.unwritten.get(&reg).copied() else { continue };
            let missing = |l: usize| found.bytes[lane + l] & u8::MAX >> (8 - size);
            let Some(first) = (0..n).find(|&l| missing(l) != 0) else { continue };
            let Some(contents) = self.contents(warp, region) else { continue };
            for l in 0..n {
                let start = offset + (l * count + k) * size;
                for byte in (0..size).filter(|byte| missing(l) >> byte & 1 == 1) {
                    contents.written.unset(start + byte, start + byte + 1);
                }
            }
            if contents.unwritten_by.is_none() {
                let [x, y, z] = self.thread(warp.number, lane + first);
                let place = self.place(&self.program.code[pc as usize]);
                let by = format!(
                    "kernel {:?} at {place}, thread ({x}, {y}, {z}), stored what depends on a {}",
                    self.kernel.name,
                    self.unwritten_read(&found)
                );
                if let Some(contents) = self.contents(warp, region) {
                    contents.unwritten_by = Some(by.into());
                }
            }
        }
    }

    /// The load or the shuffle that read unwritten bytes, for reports.
    pub(super) fn unwritten_read(&self, found: &Unwritten) -> String {
        let line = self.place(&self.program.code[found.pc as usize]);
        match found.origin {
            Origin::Memory(ByteRange { region, offset, bytes }) => {
                let name = self.name(region, offset);
                format!("read of {bytes} bytes at {name} that nothing has written, at {line}")
            }
            Origin::Lane { to, from } => {
                format!(
                    "shuffle in which lane {to} reads from lane {from}, which does not take part, at {line}"
                )
            }
        }
    }
}

/// Which bytes of a map's result depend on the `missing` bytes of its sources.
fn depends(map: Map, values: &[Lanes; 4], missing: &[[u8; LANES]; 4]) -> [u8; LANES] {
    let (mut usual, mut result) = ([0; LANES], [0; LANES]);
    let [a, b, c, e] = values;
    map(a, b, c, e, &mut usual);
    let mut changed = [0; LANES];
    for number in 0..TRIALS {
        let mut tried = *values;
        for (source, tried) in tried.iter_mut().enumerate() {
            for l in (0..LANES).filter(|&l| missing[source][l] != 0) {
                let other = values[if source == 0 { 1 } else { 0 }][l];
                let (open, place) = (bits(missing[source][l]), (source * LANES + l) as u64);
                tried[l] = tried[l] & !open | trial(number, place, other) & open;
            }
        }
        let [a, b, c, e] = &tried;
        map(a, b, c, e, &mut result);
        for l in 0..LANES {
            changed[l] |= bytes(result[l] ^ usual[l]);
        }
    }
    changed
}
