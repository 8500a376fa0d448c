//! Vector clocks: which operation comes before which, whatever order they happen to run in.

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

    /// Forgets what nothing asks for any more.
    pub(crate) fn retain(&mut self, keep: impl Fn(Stamp) -> bool) {
        self.0.retain(|&(chain, tick)| keep(Stamp { chain, tick }));
    }

    /// How many chains it has heard of.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
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
}
