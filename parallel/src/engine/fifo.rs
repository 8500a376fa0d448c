//! [`Fifo`]: who holds a variable and who waits for it.
//!
//! ```text
//!           holders        waiting, in the order of pushes
//! granted:  R R            W  R R R  W      the write waits for both reads to leave,
//!           W              R R R  W         the three reads for the write: then they come together
//! ```

use std::collections::VecDeque;

/// What an operation does with a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// Changes it, alone.
    Write,
    /// Reads it, together with others.
    Read,
}

/// The queue of one variable: first come, first served, reads between two writes together.
pub(crate) struct Fifo<T> {
    /// Reads that hold the variable, or [`WRITER`].
    holders: u32,
    waiting: VecDeque<(Access, T)>,
}

const WRITER: u32 = u32::MAX;

impl<T> Fifo<T> {
    pub(crate) fn new() -> Fifo<T> {
        Fifo { holders: 0, waiting: VecDeque::new() }
    }

    /// Grants an access at once, if nobody is before it.
    pub(crate) fn admit(&mut self, access: Access) -> bool {
        self.waiting.is_empty() && self.grant(access)
    }

    /// Lets `op` wait for its turn.
    pub(crate) fn wait(&mut self, access: Access, op: T) {
        self.waiting.push_back((access, op));
    }

    /// Ends an access that was granted, and hands over those whose turn has come.
    pub(crate) fn leave(&mut self, access: Access, mut granted: impl FnMut(T)) {
        match access {
            Access::Write => self.holders = 0,
            Access::Read => self.holders -= 1,
        }
        while let Some(&(next, _)) = self.waiting.front() {
            if !self.grant(next) {
                break;
            }
            if let Some((_, op)) = self.waiting.pop_front() {
                granted(op);
            }
        }
    }

    fn grant(&mut self, access: Access) -> bool {
        let granted = match access {
            Access::Write => self.holders == 0,
            Access::Read => self.holders != WRITER,
        };
        if granted {
            self.holders = if access == Access::Write { WRITER } else { self.holders + 1 };
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Read, Write};

    fn leave(fifo: &mut Fifo<char>, access: Access) -> String {
        let mut granted = String::new();
        fifo.leave(access, |op| granted.push(op));
        granted
    }

    #[test]
    fn reads_between_two_writes_come_together_and_nobody_overtakes() {
        let mut fifo = Fifo::new();
        assert!(fifo.admit(Read) && fifo.admit(Read));
        for (access, op) in [(Write, 'a'), (Read, 'b'), (Read, 'c'), (Write, 'd'), (Write, 'e'), (Read, 'f')]
        {
            assert!(!fifo.admit(access));
            fifo.wait(access, op);
        }
        assert_eq!(leave(&mut fifo, Read), "");
        assert_eq!(leave(&mut fifo, Read), "a");
        assert_eq!(leave(&mut fifo, Write), "bc");
        assert!(!fifo.admit(Read), "a write waits before it");
        assert_eq!(leave(&mut fifo, Read), "");
        assert_eq!(leave(&mut fifo, Read), "d");
        assert_eq!(leave(&mut fifo, Write), "e");
        assert_eq!(leave(&mut fifo, Write), "f");
        assert!(fifo.admit(Read) && !fifo.admit(Write));
    }
}
