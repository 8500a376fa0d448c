//! Asynchronous copies, and the asynchronous proxy.
//!
//! - `cp.async`: the bytes arrive when the thread waits for them, and not before.
//! - Bulk copies, of plain bytes and of boxes of a tensor. Bytes that go to shared memory under a barrier are there for
//!   a thread that has seen the barrier's phase end; bytes that go to global memory are there at once. What they are
//!   read from must not change before a `wait_group` (see [`super::sources`]).
//! - Bulk copies and operands of `wgmma` reach shared memory by the asynchronous proxy. It sees what a thread wrote
//!   only behind a `fence.proxy.async` that comes after the write and before the use: the writer's own, or that of a
//!   thread that has heard of the write. As in [`super::clocks`] that is kept at the grain of warps.

use super::access::Site;
use super::atomic::updated;
use super::barrier::MbarrierId;
use super::state::{ByteRange, Landing, Machine, Next, Outcome, PendingCopy, Region, Warp};
use crate::FaultKind;
use crate::code::{
    Asynchronous, Atomic, AtomicType, Bulk, Instruction, Matrix, Order, Program, Scope, Send, Space, Update,
};
use crate::lanes::lanes;
use crate::memory::shadow::{ASYNC, STRONG};
use crate::tensor_map::{Fill, TensorMap, TensorType};

