//! [`MemoryStore::restore`]: ranks put a run where the newest checkpoint is of which they hold all parts in memory together, under any
//! layout.
//!
//! Every rank says which parts it holds. Of the newest checkpoint first, each rank says which parts it wants. If all elements are there, the
//! holders send those that another rank wants ([`plan`], pure: every rank computes the same).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use phalanx_nn::{Optimizer, Rule};
use phalanx_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::load::{ReadItem, fill};
use super::memory::{Generation, HeldPart, MemoryStore, all_to_all};
use super::plan::PartInfo;
use super::state::{restore_by, sources_of};
use super::{Settings, Trained};
use crate::all_gather::{all_gather_object, all_ok};
use crate::comm::Comm;
use crate::sharded_tensor::{Overlap, ShardedTensor};
use crate::{Error, Result};

/// What ranks found in their memory.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    /// The settings of the checkpoint that was restored; `None` if the ranks hold none whole.
    pub settings: Option<Settings>,
    /// The ranks that hold nothing, such as those that have been replaced.
    pub lost: Vec<usize>,
    /// The ranks that have sent parts to others.
    pub holders: Vec<usize>,
}

impl Recovery {
    /// No checkpoint is restored.
    fn nothing(all: &[Vec<Described>]) -> Recovery {
        let lost = (0..all.len()).filter(|&rank| all[rank].is_empty()).collect();
        Recovery { settings: None, lost, holders: Vec::new() }
    }
}

/// A checkpoint of which a rank holds parts, as it describes it to the others.
#[derive(Serialize, Deserialize)]
struct Described {
    serial: u64,
    settings: Settings,
    /// With the ranks whose parts they are.
    parts: Vec<(usize, PartInfo)>,
}

impl Described {
    fn new(held: &Generation) -> Described {
        let parts = held.parts.iter().map(|held| (held.owner, held.part.clone())).collect();
        Described { serial: held.serial, settings: held.settings.clone(), parts }
    }
}

/// A part that a rank holds in memory.
struct Source<'a> {
    holder: usize,
    /// Among the parts that the holder has of the checkpoint.
    number: usize,
    owner: usize,
    part: &'a PartInfo,
}

/// Elements of a part that a rank gets from one of the parts of a holder.
#[derive(Debug, PartialEq)]
struct Piece {
    holder: usize,
    number: usize,
    /// Bytes of an element.
    size: usize,
    overlaps: Vec<Overlap>,
}

impl Piece {
    /// The holder's bytes of some of the elements.
    fn bytes<'a>(&self, held: &'a [HeldPart], overlap: &Overlap) -> &'a [u8] {
        &held[self.number].bytes[overlap.from * self.size..][..overlap.count * self.size]
    }
}

