//! What happened before what: which accesses of other threads a thread may rely on.
//!
//! Every warp has a clock that ticks when it synchronizes, and knows of every other resident warp the latest tick
//! that it has heard of (a vector clock, at the grain of warps). Barriers join what their threads know. An atomic or
//! otherwise strong write publishes at its address what the warp knew at its last fence (all it knows, if the write
//! is a release); a strong read of the address hears of it. Blocks that have ended are known only through such
//! addresses.
//!
//! Where this is coarser than PTX's memory model it reports less: a strong read counts as an acquire, what one lane
//! hears all lanes of its warp hear, and scopes are ignored.

use std::collections::HashMap;

use crate::lanes::LANES;
use crate::memory::shadow::{ASYNC, Cell, Past, SAME, STRONG, lane, record};

/// A stretch of a warp between two synchronizations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// The block's number in the grid.
    pub(crate) block: u32,
    /// The warp's number among those resident together.
    pub(crate) warp: u32,
    pub(crate) clock: u32,
}

/// What was published at an address.
#[derive(Debug, Default)]
struct Flag {
    /// By each group of resident blocks: the clocks of its warps.
    heard: HashMap<u32, Vec<u32>>,
    /// What they knew to be fenced for the asynchronous proxy, if anything uses it.
    proxied: HashMap<u32, Vec<u32>>,
    /// Flags that the publishers had heard of.
    flags: Vec<u32>,
}

/// Clocks of a launch.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    /// The records of this launch, from number `first` on.
    records: Vec<Record>,
    first: u32,
    /// The current group of resident blocks: its number, and the first of its records.
    group: u32,
    group_first: u32,
    /// Records of the group below came before a barrier of all.
    barrier: u32,
    warps: usize,
    /// The groups of earlier records, by their first record.
    groups: Vec<u32>,
    /// What each resident warp knows of each.
    known: Vec<u32>,
    /// What each knew at its last fence.
    fenced: Vec<u32>,
    any_fence: bool,
    /// The current record of each warp, 0 if it has still to be made.
    current: Vec<u32>,
    block: Vec<u32>,
    /// The clock of each warp's last synchronization of all its lanes.
    together: Vec<u32>,
    /// Of lanes that synchronized apart from others: by warp, when each pair last did.
    pairs: HashMap<u32, Box<[[u32; 32]; 32]>>,
    flags: Vec<Flag>,
    flag_of: HashMap<u64, u32>,
    /// Flags that each warp has heard of.
    heard: Vec<Vec<u32>>,
    pub(crate) proxies: Proxies,
}

impl Clocks {
    /// Clocks of a launch whose records have numbers from `first` on.
    /// `async_proxy` says whether anything uses shared memory by the asynchronous proxy.
    pub(crate) fn new(first: u32, async_proxy: bool) -> Clocks {
        let proxies = Proxies { on: async_proxy, ..Proxies::default() };
        Clocks { first, group_first: first, barrier: first, proxies, ..Clocks::default() }
    }

    /// The number after the last record.
    pub(crate) fn next(&self) -> u32 {
        self.first + self.records.len() as u32
    }

    /// New resident warps; `block_of` says which block each belongs to.
    pub(crate) fn begin(&mut self, block_of: impl Iterator<Item = u32>) {
        self.block.clear();
        self.block.extend(block_of);
        let n = self.block.len();
        self.warps = n;
        self.group += 1;
        self.group_first = self.next();
        self.groups.push(self.group_first);
        self.barrier = self.group_first;
        for (vector, len) in [
            (&mut self.known, n * n),
            (&mut self.fenced, n * n),
            (&mut self.current, n),
            (&mut self.together, n),
        ] {
            vector.clear();
            vector.resize(len, 0);
        }
        self.any_fence = false;
        self.proxies.begin(n);
        for w in 0..n {
            self.known[w * n + w] = 1;
        }
        self.pairs.clear();
        self.heard.iter_mut().for_each(Vec::clear);
        self.heard.resize_with(n, Vec::new);
    }

    /// Which accesses of global memory are ordered before the current ones without asking the clocks.
    pub(crate) fn past(&self) -> Past {
        Past { before: self.first, own: self.group_first, barrier: self.barrier }
    }

    /// The same of shared memory, which no earlier block has touched.
    pub(crate) fn past_shared(&self) -> Past {
        Past { before: self.barrier, own: self.group_first, barrier: self.barrier }
    }

    /// The record of a warp's accesses now.
    #[inline(always)]
    pub(crate) fn record(&mut self, warp: usize) -> u32 {
        if self.current[warp] == 0 {
            self.current[warp] = self.next();
            let clock = self.known[warp * self.warps + warp];
            self.records.push(Record { block: self.block[warp], warp: warp as u32, clock });
        }
        self.current[warp]
    }

