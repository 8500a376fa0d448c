//! [`MemorySaver`]: checkpoints in the memory of the ranks' hosts, from which a run goes on after a rank has died.
//!
//! ```text
//! save() ─► thread: copy the own parts ─► all ranks say so ─► parts without a replica go to a partner ─► held
//! wait() ◄─                               all ranks say so ─► the copy before is dropped
//! ```
//!
//! A rank holds the newer copy once its partner's parts have all come. It drops the copy before when all ranks hold the newer one. So at
//! every moment there is a step of which all ranks have held copies, whichever rank dies. A part that another process has alike (a data-parallel
//! replica) is not sent: the replica's copy stands for it. Source: Wang and others (2023), Gemini: fast failure recovery in
//! distributed training with in-memory checkpoints.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_tensor::{DType, Device, Tensor, unpoisoned};
use serde::{Deserialize, Serialize};

use super::background::Background;
use super::plan::PartInfo;
use super::saver::VersionedPart;
use super::{BLOCK, Settings};
use crate::all_gather::{all_gather_object, all_ok};
use crate::comm::{Call, Comm};
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result};

/// Bytes of a message to a partner, unless a part is larger.
const MESSAGE: usize = 16 << 20;

/// The device of the messages. No rank computes on it.
const HOST: Device = Device::Cpu(1023);

/// A rank's copies of checkpoints in the host's memory. It outlives the run that makes them. Clones are handles on the same copies.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<Copies>>);

#[derive(Debug, Default)]
pub(super) struct Copies {
    /// In the order in which they were made: one, or two while the newer one is not held by all ranks.
    pub(super) held: Vec<Generation>,
    /// The memory of a copy that was dropped, for the next one.
    spare: Vec<Vec<u8>>,
}

/// The copies of one checkpoint.
#[derive(Debug)]
pub(super) struct Generation {
    /// Checkpoints in memory are numbered, the same on all ranks: a run that goes back to an earlier step makes its copies again.
    pub(super) serial: u64,
    pub(super) settings: Settings,
    pub(super) parts: Vec<HeldPart>,
}

/// The copy of a part.
#[derive(Debug)]
pub(super) struct HeldPart {
    /// The rank whose part it is.
    pub(super) owner: usize,
    pub(super) part: PartInfo,
    pub(super) bytes: Vec<u8>,
}

impl MemoryStore {
    /// Drops all copies.
    pub fn clear(&self) {
        *self.lock() = Copies::default();
    }

    /// The bytes of the copies that it holds.
    pub fn bytes(&self) -> usize {
        self.lock().held.iter().flat_map(|held| &held.parts).map(|part| part.bytes.len()).sum()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Copies> {
        unpoisoned(self.0.lock())
    }
}

impl Copies {
    /// Drops all copies but those of one checkpoint, and keeps their memory for the next.
    pub(super) fn keep_only(&mut self, serial: u64) {
        let dropped = self.held.extract_if(.., |held| held.serial != serial).flat_map(|held| held.parts);
        self.spare = dropped.map(|part| part.bytes).collect();
    }

    /// Memory for so many bytes.
    fn room(&mut self, bytes: usize) -> Vec<u8> {
        let mut room = match self.spare.iter().position(|spare| spare.capacity() == bytes) {
            Some(fits) => self.spare.swap_remove(fits),
            None => Vec::with_capacity(bytes),
        };
        room.clear();
        room
    }
}

/// Where a rank is, by which its partner is chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The machine's name.
    pub machine: String,
    /// The process, by a text that no other process has.
    pub process: String,
}

impl Host {
    /// How much is gone if one of two ranks dies and the other lives: 0 for threads of a process, 2 for ranks of two machines.
    fn distance(&self, other: &Host) -> usize {
        match self.machine == other.machine {
            true => usize::from(self.process != other.process),
            false => 2,
        }
    }
}

/// Makes copies of checkpoints in memory, in the background. Every rank has one.
#[derive(Debug)]
pub struct MemorySaver {
    comm: Comm,
    store: MemoryStore,
    ranks: Arc<Mutex<Ranks>>,
    background: Background,
}

/// What a rank knows of all ranks.
#[derive(Debug)]
struct Ranks {
    hosts: Vec<Host>,
    /// A rank's partner has the rank's number and this many more; `None` if nothing is sent.
    shift: Option<usize>,
    /// The parts of all ranks in the last checkpoint.
    parts: Vec<Vec<PartInfo>>,
    /// Of each rank, the numbers of the parts that it sends in each message.
    messages: Vec<Vec<Vec<usize>>>,
}

