//! [`Task`]: a collective under way, as one rank sees it. The driver calls [`Task::progress`] when messages have come; the task
//! sends this rank's messages and combines the parts of the transfers that this rank owns.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_kernels::combine::combine;
use phalanx_tensor::Tensor;

use super::{Address, Frame, FrameKind, Wire};
use crate::comm::pending::Ticket;
use crate::comm::plan::{Segment, Side, Transfer, plan};
use crate::comm::{Error, Result, Signature};

/// Messages that have come and were not yet wanted, by sender (of the whole run) and address.
pub(super) type Inbox = HashMap<(usize, Address), Frame>;

/// A collective under way.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) ticket: Arc<Ticket>,
    pub(super) ranks: Arc<Vec<usize>>,
    me: usize,
    phase: Phase,
    plan: Vec<Transfer>,
    /// Messages without which it cannot go on.
    awaited: Vec<(usize, Address)>,
    /// A rank that came to this call after all others, as far as is known; at first this one.
    last: usize,
    /// When the phase began.
    pub(super) since: Instant,
}

/// What a task has sent last; it goes on when the others' messages of that phase have come.
#[derive(Clone, Copy, Debug)]
enum Phase {
    New,
    Check,
    Parts,
    Results,
}

impl Task {
    pub(super) fn new(ticket: Arc<Ticket>, ranks: Arc<Vec<usize>>, me: usize) -> Task {
        let (plan, awaited, last) = (vec![], vec![], ticket.rank);
        Task { ticket, ranks, me, phase: Phase::New, plan, awaited, last, since: Instant::now() }
    }

    /// The ranks whose messages are awaited.
    pub(super) fn missing(&self, inbox: &Inbox) -> Vec<usize> {
        let absent = self.awaited.iter().filter(|key| !inbox.contains_key(key));
        let mut ranks: Vec<usize> = absent.map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Goes on as far as the messages allow; true when done.
    pub(super) fn progress(&mut self, inbox: &mut Inbox, wire: &mut dyn Wire) -> Result<bool> {
        loop {
            if let Some((rank, _)) = self.awaited.iter().find(|key| !inbox.contains_key(key)) {
                self.last = *rank;
                return Ok(false);
            }
            self.since = Instant::now();
            match self.phase {
                Phase::New => self.send_signature(wire)?,
                Phase::Check => {
                    self.ticket.completed_by(self.last);
                    self.send_parts(inbox, wire)?;
                }
                Phase::Parts => self.send_results(inbox, wire)?,
                Phase::Results => {
                    self.receive_results(inbox)?;
                    return Ok(true);
                }
            }
        }
    }

    fn address(&self, kind: FrameKind, part: usize) -> Address {
        Address { kind, group: self.ticket.group, sequence: self.ticket.sequence, part }
    }

    /// A message of this task from a member of the group.
    fn key(&self, from: usize, kind: FrameKind, part: usize) -> (usize, Address) {
        (self.ranks[from], self.address(kind, part))
    }

    fn send(
        &self,
        wire: &mut dyn Wire,
        to: usize,
        kind: FrameKind,
        part: usize,
        content: &[u8],
    ) -> Result<()> {
        wire.send(self.ranks[to], self.address(kind, part).frame(content))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.ranks.len()).filter(move |rank| *rank != me)
    }

    fn send_signature(&mut self, wire: &mut dyn Wire) -> Result<()> {
        let mine = self.ticket.call.signature.encode();
        self.others().try_for_each(|rank| self.send(wire, rank, FrameKind::Check, 0, &mine))?;
        self.awaited = self.others().map(|rank| self.key(rank, FrameKind::Check, 0)).collect();
        self.phase = Phase::Check;
        Ok(())
    }

    fn send_parts(&mut self, inbox: &mut Inbox, wire: &mut dyn Wire) -> Result<()> {
        let call = &self.ticket.call;
        let mut signatures = vec![];
        for (rank, &world) in self.ranks.iter().enumerate() {
            signatures.push(match inbox.remove(&self.key(rank, FrameKind::Check, 0)) {
                _ if rank == self.me => call.signature.clone(),
                None => call.signature.clone(),
                Some(frame) => Signature::decode(frame.content()).ok_or_else(|| malformed(world))?,
            });
        }
        let signatures: Vec<&Signature> = signatures.iter().collect();
        if let Some(error) = Signature::mismatch(&signatures, &self.ranks, self.ticket.sequence) {
            return Err(error);
        }
        let in_place: Vec<bool> = (0..self.ranks.len())
            .map(|rank| rank == self.me && self.ticket.tensor(Side::Input).is_none())
            .collect();
        self.plan = plan(&signatures, &in_place);
        self.awaited.clear();
        for (part, transfer) in self.plan.iter().enumerate() {
            for source in &transfer.sources {
                if transfer.owner == self.me && source.rank != self.me {
                    self.awaited.push(self.key(source.rank, FrameKind::Part, part));
                } else if transfer.owner != self.me && source.rank == self.me {
                    self.send(wire, transfer.owner, FrameKind::Part, part, &self.read(source)?)?;
                }
            }
        }
        self.phase = Phase::Parts;
        Ok(())
    }