    /// The record of a number.
    pub(crate) fn find(&self, number: u32) -> Option<Record> {
        self.records.get(number.checked_sub(self.first)? as usize).copied()
    }

    fn tick(&mut self, warp: usize) {
        self.known[warp * self.warps + warp] += 1;
        self.current[warp] = 0;
    }

    fn row(&self, warp: usize) -> &[u32] {
        &self.known[warp * self.warps..(warp + 1) * self.warps]
    }

    /// Lanes of a warp synchronize with each other; `all` says that no other lane is left.
    pub(crate) fn lanes_meet(&mut self, warp: usize, lanes: u32, all: bool) {
        self.tick(warp);
        let clock = self.known[warp * self.warps + warp];
        if all {
            self.together[warp] = clock;
            return;
        }
        let pairs = self.pairs.entry(warp as u32).or_insert_with(|| Box::new([[0; 32]; 32]));
        // The lanes that it meets now have thereby met all that it had met.
        let mut joint = [0; 32];
        for a in (0..32).filter(|a| lanes >> a & 1 == 1) {
            for b in 0..32 {
                joint[b] = joint[b].max(pairs[a][b]);
            }
        }
        for a in (0..32).filter(|a| lanes >> a & 1 == 1) {
            for b in 0..32 {
                pairs[a][b] = if lanes >> b & 1 == 1 { clock } else { joint[b] };
            }
        }
    }

    /// Adds what a warp knows to what a barrier passes on, and lets its clock tick.
    pub(crate) fn arrive(&mut self, warp: usize, at: &mut Gathering) {
        at.known.resize(self.warps, 0);
        at.fenced.resize(self.warps, 0);
        let row = warp * self.warps..(warp + 1) * self.warps;
        join(&mut at.known, &self.known[row.clone()]);
        join(&mut at.fenced, &self.fenced[row.clone()]);
        if self.proxies.on {
            at.proxied.resize(self.warps, 0);
            join(&mut at.proxied, &self.proxies.known[row]);
        }
        merge(&mut at.heard, &self.heard[warp]);
        self.tick(warp);
    }

    /// A warp leaves a barrier with all that was passed on.
    pub(crate) fn leave(&mut self, warp: usize, from: &Gathering, lanes: u32, all: bool) {
        let row = warp * self.warps..(warp + 1) * self.warps;
        if from.known.len() == self.warps {
            join(&mut self.known[row.clone()], &from.known);
            join(&mut self.fenced[row.clone()], &from.fenced);
        }
        if self.proxies.on && from.proxied.len() == self.warps {
            join(&mut self.proxies.known[row], &from.proxied);
        }
        merge(&mut self.heard[warp], &from.heard);
        self.lanes_meet(warp, lanes, all);
    }

    /// All resident warps have met: nothing that any of them did before needs a second look.
    pub(crate) fn all_met(&mut self) {
        self.barrier = self.next();
    }

    /// A fence of a warp.
    pub(crate) fn fence(&mut self, warp: usize) {
        let row = warp * self.warps..(warp + 1) * self.warps;
        self.fenced[row.clone()].copy_from_slice(&self.known[row]);
        self.any_fence = true;
        self.tick(warp);
    }

    /// A `fence.proxy.async` of lanes of a warp; `all` says that no other lane is left.
    pub(crate) fn proxy_fence(&mut self, warp: usize, lanes: u32, all: bool) {
        if self.proxies.on {
            let row = &self.known[warp * self.warps..(warp + 1) * self.warps];
            self.proxies.fence(warp, lanes, row, (all, self.together[warp]));
        }
        self.fence(warp);
    }

    /// Whether strong writes publish anything at all.
    pub(crate) fn publishes(&self) -> bool {
        self.any_fence
    }

    /// Whether strong reads can hear anything.
    pub(crate) fn listens(&self) -> bool {
        !self.flags.is_empty()
    }

    /// A strong write of a warp at an address.
    pub(crate) fn publish(&mut self, warp: usize, address: u64) {
        let number = *self.flag_of.entry(address).or_insert_with(|| {
            self.flags.push(Flag::default());
            self.flags.len() as u32 - 1
        });
        let flag = &mut self.flags[number as usize];
        let heard = flag.heard.entry(self.group).or_default();
        heard.resize(self.warps, 0);
        join(heard, &self.fenced[warp * self.warps..(warp + 1) * self.warps]);
        if self.proxies.on {
            let proxied = flag.proxied.entry(self.group).or_default();
            proxied.resize(self.warps, 0);
            join(proxied, &self.proxies.known[warp * self.warps..(warp + 1) * self.warps]);
        }
        merge(&mut flag.flags, &self.heard[warp]);
    }