impl MemorySaver {
    /// Makes copies in `store`. With `redundant`, a part that no other process has alike is copied to a partner too, on another machine if
    /// the ranks are on several. All ranks call this, in the same order relative to the other groups that they make.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn new(comm: &Comm, store: MemoryStore, host: &Host, redundant: bool) -> Result<MemorySaver> {
        let comm = comm.group(&(0..comm.size()).collect::<Vec<_>>())?;
        let hosts = all_gather_object(&comm, host)?;
        let shift = if redundant { shift(&hosts) } else { None };
        let ranks = Ranks { shift, parts: vec![Vec::new(); hosts.len()], messages: Vec::new(), hosts };
        Ok(MemorySaver { comm, store, ranks: Arc::new(Mutex::new(ranks)), background: Background::default() })
    }

    /// Begins to copy the parts of all ranks; first waits for the copies before. All ranks call it, each with the settings of the run. Until
    /// [`MemorySaver::wait`] has returned, the tensors must not be written, as in [`Saver::save`](super::Saver::save).
    ///
    /// # Errors
    /// The error of the previous copies, if they failed.
    pub fn save(&mut self, parts: Vec<ShardedTensor>, settings: Settings) -> Result<()> {
        self.wait()?;
        let parts =
            parts.into_iter().map(|part| VersionedPart::new(part, false)).collect::<Result<Vec<_>>>()?;
        let (comm, store, ranks) = (self.comm.clone(), self.store.clone(), self.ranks.clone());
        let job = move || {
            let mut ranks = unpoisoned(ranks.lock());
            copy(&comm, &store, &mut ranks, &parts, settings)
        };
        self.background.start(&self.comm, "copies a checkpoint", job)
    }

    /// Waits until all ranks hold the copies that are under way, if any are.
    ///
    /// # Errors
    /// The error of any rank, on every rank: a tensor that was written meanwhile, a rank that is gone. The copies before are still held then.
    pub fn wait(&mut self) -> Result<()> {
        self.background.wait()
    }
}

/// A rank's news before copies are exchanged.
#[derive(Serialize, Deserialize)]
struct News {
    /// The highest number of its copies.
    serial: u64,
    /// The parts, if they are others than in the checkpoint before.
    parts: Option<Vec<PartInfo>>,
}

/// Copies a checkpoint.
fn copy(
    comm: &Comm,
    store: &MemoryStore,
    ranks: &mut Ranks,
    parts: &[VersionedPart],
    settings: Settings,
) -> Result<()> {
    let own = comm.rank();
    let copied = copied(store, own, parts);
    let news = copied.as_ref().map_err(|error: &Error| error.to_string()).map(|copied| {
        let infos = copied.iter().map(|copy| copy.part.clone()).collect();
        let serial = store.lock().held.iter().map(|held| held.serial).max().unwrap_or(0);
        News { serial, parts: (infos != ranks.parts[own]).then_some(infos) }
    });
    // No rank holds the copies before all have done the step and have said so.
    let news = all_ok(comm, all_gather_object(comm, &news)?)?;
    let serial = 1 + news.iter().map(|news| news.serial).max().unwrap_or(0);
    let changed = news.iter().any(|news| news.parts.is_some());
    for (known, news) in ranks.parts.iter_mut().zip(news) {
        *known = news.parts.unwrap_or(std::mem::take(known));
    }
    if changed {
        ranks.messages = (0..comm.size()).map(|rank| ranks.messages(rank)).collect();
    }
    let mut parts = copied?;
    parts.extend(ranks.exchange(comm, store, &parts)?);
    store.lock().held.push(Generation { serial, settings, parts });
    comm.barrier()?;
    store.lock().keep_only(serial);
    Ok(())
}

/// Copies of a rank's own parts.
fn copied(store: &MemoryStore, rank: usize, parts: &[VersionedPart]) -> Result<Vec<HeldPart>> {
    let copy = |part: &VersionedPart| {
        let info = part.describe()?;
        let (elements, size) = (info.place.elements(), info.dtype.size());
        let mut bytes = store.lock().room(elements * size);
        for start in (0..elements).step_by(BLOCK / size) {
            part.read(start..elements.min(start + BLOCK / size), |piece| bytes.extend_from_slice(piece))?;
        }
        Ok(HeldPart { owner: rank, part: info, bytes })
    };
    parts.iter().map(copy).collect()
}

impl Ranks {
    /// The numbers of a rank's parts that no other process has alike. Buffers may differ between ranks.
    fn without_replica(&self, rank: usize) -> Vec<usize> {
        let is_apart = |other: &usize| {
            let one_process = self.hosts.iter().all(|host| host.distance(&self.hosts[0]) == 0);
            *other != rank && (one_process || self.hosts[rank].distance(&self.hosts[*other]) > 0)
        };
        let elsewhere = (0..self.parts.len()).filter(is_apart).flat_map(|other| &self.parts[other]);
        let elsewhere: HashSet<&PartInfo> = elsewhere.filter(|part| !part.buffer).collect();
        let is_alone = |(_, part): &(usize, &PartInfo)| !elsewhere.contains(*part);
        self.parts[rank].iter().enumerate().filter(is_alone).map(|(number, _)| number).collect()
    }

