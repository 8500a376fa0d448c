//! Ranks in several processes, over messages.
//!
//! One thread of each process, the [`driver`], owns the wire. Calls and messages reach it as events. A collective goes through
//! three phases; each begins when all messages of the phase before have come:
//!
//! ```text
//! check    every rank sends its signature to every other; if two differ, all ranks find it
//! parts    sources send their part of each transfer to its owner          (see the plan)
//! results  owners combine the parts in order of the ranks, and send the result to the destinations
//! ```
//!
//! The driver never blocks, so it finds every rank that is late, gone or has failed.
//!
//! A message is a [`Frame`]: a header ([`Address`]), which says which message of which call it is, and the content.

pub(crate) mod driver;
mod member;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
mod outcome;
mod task;
pub(crate) mod tcp;

use super::Result;

pub(crate) use driver::Driver;
pub(crate) use member::{Process, connect};

/// Carries whole messages between processes, in order between each pair.
pub(crate) trait Wire: Send {
    /// Sends without waiting for anything.
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()>;

    /// A collective begins, of which no message has more bytes.
    fn expect(&mut self, _bytes: usize) {}

    /// A message that has been received. Wires that bring messages to the driver as events have none.
    fn poll(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        Ok(None)
    }

    /// Whether messages come only when asked for.
    fn is_polled(&self) -> bool {
        false
    }

    /// Whether everything sent has left this process.
    fn is_flushed(&mut self) -> bool;

    /// Closes the wire; `orderly` if all ranks close theirs now.
    fn close(&mut self, orderly: bool);
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FrameKind {
    /// The sender's signature of a call.
    Check,
    /// Elements for the owner of a transfer.
    Part,
    /// Elements from the owner of a transfer.
    Result,
    /// From a send to its receive.
    Message,
    /// The ranks for which the sender has waited for half of the timeout.
    Waiting,
    /// The error that ended the run.
    Failure,
    /// The same, if a process was lost.
    Loss,
    /// The sender has ended.
    Leave,
}

const KINDS: [FrameKind; 8] = [
    FrameKind::Check,
    FrameKind::Part,
    FrameKind::Result,
    FrameKind::Message,
    FrameKind::Waiting,
    FrameKind::Failure,
    FrameKind::Loss,
    FrameKind::Leave,
];

/// Which message of which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) kind: FrameKind,
    pub(crate) group: u64,
    pub(crate) sequence: u64,
    /// The transfer.
    pub(crate) part: usize,
}

/// Bytes before the content.
const HEAD: usize = 32;

impl Address {
    /// The header of a message that belongs to no call.
    pub(crate) fn plain(kind: FrameKind) -> Address {
        Address { kind, group: 0, sequence: 0, part: 0 }
    }

    /// The bytes of the message with this header.
    pub(crate) fn frame(self, content: &[u8]) -> Vec<u8> {
        let kind = KINDS.iter().position(|kind| *kind == self.kind).unwrap_or(0);
        let words = [kind as u64, self.group, self.sequence, self.part as u64];
        let mut frame = Vec::with_capacity(HEAD + content.len());
        words.iter().for_each(|word| frame.extend(word.to_le_bytes()));
        frame.extend_from_slice(content);
        frame
    }

    /// The header of a message; none if the bytes are no frame.
    pub(crate) fn of(frame: &[u8]) -> Option<Address> {
        let (&[kind, group, sequence, part], _) = frame.as_chunks::<8>().0.split_first_chunk::<4>()?;
        let [kind, group, sequence, part] = [kind, group, sequence, part].map(u64::from_le_bytes);
        Some(Address { kind: *KINDS.get(kind as usize)?, group, sequence, part: part as usize })
    }
}

/// A message that has been received.
#[derive(Debug)]
pub(crate) struct Frame(pub(crate) Vec<u8>);

impl Frame {
    pub(crate) fn content(&self) -> &[u8] {
        &self.0[HEAD.min(self.0.len())..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_wire() {
        let address = Address { kind: FrameKind::Message, group: 7, sequence: 1 << 40, part: 3 };
        let frame = address.frame(b"hello");
        assert_eq!(Address::of(&frame), Some(address));
        assert_eq!(Frame(frame).content(), b"hello");
        assert_eq!(Address::of(&[0; 31]), None);
        assert_eq!(Address::of(&[9; 32]), None);
    }
}
