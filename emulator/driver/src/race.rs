//! Finding missing waits: two operations that touch the same bytes, one of them writing, must be ordered.
//!
//! Each operation has a vector clock, which says which operations come before it, in whatever order they happen to run.
//! Every operation that has run leaves a record of the bytes it touched and of its clock. A new one is held against
//! those records: if neither clock covers the other, no stream order, no event and no synchronisation orders the two,
//! and on hardware they may run in either order or at once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// An operation's own place: the `tick`th of a `chain` of operations that come one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub chain: u64,
    pub tick: u64,
}

/// For each chain, how many of its operations come before: `(chain, tick)`, ascending by chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<(u64, u64)>);

impl Clock {
    /// Whether the operation with this stamp is among those that come before.
    pub(crate) fn covers(&self, stamp: Stamp) -> bool {
        self.tick(stamp.chain) >= stamp.tick
    }

    fn tick(&self, chain: u64) -> u64 {
        self.0.binary_search_by_key(&chain, |entry| entry.0).map_or(0, |at| self.0[at].1)
    }

    /// Adds an operation.
    pub(crate) fn add(&mut self, stamp: Stamp) {
        match self.0.binary_search_by_key(&stamp.chain, |entry| entry.0) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(stamp.tick),
            Err(at) => self.0.insert(at, (stamp.chain, stamp.tick)),
        }
    }

    /// Adds all that come before in `other`.
    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.is_empty() {
            self.0.clone_from(&other.0);
            return;
        }
        let mut merged = Vec::with_capacity(self.0.len().max(other.0.len()));
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let Some(chain) = [ours.peek(), theirs.peek()].into_iter().flatten().map(|entry| entry.0).min()
        {
            let of_it = |entry: &&(u64, u64)| entry.0 == chain;
            let ticks = [ours.next_if(of_it), theirs.next_if(of_it)];
            merged.push((chain, ticks.into_iter().flatten().map(|entry| entry.1).max().unwrap_or(0)));
        }
        self.0 = merged;
    }

    /// Drops the entries that `keep` refuses.
    pub(crate) fn retain(&mut self, keep: impl Fn(Stamp) -> bool) {
        self.0.retain(|&(chain, tick)| keep(Stamp { chain, tick }));
    }

    /// How many chains it has heard of.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Bytes that an operation touches: `start .. end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    pub start: u64,
    pub end: u64,
    pub written: bool,
}

impl Access {
    pub(crate) fn read(start: u64, bytes: u64) -> Access {
        Access { start, end: start + bytes, written: false }
    }

    pub(crate) fn write(start: u64, bytes: u64) -> Access {
        Access { start, end: start + bytes, written: true }
    }

    fn conflicts(&self, other: &Access) -> bool {
        (self.written || other.written) && self.start < other.end && other.start < self.end
    }

    fn holds(&self, other: &Access) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

/// The operation behind an access: its name, its place, and what comes before it.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub what: Arc<str>,
    pub stamp: Stamp,
    pub clock: Arc<Clock>,
}

impl Origin {
    fn ordered(&self, other: &Origin) -> bool {
        self.clock.covers(other.stamp) || other.clock.covers(self.stamp)
    }
}

/// Accesses that the host has not waited for, by allocation.
#[derive(Debug, Default)]
pub(crate) struct Accesses {
    touched: HashMap<u64, Vec<(Access, Origin)>>,
}

impl Accesses {
    /// Records that `origin` touched bytes of the allocation that starts at `allocation`. Says which other
    /// operation it is in conflict with, if any.
    pub(crate) fn touch(&mut self, allocation: u64, access: Access, origin: &Origin) -> Option<String> {
        if access.start >= access.end {
            return None;
        }
        let records = self.touched.entry(allocation).or_default();
        let found = records
            .iter()
            .find(|(other, by)| access.conflicts(other) && !origin.ordered(by))
            .map(|(other, by)| conflict(allocation, &access, other, by));
        // A record that is ordered before this one and lies within it can be dropped: a later operation in conflict
        // with it is in conflict with this one too.
        records.retain(|(other, by)| {
            let replaced =
                access.holds(other) && (access.written || !other.written) && origin.clock.covers(by.stamp);
            !replaced
        });
        records.push((access, origin.clone()));
        found
    }

    /// Drops the records that `host`, the host's clock, covers: all that is queued from now on comes after them.
    pub(crate) fn forget(&mut self, host: &Clock) {
        self.touched.retain(|_, records| {
            records.retain(|(_, by)| !host.covers(by.stamp));
            !records.is_empty()
        });
    }

    /// The chains that have records.
    pub(crate) fn chains(&self) -> HashSet<u64> {
        self.touched.values().flatten().map(|(_, by)| by.stamp.chain).collect()
    }
}

fn conflict(allocation: u64, new: &Access, old: &Access, by: &Origin) -> String {
    let verb = |access: &Access| if access.written { "writes" } else { "reads" };
    let (first, last) = (new.start.max(old.start) - allocation, new.end.min(old.end) - allocation);
    format!(
        "missing wait: this {} bytes {first}..{last} of the allocation at {allocation:#x}, which {} {}, and neither \
         stream order, nor an event, nor a synchronisation says which comes first",
        verb(new),
        by.what,
        verb(old),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_covers_what_either_side_covers_and_nothing_else() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.add(Stamp { chain: 1, tick: 3 });
        b.add(Stamp { chain: 1, tick: 2 });
        b.add(Stamp { chain: 7, tick: 5 });
        a.join(&b);
        assert!(a.covers(Stamp { chain: 1, tick: 3 }) && a.covers(Stamp { chain: 7, tick: 5 }));
        assert!(!a.covers(Stamp { chain: 1, tick: 4 }) && !a.covers(Stamp { chain: 2, tick: 1 }));
    }

    fn origin(name: &str, chain: u64, before: &[&Origin]) -> Origin {
        let mut clock = Clock::default();
        let stamp =
            Stamp { chain, tick: 1 + before.iter().filter(|p| p.stamp.chain == chain).count() as u64 };
        before.iter().for_each(|p| clock.join(&p.clock));
        clock.add(stamp);
        Origin { what: name.into(), stamp, clock: Arc::new(clock) }
    }

    #[test]
    fn two_unordered_writers_of_the_same_bytes_are_named() {
        let mut accesses = Accesses::default();
        assert_eq!(accesses.touch(256, Access::write(256, 64), &origin("a", 1, &[])), None);
        let found = accesses.touch(256, Access::write(288, 64), &origin("b", 2, &[])).unwrap();
        assert!(
            found.contains("this writes") && found.contains("a writes") && found.contains("bytes 32..64"),
            "{found}"
        );
    }

    #[test]
    fn an_event_between_them_orders_them() {
        let mut accesses = Accesses::default();
        let a = origin("a", 1, &[]);
        assert_eq!(accesses.touch(256, Access::write(256, 64), &a), None);
        assert_eq!(accesses.touch(256, Access::read(256, 64), &origin("b", 2, &[&a])), None);
    }

    #[test]
    fn readers_and_neighbours_are_no_conflict() {
        let mut accesses = Accesses::default();
        assert_eq!(accesses.touch(256, Access::read(256, 64), &origin("a", 1, &[])), None);
        assert_eq!(accesses.touch(256, Access::read(256, 64), &origin("b", 2, &[])), None);
        assert_eq!(accesses.touch(256, Access::write(320, 64), &origin("c", 3, &[])), None);
    }
}
