//! `cp.async`: copies whose bytes arrive when the thread waits for them, and not before.

use super::bytes::{Range, Site};
use super::run::Next;
use super::target::Target;
use super::warp::{Warp, lanes};
use super::{Machine, Outcome};
use crate::code::{Asynchronous, Instruction, Space};

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingCopy {
    lane: u8,
    size: u8,
    /// The lane's group that it belongs to.
    group: u32,
    target: Target,
    offset: usize,
    data: [u8; 16],
    written: u16,
}

impl Machine<'_> {
    pub(crate) fn asynchronous(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        number: u32,
        mask: u32,
    ) -> Outcome<Next> {
        let op = self.program.asynchronous[number as usize];
        match op {
            Asynchronous::Copy { size } => {
                for lane in lanes(mask) {
                    self.copy(warp, Site { at, i, lane }, size as usize)?;
                }
            }
            Asynchronous::Commit => lanes(mask).for_each(|l| warp.groups[l] += 1),
            Asynchronous::Wait => {
                let n = warp.get(i.a)[mask.trailing_zeros() as usize] as u32;
                let groups = warp.groups;
                self.land(warp, at, i, |copy| {
                    mask >> copy.lane & 1 == 1 && copy.group + n < groups[copy.lane as usize]
                })?;
            }
            Asynchronous::WaitAll => self.land(warp, at, i, |copy| mask >> copy.lane & 1 == 1)?,
            _ => {
                let mut next = Next::On;
                for lane in lanes(mask) {
                    if !self.beside(warp, Site { at, i, lane }, op)? {
                        next = Next::Yield;
                    }
                }
                return Ok(next);
            }
        }
        Ok(Next::On)
    }

    fn copy(&mut self, warp: &mut Warp, site: Site, size: usize) -> Outcome<()> {
        let (lane, i) = (site.lane, site.i);
        let (to, from) = (warp.get(i.a)[lane], warp.get(i.b)[lane]);
        let bytes = (warp.get(i.c)[lane] as u32 as usize).min(size);
        let range = self.locate(warp, site, "asynchronous write", (Space::Shared, to), (size, size))?;
        let mut copy = PendingCopy {
            lane: lane as u8,
            size: size as u8,
            group: warp.groups[lane],
            target: range.target,
            offset: range.offset,
            data: [0; 16],
            written: u16::MAX,
        };
        if bytes > 0 {
            let source =
                self.locate(warp, site, "asynchronous read", (Space::Global, from), (bytes, size))?;
            self.touch(warp, site, source, false, 0)?;
            if let Some(contents) = self.contents_of(source.target) {
                copy.data[..bytes].copy_from_slice(&contents.data[source.offset..source.offset + bytes]);
                for byte in
                    if contents.written.all(source.offset, source.offset + bytes) { 0..0 } else { 0..bytes }
                {
                    copy.written &= !((!contents.written.get(source.offset + byte) as u16) << byte);
                }
            }
            self.report.global_bytes_read += bytes as u64;
        }
        self.touch(warp, site, range, true, 0)?;
        if let Some(contents) = self.contents_of(range.target) {
            contents.announce(range.offset, range.offset + size);
        }
        warp.copies.push(copy);
        self.idle = 0;
        Ok(())
    }

    /// Copies that a thread has waited for have arrived.
    pub(crate) fn land(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        done: impl Fn(&PendingCopy) -> bool,
    ) -> Outcome<()> {
        let mut copies = std::mem::take(&mut warp.copies);
        for copy in copies.iter().filter(|copy| done(copy)) {
            let (lane, bytes) = (copy.lane as usize, copy.size as usize);
            let range = Range { target: copy.target, offset: copy.offset, bytes };
            self.touch(warp, Site { at, i, lane }, range, true, 0)?;
            if let Some(contents) = self.contents_of(copy.target) {
                contents.land(copy.offset, &copy.data[..bytes], |byte| copy.written >> byte & 1 == 1);
            }
        }
        copies.retain(|copy| !done(copy));
        warp.copies = copies;
        Ok(())
    }

    /// All copies of a lane have arrived.
    pub(crate) fn land_lane(&mut self, warp: &mut Warp, site: Site) -> Outcome<()> {
        self.land(warp, site.at, site.i, |copy| copy.lane as usize == site.lane)
    }
}
