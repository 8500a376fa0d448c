//! Ranges of bytes: what copies and matrices do to memory, with the same checks as loads and stores.

use super::access::Touch;
use super::shadow::Cell;
use super::target::{Target, space_of, within};
use super::warp::Warp;
use super::{Machine, Outcome};
use crate::FaultKind;
use crate::code::{Instruction, Space};
use crate::memory::Contents;

/// Where an instruction touches memory: the instruction's number and itself, and the lane.
#[derive(Clone, Copy)]
pub(crate) struct Site<'i> {
    pub(crate) at: u32,
    pub(crate) i: &'i Instruction,
    pub(crate) lane: usize,
}

/// A range of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) target: Target,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl Machine<'_> {
    /// Finds bytes that an instruction `verb`s, whose address must be a multiple of `align`.
    pub(crate) fn locate(
        &mut self,
        warp: &Warp,
        site: Site,
        verb: &str,
        (space, address): (Space, u64),
        (bytes, align): (usize, usize),
    ) -> Outcome<Range> {
        let found = if space == Space::Generic { space_of(address) } else { space };
        let address = if space == Space::Generic { within(found, address) } else { address };
        if address % align as u64 != 0 {
            return self.misaligned(warp, site.i, site.lane, verb, align, address);
        }
        match self.find(warp, site.at, found, address, bytes as u64) {
            Some((target, offset)) => Ok(Range { target, offset, bytes }),
            None => self.outside(warp, site.i, site.lane, verb, (found, address, bytes as u64)),
        }
    }

    /// Notes a read or a write of a range for the sake of races.
    pub(crate) fn touch(
        &mut self,
        warp: &Warp,
        site: Site,
        range: Range,
        writes: bool,
        flags: Cell,
    ) -> Outcome<()> {
        let Range { target, offset, bytes } = range;
        let shared = matches!(target, Target::Shared { .. });
        let checked = if shared { self.checks.shared_races } else { self.checks.global_races };
        if !checked || bytes == 0 {
            return Ok(());
        }
        let contents = match target {
            Target::Global { space, slot } => self.spaces[space].at(slot).map(|a| &mut a.contents),
            Target::Shared { block } => Some(&mut self.blocks[block].shared),
            _ => None,
        };
        let Some(contents) = contents else { return Ok(()) };
        let touch = Touch {
            at: site.at,
            resident: warp.resident,
            lane: site.lane,
            lanes: 1,
            offset,
            bytes,
            flags,
            shared,
        };
        let found = match writes {
            true => touch.write(&mut self.clocks, contents),
            false => touch.read(&mut self.clocks, contents),
        };
        let Some((cell, lane, wrote)) = found else { return Ok(()) };
        let kind = if shared { FaultKind::SharedRace } else { FaultKind::GlobalRace };
        let what = format!("{bytes} bytes at {}", self.name(target, offset));
        self.race(kind, warp, site.i, (lane, writes), (cell, wrote), &what)
    }

    /// The contents of a range's target.
    pub(crate) fn contents_of(&mut self, target: Target) -> Option<&mut Contents> {
        match target {
            Target::Global { space, slot } => self.spaces[space].at(slot).map(|a| &mut a.contents),
            Target::Shared { block } => Some(&mut self.blocks[block].shared),
            Target::Local | Target::Parameter => None,
        }
    }

    /// The bytes of a range, and which of them were ever written.
    pub(crate) fn copy_out(&mut self, range: Range) -> (Vec<u8>, Vec<bool>) {
        let Range { target, offset, bytes } = range;
        if target == Target::Parameter {
            return (self.parameters[offset..offset + bytes].to_vec(), vec![true; bytes]);
        }
        let Some(contents) = self.contents_of(target) else { return (vec![0; bytes], vec![false; bytes]) };
        let data = contents.data[offset..offset + bytes].to_vec();
        if contents.written.all(offset, offset + bytes) {
            return (data, vec![true; bytes]);
        }
        (data, (offset..offset + bytes).map(|at| contents.written.get(at)).collect())
    }

    /// Reads `N` bytes at an address that is a multiple of `N`, all of which must have been written.
    pub(crate) fn take<const N: usize>(
        &mut self,
        warp: &Warp,
        site: Site,
        verb: &str,
        place: (Space, u64),
    ) -> Outcome<[u8; N]> {
        let range = self.locate(warp, site, verb, place, (N, N))?;
        // Nearly always it lies in the block's own memory, and there is nothing to say.
        if let Target::Shared { block } = range.target {
            let contents = &mut self.blocks[block].shared;
            let (offset, resident) = (range.offset, warp.resident);
            let touch = Touch {
                at: site.at,
                resident,
                lane: site.lane,
                lanes: 1,
                offset,
                bytes: N,
                flags: 0,
                shared: true,
            };
            let quiet = !self.checks.shared_races || touch.read(&mut self.clocks, contents).is_none();
            if quiet && contents.written.all(offset, offset + N) {
                return Ok(bytes_at(&contents.data, offset));
            }
        }
        self.touch(warp, site, range, false, 0)?;
        self.written(warp, site, range)?;
        if range.target == Target::Parameter {
            return Ok(bytes_at(self.parameters, range.offset));
        }
        Ok(self.contents_of(range.target).map_or([0; N], |contents| bytes_at(&contents.data, range.offset)))
    }

    /// Checks that bytes an instruction computes with were written.
    pub(crate) fn written(&mut self, warp: &Warp, site: Site, range: Range) -> Outcome<()> {
        let Range { target, offset, bytes } = range;
        let check = self.checks.uninitialised;
        let Some(contents) = self.contents_of(target) else { return Ok(()) };
        if contents.written.all(offset, offset + bytes) {
            return Ok(());
        }
        let pending = contents.under_way(offset, offset + bytes);
        if !check && !pending {
            return Ok(());
        }
        let place = self.name(target, offset);
        match pending {
            true => {
                let message =
                    format!("read of {bytes} bytes at {place} before the asynchronous copy was waited for");
                self.fault(FaultKind::Pending, warp, site.i, site.lane, message)
            }
            false => {
                let message = format!("read of {bytes} bytes at {place}, some of which nothing has written");
                self.fault(FaultKind::Uninitialised, warp, site.i, site.lane, message)
            }
        }
    }
}

/// The `N` bytes from `at` on, which are there.
fn bytes_at<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&data[at..at + N]);
    bytes
}