    fn send_results(&mut self, inbox: &mut Inbox, wire: &mut dyn Wire) -> Result<()> {
        self.awaited.clear();
        for (part, transfer) in self.plan.iter().enumerate() {
            if transfer.owner == self.me {
                let result = self.combined(part, transfer, inbox)?;
                for dest in &transfer.dests {
                    match dest.rank == self.me {
                        true => self.write(dest, &result)?,
                        false => self.send(wire, dest.rank, FrameKind::Result, part, &result)?,
                    }
                }
            } else if transfer.dests.iter().any(|dest| dest.rank == self.me) {
                self.awaited.push(self.key(transfer.owner, FrameKind::Result, part));
            }
        }
        self.phase = Phase::Results;
        Ok(())
    }

    fn combined(&self, part: usize, transfer: &Transfer, inbox: &mut Inbox) -> Result<Vec<u8>> {
        let mut parts = vec![];
        for source in &transfer.sources {
            parts.push(match inbox.remove(&self.key(source.rank, FrameKind::Part, part)) {
                Some(frame) => frame,
                None => Frame(Address::plain(FrameKind::Part).frame(&self.read(source)?)),
            });
        }
        let contents: Vec<&[u8]> = parts.iter().map(Frame::content).collect();
        let length = contents[0].len();
        if let Some(at) = contents.iter().position(|content| content.len() != length) {
            return Err(malformed(self.ranks[transfer.sources[at].rank]));
        }
        let call = &self.ticket.call;
        Ok(match call.signature.by.filter(|_| contents.len() > 1) {
            Some(by) => combine(call.dtype(), by, &contents),
            None => contents[0].to_vec(),
        })
    }

    fn receive_results(&mut self, inbox: &mut Inbox) -> Result<()> {
        for (part, transfer) in self.plan.iter().enumerate().filter(|(_, t)| t.owner != self.me) {
            if let Some(dest) = transfer.dests.iter().find(|dest| dest.rank == self.me)
                && let Some(frame) = inbox.remove(&self.key(transfer.owner, FrameKind::Result, part))
            {
                self.write(dest, frame.content())?;
            }
        }
        Ok(())
    }

    /// The bytes of a place of this rank; none of a tensor without any.
    fn read(&self, place: &Segment) -> Result<Vec<u8>> {
        match self.ticket.tensor(place.side) {
            Some(tensor) => read(&tensor, place.range.clone(), self.ticket.call.kind().name()),
            None => Ok(vec![]),
        }
    }

    fn write(&self, place: &Segment, bytes: &[u8]) -> Result<()> {
        let Some(tensor) = self.ticket.tensor(place.side) else { return Ok(()) };
        write(&tensor, place.range.clone(), bytes, self.ticket.call.kind().name())
    }
}

/// A message that makes no sense.
pub(super) fn malformed(rank: usize) -> Error {
    Error::Lost { rank, why: "it sent a message of the wrong size or form".into() }
}

/// The bytes of some elements of a contiguous tensor.
pub(super) fn read(tensor: &Tensor, range: std::ops::Range<usize>, op: &'static str) -> Result<Vec<u8>> {
    if tensor.device().is_meta() {
        return Ok(vec![]);
    }
    let (size, first) = (tensor.dtype().size(), tensor.offset());
    let bytes = tensor.read_bytes(op)?;
    Ok(bytes[(first + range.start) * size..(first + range.end) * size].to_vec())
}

/// Overwrites some elements of a contiguous tensor.
pub(super) fn write(
    tensor: &Tensor,
    range: std::ops::Range<usize>,
    bytes: &[u8],
    op: &'static str,
) -> Result<()> {
    let (mut tensor, size, first) = (tensor.clone(), tensor.dtype().size(), tensor.offset());
    if tensor.device().is_meta() {
        tensor.bump_version();
        return Ok(());
    }
    if bytes.len() != range.len() * size {
        let why = format!("got {} bytes for {} elements of {}", bytes.len(), range.len(), tensor.dtype());
        return Err(Error::invalid(op, why));
    }
    tensor.write_bytes(op)?[(first + range.start) * size..][..bytes.len()].copy_from_slice(bytes);
    Ok(())
}
