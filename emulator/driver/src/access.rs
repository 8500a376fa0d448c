//! Finding missing waits: two operations that touch the same bytes, one of them writing, must be ordered.
//!
//! Every operation that has run leaves a record of the bytes it touched and of its clock. A new one is held against
//! those records: if neither clock covers the other, no stream order, no event and no synchronisation orders the two,
//! and on hardware they may run in either order or at once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::clock::{Clock, Stamp};

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

/// Who touched something, and what comes before it.
#[derive(Debug, Clone)]
pub(crate) struct Party {
    pub what: Arc<str>,
    pub stamp: Stamp,
    pub clock: Arc<Clock>,
}

impl Party {
    fn ordered(&self, other: &Party) -> bool {
        self.clock.covers(other.stamp) || other.clock.covers(self.stamp)
    }
}

/// What has been touched since the host last knew of it, by allocation.
#[derive(Debug, Default)]
pub(crate) struct Accesses {
    touched: HashMap<u64, Vec<(Access, Party)>>,
}

impl Accesses {
    /// Records that `party` touched bytes of the allocation that starts at `allocation`. Says with whom it is in
    /// conflict, if anybody.
    pub(crate) fn touch(&mut self, allocation: u64, access: Access, party: &Party) -> Option<String> {
        if access.start >= access.end {
            return None;
        }
        let records = self.touched.entry(allocation).or_default();
        let found = records
            .iter()
            .find(|(other, by)| access.conflicts(other) && !party.ordered(by))
            .map(|(other, by)| conflict(allocation, &access, other, by));
        // What is ordered before this one and lies within it can be in conflict with nobody whom this one is not in
        // conflict with.
        records.retain(|(other, by)| {
            let replaced =
                access.holds(other) && (access.written || !other.written) && party.clock.covers(by.stamp);
            !replaced
        });
        records.push((access, party.clone()));
        found
    }

    /// Forgets what the host knows to have run: all that is queued from now on comes after it.
    pub(crate) fn forget(&mut self, host: &Clock) {
        self.touched.retain(|_, records| {
            records.retain(|(_, by)| !host.covers(by.stamp));
            !records.is_empty()
        });
    }

    /// The chains of which anything is recorded.
    pub(crate) fn chains(&self) -> HashSet<u64> {
        self.touched.values().flatten().map(|(_, by)| by.stamp.chain).collect()
    }
}

fn conflict(allocation: u64, new: &Access, old: &Access, by: &Party) -> String {
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

    fn party(name: &str, chain: u64, before: &[&Party]) -> Party {
        let mut clock = Clock::default();
        let stamp =
            Stamp { chain, tick: 1 + before.iter().filter(|p| p.stamp.chain == chain).count() as u64 };
        before.iter().for_each(|p| clock.join(&p.clock));
        clock.add(stamp);
        Party { what: name.into(), stamp, clock: Arc::new(clock) }
    }

    #[test]
    fn two_unordered_writers_of_the_same_bytes_are_named() {
        let mut accesses = Accesses::default();
        assert_eq!(accesses.touch(256, Access::write(256, 64), &party("a", 1, &[])), None);
        let found = accesses.touch(256, Access::write(288, 64), &party("b", 2, &[])).unwrap();
        assert!(
            found.contains("this writes") && found.contains("a writes") && found.contains("bytes 32..64"),
            "{found}"
        );
    }

    #[test]
    fn an_event_between_them_orders_them() {
        let mut accesses = Accesses::default();
        let a = party("a", 1, &[]);
        assert_eq!(accesses.touch(256, Access::write(256, 64), &a), None);
        assert_eq!(accesses.touch(256, Access::read(256, 64), &party("b", 2, &[&a])), None);
    }

    #[test]
    fn readers_and_neighbours_are_no_conflict() {
        let mut accesses = Accesses::default();
        assert_eq!(accesses.touch(256, Access::read(256, 64), &party("a", 1, &[])), None);
        assert_eq!(accesses.touch(256, Access::read(256, 64), &party("b", 2, &[])), None);
        assert_eq!(accesses.touch(256, Access::write(320, 64), &party("c", 3, &[])), None);
    }
}
