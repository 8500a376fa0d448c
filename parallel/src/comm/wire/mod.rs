//! (comm/wire/mod.rs)
//! Ranks in several processes, over messages.
//!
//! One thread of each process, the [`driver`], owns the wire. Calls and messages reach it as events; a call goes through
//! three phases, each of which begins when everything awaited in the one before has come:
//!
//! ```text
//! check    every rank tells every other what it calls; whoever disagrees, all find out
//! give     sources send their part of each transfer to its owner          (see the plan)
//! results  owners combine in order of the ranks, and send to the destinations
//! ```
//!
//! Nothing blocks, so the driver always notices who is late, gone or has failed.
//!
//! (comm/wire/letter.rs)
//! [`Letter`]: a message with its address.

pub(crate) mod driver;
mod member;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
mod task;
pub(crate) mod tcp;

use super::Result;

pub(crate) use driver::Driver;
pub(crate) use member::{Process, connect};

/// Carries whole messages between processes, in order between each pair.
pub(crate) trait Wire: Send {
    /// Sends without waiting for anything.
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()>;

    /// A message that has come. Wires that bring messages to the driver as events have none.
    fn poll(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        Ok(None)
    }

    /// Whether messages come only when asked for.
    fn is_polled(&self) -> bool {
        false
    }

    /// Whether everything sent is out of this process's hands.
    fn is_flushed(&mut self) -> bool;

    /// Ends it; `orderly` if all ranks do the same now.
    fn close(&mut self, orderly: bool);
}

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    /// What the sender calls.
    Check,
    /// Elements for the owner of a transfer.
    Give,
    /// Elements from the owner of a transfer.
    Result,
    /// From a send to its receive.
    Mail,
    /// Whom the sender waits for, by now for long.
    Waits,
    /// The run is over: why.
    Notice,
    /// The sender is through.
    Bye,
}

const CLASSES: [Class; 7] =
    [Class::Check, Class::Give, Class::Result, Class::Mail, Class::Waits, Class::Notice, Class::Bye];

/// Which message of which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) class: Class,
    pub(crate) group: u64,
    pub(crate) sequence: u64,
    /// The transfer.
    pub(crate) part: usize,
}

/// Bytes before the content.
const HEAD: usize = 32;

impl Address {
    /// A message that concerns no call.
    pub(crate) fn plain(class: Class) -> Address {
        Address { class, group: 0, sequence: 0, part: 0 }
    }

    /// The message to this address.
    pub(crate) fn letter(self, content: &[u8]) -> Vec<u8> {
        let class = CLASSES.iter().position(|class| *class == self.class).unwrap_or(0);
        let words = [class as u64, self.group, self.sequence, self.part as u64];
        let mut letter = Vec::with_capacity(HEAD + content.len());
        words.iter().for_each(|word| letter.extend(word.to_le_bytes()));
        letter.extend_from_slice(content);
        letter
    }

    /// The address on a message; none if it is no letter.
    pub(crate) fn of(letter: &[u8]) -> Option<Address> {
        let (&[class, group, sequence, part], _) = letter.as_chunks::<8>().0.split_first_chunk::<4>()?;
        let [class, group, sequence, part] = [class, group, sequence, part].map(u64::from_le_bytes);
        Some(Address { class: *CLASSES.get(class as usize)?, group, sequence, part: part as usize })
    }
}

/// A message that has come.
#[derive(Debug)]
pub(crate) struct Letter(pub(crate) Vec<u8>);

impl Letter {
    pub(crate) fn content(&self) -> &[u8] {
        &self.0[HEAD.min(self.0.len())..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_wire() {
        let address = Address { class: Class::Mail, group: 7, sequence: 1 << 40, part: 3 };
        let letter = address.letter(b"hello");
        assert_eq!(Address::of(&letter), Some(address));
        assert_eq!(Letter(letter).content(), b"hello");
        assert_eq!(Address::of(&[0; 31]), None);
        assert_eq!(Address::of(&[9; 32]), None);
    }
}