    /// A strong read of a warp at an address.
    pub(crate) fn listen(&mut self, warp: usize, address: u64) {
        let Some(&number) = self.flag_of.get(&address) else { return };
        if let Some(heard) = self.flags[number as usize].heard.get(&self.group) {
            let row = warp * self.warps..(warp + 1) * self.warps;
            if heard.len() == self.warps {
                join(&mut self.known[row], heard);
                // What a lane of the warp itself published, the others hear too.
                self.together[warp] = self.together[warp].max(heard[warp] + 1);
            }
        }
        if let Some(proxied) = self.flags[number as usize].proxied.get(&self.group)
            && proxied.len() == self.warps
        {
            join(&mut self.proxies.known[warp * self.warps..(warp + 1) * self.warps], proxied);
        }
        if !self.heard[warp].contains(&number) {
            self.heard[warp].push(number);
        }
    }

    /// Whether nothing orders an earlier access before that of `me`, and the two race.
    #[cold]
    pub(crate) fn unordered(&self, warp: usize, other: Cell, me: Cell, reading: bool) -> bool {
        if other & me & STRONG != 0 || other == 0 {
            return false;
        }
        let Some(by) = self.find(record(other)) else { return false };
        if record(other) < self.group_first {
            return !self.heard_of(warp, by, record(other));
        }
        if by.warp as usize != warp {
            return self.row(warp)[by.warp as usize] < by.clock;
        }
        if lane(other) == lane(me) || by.clock < self.together[warp] {
            return false;
        }
        // Lanes that all wrote the same value may each read it.
        if reading && other & SAME != 0 && record(other) == record(me) {
            return false;
        }
        let met = self.pairs.get(&(warp as u32)).map_or(0, |p| p[lane(me) as usize][lane(other) as usize]);
        by.clock >= met
    }

    /// Whether a warp has heard of an access of a block that has ended.
    fn heard_of(&self, warp: usize, record: Record, number: u32) -> bool {
        let group = self.groups.partition_point(|&first| first <= number) as u32;
        let mut waiting = self.heard[warp].clone();
        let mut seen = waiting.clone();
        while let Some(flag) = waiting.pop() {
            let flag = &self.flags[flag as usize];
            let clocks = flag.heard.get(&group);
            if clocks.and_then(|c| c.get(record.warp as usize)).is_some_and(|&clock| clock >= record.clock) {
                return true;
            }
            for &more in &flag.flags {
                if !seen.contains(&more) {
                    seen.push(more);
                    waiting.push(more);
                }
            }
        }
        false
    }
}

/// What threads that meet pass on to each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gathering {
    known: Vec<u32>,
    fenced: Vec<u32>,
    proxied: Vec<u32>,
    heard: Vec<u32>,
}

fn join(into: &mut [u32], from: &[u32]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = (*into).max(*from);
    }
}

fn merge(into: &mut Vec<u32>, from: &[u32]) {
    for flag in from {
        if !into.contains(flag) {
            into.push(*flag);
        }
    }
}

/// What each warp knows to be fenced.
#[derive(Debug, Default)]
pub(crate) struct Proxies {
    /// Whether anything uses the asynchronous proxy at all.
    pub(crate) on: bool,
    /// Of each resident warp, up to which clock its writes are fenced as far as each knows.
    pub(crate) known: Vec<u32>,
    /// The clock of each lane's own last fence.
    pub(crate) lanes: Vec<[u32; LANES]>,
}

impl Proxies {
    /// New resident warps.
    pub(crate) fn begin(&mut self, warps: usize) {
        if self.on {
            self.known.clear();
            self.known.resize(warps * warps, 0);
            self.lanes.clear();
            self.lanes.resize(warps, [0; LANES]);
        }
    }

    /// A fence of some lanes of a warp that knows `row` of the others, and all of whose lanes met before clock
    /// `together`.
    pub(crate) fn fence(&mut self, warp: usize, lanes: u32, row: &[u32], (all, together): (bool, u32)) {
        let clock = row[warp];
        let known = &mut self.known[warp * row.len()..][..row.len()];
        for (other, (known, &heard)) in known.iter_mut().zip(row).enumerate() {
            let own = if all { clock } else { together.saturating_sub(1) };
            *known = (*known).max(if other == warp { own } else { heard });
        }
        crate::lanes::lanes(lanes).for_each(|l| self.lanes[warp][l] = clock);
    }

    /// Whether a write of a lane at a clock is fenced, as far as a warp knows.
    fn covers(&self, warp: usize, (by, lane, clock): (usize, usize, u32)) -> bool {
        self.known[warp * self.lanes.len() + by] >= clock || self.lanes[by][lane] >= clock
    }
}

impl Clocks {
    /// Whether the asynchronous proxy, used by a warp, does not yet see a write.
    pub(crate) fn unseen(&self, warp: usize, write: Cell) -> bool {
        let resident = record(write) >= self.past().own;
        resident
            && write & ASYNC == 0
            && self.find(record(write)).is_some_and(|record| {
                let access = (record.warp as usize, lane(write) as usize, record.clock);
                !self.proxies.covers(warp, access)
            })
    }
}