impl MemoryStore {
    /// Restores models and the optimizers that train them from the newest checkpoint that the ranks hold in memory together, bit for
    /// bit; copies of others are dropped. Changes nothing if they hold none. All ranks call it.
    ///
    /// # Errors
    /// If a rank does not take part, or a tensor was copied from one of another dtype.
    pub fn restore<R: Rule>(
        &self,
        comm: &Comm,
        trained: &[Trained<'_>],
        optimizers: &mut [&mut Optimizer<R>],
    ) -> Result<Recovery> {
        let found = self.describe(comm)?;
        if found.iter().all(Vec::is_empty) {
            // Without making the optimizers' state.
            return Ok(Recovery::nothing(&found));
        }
        let read = |parts: &[ShardedTensor]| {
            let recovery = self.read_newest(comm, &found, parts)?;
            Ok(recovery.settings.is_some().then_some(recovery))
        };
        Ok(restore_by(trained, optimizers, read)?.unwrap_or(Recovery::nothing(&found)))
    }

    /// [`MemoryStore::restore`] of parts, which must be of the dtypes that were copied.
    ///
    /// # Errors
    /// As [`MemoryStore::restore`].
    pub fn restore_parts(&self, comm: &Comm, parts: &[ShardedTensor]) -> Result<Recovery> {
        self.read_newest(comm, &self.describe(comm)?, parts)
    }

    /// The checkpoints that each rank holds parts of.
    fn describe(&self, comm: &Comm) -> Result<Vec<Vec<Described>>> {
        let own: Vec<Described> = self.lock().held.iter().map(Described::new).collect();
        all_gather_object(comm, &own)
    }

    /// Reads the newest checkpoint into parts of which `all` ranks hold all elements together.
    fn read_newest(&self, comm: &Comm, all: &[Vec<Described>], parts: &[ShardedTensor]) -> Result<Recovery> {
        let serials: BTreeSet<u64> = all.iter().flatten().map(|held| held.serial).collect();
        for &serial in serials.iter().rev() {
            let found: Vec<_> = all.iter().map(|held| held.iter().find(|h| h.serial == serial)).collect();
            if let Some(holders) = self.read(comm, serial, &found, parts)? {
                let settings = found.iter().flatten().next().map(|held| held.settings.clone());
                return Ok(Recovery { settings, holders, ..Recovery::nothing(all) });
            }
        }
        Ok(Recovery::nothing(all))
    }

    /// Reads a checkpoint into parts. Returns the ranks that have sent parts to others, or `None` if elements are missing.
    fn read(
        &self,
        comm: &Comm,
        serial: u64,
        found: &[Option<&Described>],
        parts: &[ShardedTensor],
    ) -> Result<Option<Vec<usize>>> {
        let sources = by_name(found);
        let held_as = |name: &str| sources.get(name).map(|held| held[0].part.dtype);
        let items = sources_of(parts, &held_as);
        let own = items.iter().map(|item| described(item, &held_as)).collect::<Result<Vec<_>>>();
        let wanted = all_ok(comm, all_gather_object(comm, &own.map_err(|e| e.to_string()))?)?;
        let plans = wanted.iter().enumerate().map(|(rank, wanted)| {
            wanted.iter().map(|part| plan(rank, part, found.len(), sources.get(&*part.name)?)).collect()
        });
        let Some(plans) = plans.collect::<Option<Vec<Vec<Vec<Piece>>>>>() else { return Ok(None) };
        let mut copies = self.lock();
        copies.keep_only(serial);
        let held = copies.held.first().map_or(&[][..], |held| &held.parts);
        for round in 0..plans.iter().map(Vec::len).max().unwrap_or(0) {
            let pieces = |rank: usize| plans[rank].get(round).map_or(&[][..], |pieces| pieces);
            let received = exchange(comm, held, pieces)?;
            let own = &wanted[comm.rank()];
            if let (Some(item), Some(part)) = (items.get(round), own.get(round)) {
                let own = pieces(comm.rank());
                fill(&item.part, part.dtype, |to| write(to, own, comm.rank(), held, &received))?;
            }
        }
        let sent = |(rank, plan): (usize, &Vec<Vec<Piece>>)| {
            let holders = plan.iter().flatten().map(|piece| piece.holder);
            holders.filter(|holder| *holder != rank).collect::<Vec<_>>()
        };
        let holders: BTreeSet<usize> = plans.iter().enumerate().flat_map(sent).collect();
        Ok(Some(Vec::from_iter(holders)))
    }
}

/// The parts that ranks hold of a checkpoint, by their names.
fn by_name<'a>(found: &[Option<&'a Described>]) -> BTreeMap<&'a str, Vec<Source<'a>>> {
    let mut sources: BTreeMap<&str, Vec<Source<'_>>> = BTreeMap::new();
    for (holder, held) in found.iter().enumerate() {
        for (number, (owner, part)) in held.iter().flat_map(|held| held.parts.iter().enumerate()) {
            let source = Source { holder, number, owner: *owner, part };
            sources.entry(&part.name).or_default().push(source);
        }
    }
    sources
}

/// The part that an item is read from: as large, in the dtype that is held.
fn described(item: &ReadItem, held_as: &dyn Fn(&str) -> Option<DType>) -> Result<PartInfo> {
    let ReadItem { part, converted } = item;
    let wanted = part.values.dtype();
    let dtype = held_as(&part.name).unwrap_or(wanted);
    if dtype != wanted && !converted {
        let why = format!("tensor {:?} is held in memory as {dtype}, wanted {wanted}", part.name);
        return Err(Error::Config(why));
    }
    Ok(PartInfo { name: part.name.clone(), dtype, place: part.place()?, buffer: part.buffer })
}