    /// Sends the own parts that have no replica to the partner. Returns copies of those that have come from another rank.
    fn exchange(&self, comm: &Comm, store: &MemoryStore, own: &[HeldPart]) -> Result<Vec<HeldPart>> {
        let Some(shift) = self.shift else { return Ok(Vec::new()) };
        let (rank, size) = (comm.rank(), comm.size());
        let (to, from) = ((rank + shift) % size, (rank + size - shift) % size);
        let sent = &self.messages;
        let mut received = Vec::new();
        for round in 0..sent.iter().map(Vec::len).max().unwrap_or(0) {
            let message = |rank: usize| sent[rank].get(round).map_or(&[][..], |numbers| numbers);
            let out: Vec<_> = message(rank).iter().map(|number| (to, &own[*number].bytes[..])).collect();
            let parts: Vec<_> = message(from).iter().map(|number| &self.parts[from][*number]).collect();
            let wanted: Vec<_> = parts.iter().map(|part| (from, bytes_of(part))).collect();
            let bytes = all_to_all(comm, &out, &wanted)?;
            let mut rest = &bytes[..];
            for part in parts {
                let (own, others) = rest.split_at(bytes_of(part));
                rest = others;
                let mut room = store.lock().room(own.len());
                room.extend_from_slice(own);
                received.push(HeldPart { owner: from, part: part.clone(), bytes: room });
            }
        }
        Ok(received)
    }

    /// The parts of a rank that have no replica, as messages of about [`MESSAGE`] bytes.
    fn messages(&self, rank: usize) -> Vec<Vec<usize>> {
        let (mut messages, mut room): (Vec<Vec<usize>>, usize) = (Vec::new(), 0);
        for number in self.without_replica(rank) {
            let bytes = bytes_of(&self.parts[rank][number]);
            match messages.last_mut().filter(|_| bytes <= room) {
                Some(message) => message.push(number),
                None => {
                    messages.push(vec![number]);
                    room = MESSAGE.max(bytes);
                }
            }
            room -= bytes;
        }
        messages
    }
}

fn bytes_of(part: &PartInfo) -> usize {
    part.place.elements() * part.dtype.size()
}

/// Sends bytes to ranks, and returns as many from ranks as are wanted; both in order of the ranks. All ranks call it.
pub(super) fn all_to_all(comm: &Comm, to: &[(usize, &[u8])], from: &[(usize, usize)]) -> Result<Vec<u8>> {
    let (mut sent, mut wanted) = (vec![0; comm.size()], vec![0; comm.size()]);
    to.iter().for_each(|(rank, bytes)| sent[*rank] += bytes.len());
    from.iter().for_each(|(rank, count)| wanted[*rank] += count);
    let input: Vec<u8> = to.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
    let input = Tensor::from_slice(&input, &[input.len()], HOST)?;
    let output = Tensor::empty(&[wanted.iter().sum()], DType::U8, HOST)?;
    comm.run(Call::all_to_all_uneven(output.clone(), &wanted, input, &sent))?;
    Ok(output.to_bytes()?)
}

/// How far a rank's partner is, so that as many partners as possible are on other machines, and else in other processes.
fn shift(hosts: &[Host]) -> Option<usize> {
    let ranks = hosts.len();
    let distances =
        |shift: usize| (0..ranks).map(move |rank| hosts[rank].distance(&hosts[(rank + shift) % ranks]));
    let near = |shift: &usize| {
        let near = |least| distances(*shift).filter(|distance| *distance < least).count();
        (near(2), near(1))
    };
    (1..ranks).min_by_key(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(machines: &[usize]) -> Vec<Host> {
        let host = |(rank, machine): (usize, &usize)| Host {
            machine: machine.to_string(),
            process: rank.to_string(),
        };
        machines.iter().enumerate().map(host).collect()
    }

    #[test]
    fn a_partner_is_on_another_machine_if_there_is_one() {
        assert_eq!(shift(&hosts(&[0])), None);
        assert_eq!(shift(&hosts(&[0, 0, 0])), Some(1));
        assert_eq!(shift(&hosts(&[0, 0, 1, 1])), Some(2));
        assert_eq!(shift(&hosts(&[0, 1, 0, 1])), Some(1));
        assert_eq!(shift(&hosts(&[0, 0, 0, 1, 1, 1])), Some(3));
    }
}