impl Machine<'_> {
    pub(crate) fn asynchronous(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        number: u32,
        mask: u32,
    ) -> Outcome<Next> {
        let op = self.program.asynchronous[number as usize];
        match op {
            Asynchronous::Copy { size } => {
                for lane in lanes(mask) {
                    self.copy(warp, Site { pc, i, lane }, size as usize)?;
                }
            }
            Asynchronous::Commit => lanes(mask).for_each(|l| warp.groups[l] += 1),
            Asynchronous::Wait => {
                let n = warp.get(i.a)[mask.trailing_zeros() as usize] as u32;
                let groups = warp.groups;
                self.land(warp, pc, i, |copy| {
                    mask >> copy.lane & 1 == 1 && copy.group + n < groups[copy.lane as usize]
                })?;
            }
            Asynchronous::BulkCommit => lanes(mask).for_each(|l| warp.bulk_groups[l] += 1),
            Asynchronous::BulkWait { read } => {
                let lane = mask.trailing_zeros() as usize;
                let n = warp.get(i.a)[lane] as u32;
                self.bulk_waited(warp, Site { pc, i, lane }, mask, (n, read))?;
            }
            Asynchronous::WaitAll => self.land(warp, pc, i, |copy| mask >> copy.lane & 1 == 1)?,
            _ => {
                let mut next = Next::On;
                for lane in lanes(mask) {
                    if !self.mbarrier_or_bulk(warp, Site { pc, i, lane }, op)? {
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
            region: range.region,
            offset: range.offset,
            data: [0; 16],
            written: u16::MAX,
        };
        if bytes > 0 {
            let source =
                self.locate(warp, site, "asynchronous read", (Space::Global, from), (bytes, size))?;
            self.touch(warp, site, source, false, 0)?;
            if let Some(contents) = self.contents_of(source.region) {
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
        if let Some(contents) = self.contents_of(range.region) {
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
        pc: u32,
        i: &Instruction,
        done: impl Fn(&PendingCopy) -> bool,
    ) -> Outcome<()> {
        let mut copies = std::mem::take(&mut warp.copies);
        for copy in copies.iter().filter(|copy| done(copy)) {
            let (lane, bytes) = (copy.lane as usize, copy.size as usize);
            let range = ByteRange { region: copy.region, offset: copy.offset, bytes };
            self.touch(warp, Site { pc, i, lane }, range, true, 0)?;
            if let Some(contents) = self.contents_of(copy.region) {
                contents.land(copy.offset, &copy.data[..bytes], |byte| copy.written >> byte & 1 == 1);
            }
        }
        copies.retain(|copy| !done(copy));
        warp.copies = copies;
        Ok(())
    }

    /// All copies of a lane have arrived.
    pub(crate) fn land_lane(&mut self, warp: &mut Warp, site: Site) -> Outcome<()> {
        self.land(warp, site.pc, site.i, |copy| copy.lane as usize == site.lane)
    }
}

impl Machine<'_> {
    pub(crate) fn bulk(&mut self, warp: &mut Warp, site: Site, bulk: Bulk) -> Outcome<()> {
        self.idle = 0;
        if bulk.rank > 0 {
            return self.tensor(warp, site, bulk);
        }
        let (i, lane) = (site.i, site.lane);
        let [to, from, size, barrier] = [i.a, i.b, i.c, i.e].map(|reg| warp.get(reg)[lane]);
        let size = size as u32 as usize;
        if !size.is_multiple_of(16) {
            return self.fault(
                FaultKind::Misaligned,
                warp,
                i,
                lane,
                format!("bulk copy of {size} bytes, no multiple of 16"),
            );
        }
        let source = self.locate(warp, site, "bulk read", (bulk.from, from), (size, 16))?;
        self.seen_by_async_proxy(warp, site, "reads", source)?;
        self.touch(warp, site, source, false, 0)?;
        if !bulk.barrier {
            self.reads_from(warp, site, source);
        }
        let (data, written) = self.copy_out(source);
        if bulk.from == Space::Global {
            self.report.global_bytes_read += size as u64;
        }
        let id = if bulk.barrier { Some(self.mbarrier(warp, site, false, barrier)?) } else { None };
        let first = self.locate(warp, site, "bulk write", (bulk.to, to), (size, 16))?;
        for (range, id) in self.destinations(warp, site, bulk, first, id)? {
            self.arrives(warp, site, bulk, range, (data.clone(), written.clone()), id)?;
        }
        Ok(())
    }

    /// `st.async`, `red.async`: values come to the shared memory of a block of the cluster, and their bytes to its barrier.
    pub(crate) fn send(&mut self, warp: &mut Warp, site: Site, send: Send) -> Outcome<()> {
        let [to, barrier] = [site.i.a, site.i.e].map(|reg| warp.get(reg)[site.lane]);
        let (size, count) = (send.size as usize, send.count as usize);
        let registers = &self.program.lists[send.list as usize..][..count];
        let values = registers.iter().map(|&reg| warp.get(reg)[site.lane].to_le_bytes());
        let data: Vec<u8> = values.flat_map(|value| value.into_iter().take(size)).collect();
        let bytes = data.len();
        let id = self.mbarrier(warp, site, false, barrier)?;
        let range = self.locate(warp, site, "asynchronous write", (Space::Shared, to), (bytes, bytes))?;
        self.touch(warp, site, range, true, if send.reduce.is_some() { STRONG } else { 0 })?;
        match (send.reduce, self.contents_of(range.region)) {
            (Some(reduction), Some(contents)) => {
                let place = range.offset..range.offset + bytes;
                let data = reduced(reduction, &contents.data[place], &data);
                contents.land(range.offset, &data, |_| true);
            }
            _ => self.mbarrier_add_landing(id, Landing { range, data, written: vec![true; bytes] }),
        }
        self.mbarrier_publish(warp, id);
        self.mbarrier_bytes(id, -(bytes as i64));
        Ok(())
    }

    /// Where a copy goes: to the same place in every block that a multicast names, under the barrier that each of them has initialised.
    fn destinations(
        &mut self,
        warp: &Warp,
        site: Site,
        bulk: Bulk,
        first: ByteRange,
        id: Option<MbarrierId>,
    ) -> Outcome<Vec<(ByteRange, Option<MbarrierId>)>> {
        if !bulk.multicast {
            return Ok(vec![(first, id)]);
        }
        let mask = warp.get(self.program.lists[bulk.list as usize + bulk.rank as usize])[site.lane] & 0xffff;
        let size = self.cluster_size();
        if mask == 0 || mask >> size != 0 {
            let message = format!("a multicast to the blocks {mask:#b} of a cluster of {size}");
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        let named = (0..size).filter(|rank| mask >> rank & 1 == 1);
        let each = |rank| {
            let block = warp.block / size * size + rank;
            let id = id.map(|id| self.initialised(warp, site, MbarrierId { block, ..id })).transpose()?;
            Ok((ByteRange { region: Region::Shared { block }, ..first }, id))
        };
        named.map(each).collect()
    }

    /// Bytes come to a range: at once, by a reduction, or with the end of a phase.
    fn arrives(
        &mut self,
        warp: &mut Warp,
        site: Site,
        bulk: Bulk,
        range: ByteRange,
        (mut data, written): (Vec<u8>, Vec<bool>),
        id: Option<MbarrierId>,
    ) -> Outcome<()> {
        let strong = if bulk.reduce.is_some() { STRONG } else { 0 };
        self.seen_by_async_proxy(warp, site, "writes", range)?;
        self.touch(warp, site, range, true, strong | ASYNC)?;
        if bulk.to == Space::Global {
            self.report.global_bytes_written += range.bytes as u64;
        }
        let end = range.offset + range.bytes;
        if bulk.reduce.is_some()
            && self.contents_of(range.region).is_some_and(|c| c.under_way(range.offset, end))
        {
            self.written(warp, site, range)?;
        }
        if let (Some((update, kind, size)), Some(contents)) = (bulk.reduce, self.contents_of(range.region)) {
            let old = &contents.data[range.offset..end];
            data = reduced((update, kind, size), old, &data);
        }
        let bytes = range.bytes as i64;
        match id {
            Some(id) => {
                self.mbarrier_add_landing(id, Landing { range, data, written });
                self.mbarrier_publish(warp, id);
                self.mbarrier_bytes(id, -bytes);
            }
            None if bulk.reduce.is_none() => {
                self.stores_to(warp, site.lane, Landing { range, data, written })
            }
            None => {
                if let Some(contents) = self.contents_of(range.region) {
                    contents.land(range.offset, &data, |byte| written[byte]);
                }
            }
        }
        Ok(())
    }

    fn tensor(&mut self, warp: &mut Warp, site: Site, mut bulk: Bulk) -> Outcome<()> {
        let (i, lane) = (site.i, site.lane);
        let [shared, map, barrier] = [i.a, i.b, i.e].map(|reg| warp.get(reg)[lane]);
        let range = self.locate(warp, site, "read of a tensor map", (Space::Generic, map), (128, 64))?;
        let (bytes, _) = self.copy_out(range);
        let Some(map) = TensorMap::decode(&bytes) else {
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, "no tensor map at the address");
        };
        let rank = bulk.rank as usize;
        if map.sides.len() != rank {
            let message = format!("{rank} coordinates for a tensor of {} sides", map.sides.len());
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, message);
        }
        let registers = &self.program.lists[bulk.list as usize..][..rank];
        let start: Vec<i64> = registers.iter().map(|&reg| warp.get(reg)[lane] as u32 as i32 as i64).collect();
        if let Some((update, _, _)) = bulk.reduce {
            bulk.reduce = Some(typed(update, map.kind));
        }
        let pieces = pieces(&map, &start);
        let total = pieces.iter().map(|piece| piece.bytes).sum::<usize>();
        let align = if map.swizzle == crate::Swizzle::None { 128 } else { 256 };
        let verb = if bulk.to == Space::Shared { "tensor write" } else { "tensor read" };
        let first = self.locate(warp, site, verb, (Space::Shared, shared), (total, align.min(128)))?;
        if bulk.to == Space::Shared {
            let id = self.mbarrier(warp, site, false, barrier)?;
            let (data, written) = self.gather(warp, site, &map, &pieces, first.offset)?;
            for (range, id) in self.destinations(warp, site, bulk, first, Some(id))? {
                self.arrives(warp, site, bulk, range, (data.clone(), written.clone()), id)?;
            }
            return Ok(());
        }
        self.seen_by_async_proxy(warp, site, "reads", first)?;
        self.touch(warp, site, first, false, 0)?;
        self.reads_from(warp, site, first);
        let (data, written) = self.copy_out(first);
        for piece in pieces.iter().filter(|piece| piece.inside) {
            let place = |byte: usize| placed(&map, first.offset, piece.shared + byte);
            let part = (0..piece.bytes).map(|byte| data[place(byte)]).collect();
            let known = (0..piece.bytes).map(|byte| written[place(byte)]).collect();
            let (bytes, align) = (piece.bytes, map.kind.bytes() as usize);
            let range =
                self.locate(warp, site, "tensor write", (Space::Global, piece.global), (bytes, align))?;
            self.arrives(warp, site, bulk, range, (part, known), None)?;
        }
        Ok(())
    }

    /// The bytes of a box as they lie in shared memory.
    fn gather(
        &mut self,
        warp: &mut Warp,
        site: Site,
        map: &TensorMap,
        pieces: &[Piece],
        start: usize,
    ) -> Outcome<(Vec<u8>, Vec<bool>)> {
        let total = pieces.iter().map(|piece| piece.bytes).sum();
        let (mut data, mut written) = (vec![0; total], vec![true; total]);
        for piece in pieces {
            let mut part = outside(map, piece.bytes);
            let mut known = vec![true; piece.bytes];
            if piece.inside {
                let (bytes, align) = (piece.bytes, map.kind.bytes() as usize);
                let range =
                    self.locate(warp, site, "tensor read", (Space::Global, piece.global), (bytes, align))?;
                self.touch(warp, site, range, false, 0)?;
                (part, known) = self.copy_out(range);
                self.report.global_bytes_read += bytes as u64;
            }
            for byte in 0..piece.bytes {
                let place = placed(map, start, piece.shared + byte);
                (data[place], written[place]) = (part[byte], known[byte]);
            }
        }
        Ok((data, written))
    }
}

/// A run of elements of a box: where it is in shared memory, and in global memory if it is inside of the tensor.
struct Piece {
    shared: usize,
    global: u64,
    bytes: usize,
    inside: bool,
}

/// Where a byte of a box is within the box's range once it is permuted. The permutation is of addresses, not of
/// offsets in the box.
fn placed(map: &TensorMap, start: usize, byte: usize) -> usize {
    map.swizzle.apply((start + byte) as u64) as usize - start
}

fn outside(map: &TensorMap, bytes: usize) -> Vec<u8> {
    match (map.fill, map.kind) {
        (Fill::Zero, _) => vec![0; bytes],
        (Fill::Nan, TensorType::F16) => [0xff, 0x7f].repeat(bytes / 2),
        (Fill::Nan, TensorType::Bf16) => [0xff, 0x7f].repeat(bytes / 2),
        (Fill::Nan, TensorType::F64) => f64::NAN.to_le_bytes().repeat(bytes / 8),
        (Fill::Nan, _) => 0x7fff_ffffu32.to_le_bytes().repeat(bytes / 4),
    }
}

/// The elements of a box one by one, those that lie behind each other joined.
fn pieces(map: &TensorMap, start: &[i64]) -> Vec<Piece> {
    let rank = start.len();
    let size = map.kind.bytes() as usize;
    let sides: Vec<u64> = (0..rank).map(|a| (map.window[a] as u64).div_ceil(map.steps[a] as u64)).collect();
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = vec![0u64; rank];
    for number in 0..sides.iter().product::<u64>() as usize {
        let place: Vec<i64> = (0..rank).map(|a| start[a] + (at[a] * map.steps[a] as u64) as i64).collect();
        let inside = (0..rank).all(|a| place[a] >= 0 && (place[a] as u64) < map.sides[a]);
        let mut global = map.address.wrapping_add_signed(place[0] * size as i64);
        for a in 1..rank {
            global = global.wrapping_add_signed(place[a] * map.strides[a - 1] as i64);
        }
        match pieces.last_mut() {
            Some(last) if last.inside == inside && (!inside || last.global + last.bytes as u64 == global) => {
                last.bytes += size;
            }
            _ => pieces.push(Piece { shared: number * size, global, bytes: size, inside }),
        }
        for a in 0..rank {
            at[a] += 1;
            if at[a] < sides[a] {
                break;
            }
            at[a] = 0;
        }
    }
    pieces
}

fn typed(update: Update, kind: TensorType) -> (Update, AtomicType, u8) {
    let number = match kind {
        TensorType::F16 => AtomicType::F16,
        TensorType::Bf16 => AtomicType::Bf16,
        TensorType::F32 | TensorType::Tf32 => AtomicType::F32,
        TensorType::F64 => AtomicType::F64,
        TensorType::I32 | TensorType::I64 => AtomicType::Signed,
        TensorType::U8 | TensorType::U16 | TensorType::U32 | TensorType::U64 => AtomicType::Bits,
    };
    (update, number, kind.bytes() as u8)
}

fn reduced((update, kind, size): (Update, AtomicType, u8), old: &[u8], new: &[u8]) -> Vec<u8> {
    let atomic = Atomic {
        space: Space::Global,
        update,
        kind,
        size,
        order: Order::Relaxed,
        scope: Scope::Device,
        count: 1,
        list: 0,
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |value, &byte| value << 8 | byte as u64);
    let size = size as usize;
    let pairs = old.chunks_exact(size).zip(new.chunks_exact(size));
    pairs
        .flat_map(|(old, new)| updated(atomic, number(old), number(new), 0).to_le_bytes()[..size].to_vec())
        .collect()
}

impl Program {
    /// Whether anything in it uses shared memory by the asynchronous proxy: bulk copies, `wgmma`.
    pub(crate) fn uses_async_proxy(&self) -> bool {
        self.matrices.iter().any(|m| matches!(m, Matrix::Warpgroup(_)))
            || self.asynchronous.iter().any(|a| matches!(a, Asynchronous::Bulk(_)))
    }
}

impl Machine<'_> {
    pub(crate) fn proxy_fence(&mut self, warp: &Warp, mask: u32) {
        if self.checks.global_races || self.checks.shared_races {
            self.clocks.proxy_fence(warp.resident, mask, mask == warp.live);
        }
    }

    /// Checks that the asynchronous proxy, which `verb`s bytes of shared memory, sees what was written there.
    pub(crate) fn seen_by_async_proxy(
        &mut self,
        warp: &Warp,
        site: Site,
        verb: &str,
        range: ByteRange,
    ) -> Outcome<()> {
        let Region::Shared { block } = range.region else { return Ok(()) };
        if !self.checks.shared_races {
            return Ok(());
        }
        let writes = self.blocks[block].shared.shadow.writes(range.offset, range.bytes);
        let Some(&write) = writes.iter().find(|write| self.clocks.unseen(warp.resident, **write)) else {
            return Ok(());
        };
        let bytes = range.bytes;
        let what =
            format!("{verb} {bytes} bytes at {} beside the threads", self.name(range.region, range.offset));
        let party = self.party(warp, write);
        let message = format!("{what}, written {party}, with no fence.proxy.async between");
        self.fault(FaultKind::MissingFence, warp, site.i, site.lane, message)
    }
}