/// Where a rank gets the elements of a part from, in order of the holders: from itself first, and else from the next rank that has them. A
/// buffer, in which ranks may differ, is the rank's own if a copy of it is there, and else the first rank's.
fn plan(rank: usize, wanted: &PartInfo, ranks: usize, sources: &[Source<'_>]) -> Option<Vec<Piece>> {
    let distance = |source: &&Source<'_>| {
        let owner = if wanted.buffer { (source.owner != rank, source.owner) } else { (false, 0) };
        (owner, (source.holder + ranks - rank) % ranks)
    };
    let mut nearest: Vec<&Source<'_>> = sources.iter().collect();
    nearest.sort_by_key(distance);
    let all = 0..wanted.place.elements();
    let (mut missing, mut pieces) = (Vec::from_iter((!all.is_empty()).then_some(all)), Vec::new());
    for source in nearest {
        if missing.is_empty() {
            break;
        }
        if source.part.place.whole() != wanted.place.whole() {
            return None;
        }
        let overlaps = take(&mut missing, &source.part.place.overlaps(&wanted.place));
        if !overlaps.is_empty() {
            let Source { holder, number, .. } = *source;
            pieces.push(Piece { holder, number, size: wanted.dtype.size(), overlaps });
        }
    }
    pieces.sort_by_key(|piece| piece.holder);
    missing.is_empty().then_some(pieces)
}

/// The overlaps, cut to elements that are missing; they are no longer missing then. Both are in order of the part that is read.
fn take(missing: &mut Vec<Range<usize>>, overlaps: &[Overlap]) -> Vec<Overlap> {
    let (mut taken, mut left, mut rest) = (Vec::new(), Vec::new(), overlaps);
    for mut range in std::mem::take(missing) {
        while let Some((&Overlap { from, to, count }, later)) = rest.split_first() {
            let (start, end) = (range.start.max(to), range.end.min(to + count));
            if start < end {
                left.extend((range.start < start).then_some(range.start..start));
                taken.push(Overlap { from: from + start - to, to: start, count: end - start });
                range.start = end;
            }
            if to + count > range.end {
                break;
            }
            rest = later;
        }
        left.extend((!range.is_empty()).then_some(range));
    }
    *missing = left;
    taken
}

/// Sends what other ranks get of this one's copies, and returns what this one gets of theirs.
fn exchange<'a>(comm: &Comm, held: &[HeldPart], pieces: impl Fn(usize) -> &'a [Piece]) -> Result<Vec<u8>> {
    let remote = |rank: usize| pieces(rank).iter().filter(move |piece| piece.holder != rank);
    if (0..comm.size()).all(|rank| remote(rank).next().is_none()) {
        return Ok(Vec::new());
    }
    let mut sent = Vec::new();
    for to in 0..comm.size() {
        for piece in remote(to).filter(|piece| piece.holder == comm.rank()) {
            sent.extend(piece.overlaps.iter().map(|overlap| (to, piece.bytes(held, overlap))));
        }
    }
    let wanted =
        |piece: &Piece| (piece.holder, piece.overlaps.iter().map(|o| o.count).sum::<usize>() * piece.size);
    all_to_all(comm, &sent, &Vec::from_iter(remote(comm.rank()).map(wanted)))
}

/// Writes pieces into a tensor of one dimension, from this rank's copies or from what others have sent.
fn write(to: &mut Tensor, pieces: &[Piece], rank: usize, held: &[HeldPart], received: &[u8]) -> Result<()> {
    let (start, mut rest) = (to.offset(), received);
    let mut values = to.write_bytes("load")?;
    for piece in pieces {
        for overlap in &piece.overlaps {
            let bytes = match piece.holder == rank {
                true => piece.bytes(held, overlap),
                false => rest.split_off(..overlap.count * piece.size).unwrap_or_default(),
            };
            values[(start + overlap.to) * piece.size..][..bytes.len()].copy_from_slice(bytes);
        }
    }
    Ok(())
}
