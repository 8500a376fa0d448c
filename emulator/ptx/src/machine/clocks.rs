//! What happened before what: which accesses of other threads a thread may rely on.
//!
//! Every warp has a clock that ticks when it synchronizes, and knows of every other resident warp the latest tick
//! that it has heard of (a vector clock, at the grain of warps). Barriers join what their threads know. An atomic or
//! otherwise strong write publishes at its address what the warp knew at its last fence (all it knows, if the write
//! is a release); see [`super::flags`]. A strong read of the address hears of it. It counts from the warp's next fence
//! on, or at once if the read is an acquire. All three, the fence, the write and the read, have a scope: what is
//! published for a block says nothing to other blocks.
//!
//! The blocks of a cluster come and go together, in a slot of the device. Those that have been in it one after the
//! other are told apart by the number of their cluster, its cohort. Blocks that have ended are known only through flags.
//!
//! Where this is coarser than PTX's memory model it reports less: what one lane hears all lanes of its warp hear, a
//! fence counts for what was heard before a barrier, and an atomic update by a warp that has fenced before
//! counts as an acquire (the ticket of "the last block sums up", which CUDA's samples take without a second fence).

use std::collections::HashMap;

use super::flags::{Domain, Flags, Knowledge, Slot, join, merge};
use crate::code::{Order, Scope};
use crate::lanes::LANES;
use crate::memory::shadow::{ASYNC, Cell, Past, SAME, STRONG, lane, record, scope};

/// A stretch of a warp between two synchronizations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// The block's number in the grid.
    pub(crate) block: u32,
    /// The number of the cluster, in the order in which they came.
    pub(crate) cohort: u32,
    /// The warp's number among those resident together.
    pub(crate) warp: u32,
    pub(crate) clock: u32,
}

/// Clocks of a resident warp.
#[derive(Debug, Default)]
struct WarpClocks {
    block: u32,
    /// What it knows.
    known: Knowledge,
    /// The clocks that it knew at its last fence, by the fence's scope; empty if there was none.
    fenced: [Vec<u32>; SCOPES],
    /// What it has heard in each scope, with no fence since.
    heard: [Knowledge; SCOPES],
    /// The clock of the last synchronization of all its lanes.
    together: u32,
}

/// The scopes there are.
const SCOPES: usize = 3;

/// Clocks of a launch.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    /// The records of this launch, from number `first` on.
    records: Vec<Record>,
    first: u32,
    slots: Vec<Slot>,
    cohorts: u32,
    warps_a_slot: usize,
    warps: Vec<WarpClocks>,
    /// The current record of each warp, 0 if it has still to be made.
    current: Vec<u32>,
    past: Past,
    /// Whether the kernel has operations of narrower scopes than the device. Without them one scope is kept.
    narrow: bool,
    any_fence: bool,
    /// Of lanes that synchronized apart from others: by warp, when each pair last did.
    pairs: HashMap<u32, Box<[[u32; 32]; 32]>>,
    flags: Flags,
    pub(crate) proxies: Proxies,
}

impl Clocks {
    /// Clocks of a launch whose records have numbers from `first` on. `narrow` says whether the kernel has operations
    /// of narrower scopes than the device, `async_proxy` whether it uses shared memory by the asynchronous proxy.
    pub(crate) fn new(first: u32, narrow: bool, async_proxy: bool) -> Clocks {
        let proxies = Proxies { on: async_proxy, ..Proxies::default() };
        Clocks { first, narrow, proxies, ..Clocks::default() }
    }

    /// The number after the last record.
    pub(crate) fn next(&self) -> u32 {
        self.first + self.records.len() as u32
    }

    /// A cluster comes into a slot, the next new one or one whose cluster has ended; `block_of` says which block each of
    /// its warps belongs to.
    pub(crate) fn begin(&mut self, slot: usize, block_of: impl Iterator<Item = u32>) {
        let first = self.next();
        self.cohorts += 1;
        let fresh = Slot { cohort: self.cohorts, first, barrier: first };
        if slot < self.slots.len() {
            self.slots[slot] = fresh;
        } else {
            self.slots.push(fresh);
        }
        for (w, block) in block_of.enumerate() {
            self.warps_a_slot = self.warps_a_slot.max(w + 1);
            let warp = if slot == 0 { w } else { slot * self.warps_a_slot + w };
            if warp == self.warps.len() {
                self.warps.push(WarpClocks::default());
            }
            self.warps[warp].block = block;
        }
        let (n, range) = (self.warps.len(), slot * self.warps_a_slot..(slot + 1) * self.warps_a_slot);
        for (w, warp) in self.warps.iter_mut().enumerate() {
            if range.contains(&w) {
                let WarpClocks { known, fenced, heard, .. } = warp;
                known.clear();
                fenced.iter_mut().for_each(Vec::clear);
                heard.iter_mut().for_each(Knowledge::clear);
                known.clocks.resize(n, 0);
                known.clocks[w] = 1;
                warp.together = 0;
                continue;
            }
            warp.known.forget(range.clone());
            warp.known.clocks.resize(n, 0);
            warp.fenced.iter_mut().filter(|row| !row.is_empty()).for_each(|row| {
                let end = range.end.min(row.len());
                row[range.start.min(end)..end].fill(0);
            });
            warp.heard.iter_mut().for_each(|heard| heard.forget(range.clone()));
        }
        self.current.resize(n, 0);
        self.current[range.clone()].fill(0);
        self.set_past();
        self.pairs.retain(|&warp, _| !range.contains(&(warp as usize)));
        self.proxies.begin(n, range);
    }

    /// The slot of a warp.
    #[inline(always)]
    fn slot(&self, warp: usize) -> Slot {
        if self.slots.len() == 1 { self.slots[0] } else { self.slots[warp / self.warps_a_slot] }
    }

    fn set_past(&mut self) {
        self.past = match self.slots[..] {
            [slot] => Past { before: self.first, own: slot.first, barrier: slot.barrier },
            // Records between two barriers of one block are those of others too.
            _ => Past { before: self.first, own: self.first, barrier: self.first },
        };
    }

    /// Which accesses of global memory are ordered before the current ones without asking the clocks.
    #[inline(always)]
    pub(crate) fn past(&self) -> Past {
        self.past
    }

    /// The same of a block's shared memory, which no earlier block has touched.
    #[inline(always)]
    pub(crate) fn past_shared(&self, warp: usize) -> Past {
        let slot = self.slot(warp);
        Past { before: slot.barrier, own: slot.first, barrier: slot.barrier }
    }

    /// Whether a record is of this launch.
    pub(crate) fn is_of_launch(&self, number: u32) -> bool {
        number >= self.first
    }

    /// The record of a warp's accesses now.
    #[inline(always)]
    pub(crate) fn record(&mut self, warp: usize) -> u32 {
        if self.current[warp] == 0 {
            self.current[warp] = self.next();
            let WarpClocks { block, ref known, .. } = self.warps[warp];
            let (cohort, clock) = (self.slot(warp).cohort, known.clocks[warp]);
            self.records.push(Record { block, cohort, warp: warp as u32, clock });
        }
        self.current[warp]
    }

    /// The record of a number.
    pub(crate) fn find(&self, number: u32) -> Option<Record> {
        self.records.get(number.checked_sub(self.first)? as usize).copied()
    }

    fn tick(&mut self, warp: usize) {
        self.warps[warp].known.clocks[warp] += 1;
        self.current[warp] = 0;
    }

    fn row(&self, warp: usize) -> &[u32] {
        &self.warps[warp].known.clocks
    }

    /// Lanes of a warp synchronize with each other; `all` says that no other lane is left.
    pub(crate) fn lanes_meet(&mut self, warp: usize, lanes: u32, all: bool) {
        self.tick(warp);
        let clock = self.row(warp)[warp];
        if all {
            self.warps[warp].together = clock;
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
        let WarpClocks { known, fenced, heard, .. } = &self.warps[warp];
        at.known.add(known);
        for s in self.scopes(Scope::Device) {
            join(&mut at.fenced[s], &fenced[s]);
            at.heard[s].add(&heard[s]);
        }
        self.tick(warp);
    }

    /// The same of an arrival that is no release: only what the warp has fenced in a scope is passed on.
    pub(crate) fn arrive_relaxed(&mut self, warp: usize, scope: Scope, at: &mut Gathering) {
        let WarpClocks { known, fenced, .. } = &self.warps[warp];
        let clocks = &fenced[if self.narrow { scope } else { Scope::Device } as usize];
        if !clocks.is_empty() {
            join(&mut at.known.clocks, clocks);
            join(&mut at.known.proxied, &known.proxied);
        }
        self.tick(warp);
    }

    /// A warp leaves a barrier with all that was passed on.
    pub(crate) fn leave(&mut self, warp: usize, from: &Gathering, lanes: u32, all: bool) {
        let scopes = self.scopes(Scope::Device);
        let WarpClocks { known, fenced, heard, .. } = &mut self.warps[warp];
        known.add(&from.known);
        for s in scopes {
            join(&mut fenced[s], &from.fenced[s]);
            heard[s].add(&from.heard[s]);
        }
        self.lanes_meet(warp, lanes, all);
    }

    /// All threads of a warp's block have met, and it is a cluster of its own: nothing that any of them did before
    /// needs a second look.
    pub(crate) fn all_met(&mut self, warp: usize) {
        let next = self.next();
        self.slots[warp / self.warps_a_slot].barrier = next;
        self.set_past();
    }

    /// The numbers of the scopes up to one that are kept.
    fn scopes(&self, up_to: Scope) -> std::ops::Range<usize> {
        if self.narrow { 0..up_to as usize + 1 } else { Scope::Device as usize..SCOPES }
    }

    /// A fence of a warp.
    pub(crate) fn fence(&mut self, warp: usize, scope: Scope) {
        self.any_fence = true;
        for s in self.scopes(scope) {
            let heard = std::mem::take(&mut self.warps[warp].heard[s]);
            self.acquire(warp, &heard);
        }
        for s in self.scopes(scope) {
            let WarpClocks { known, fenced, .. } = &mut self.warps[warp];
            fenced[s].clone_from(&known.clocks);
        }
        self.tick(warp);
    }

    /// A `fence.proxy.async` of lanes of a warp; `all` says that no other lane is left.
    pub(crate) fn proxy_fence(&mut self, warp: usize, lanes: u32, all: bool) {
        if self.proxies.on {
            let WarpClocks { known, together, .. } = &mut self.warps[warp];
            self.proxies.fence(warp, lanes, known, (all, *together));
        }
        self.fence(warp, Scope::Device);
    }

    /// Whether a strong write publishes anything at all.
    pub(crate) fn publishes(&self, order: Order) -> bool {
        self.any_fence || matches!(order, Order::Release | Order::Both)
    }

    /// Whether strong reads can hear anything.
    pub(crate) fn listens(&self) -> bool {
        !self.flags.is_empty()
    }

    /// The threads that a warp shares a scope with.
    fn domain(&self, warp: usize, scope: usize) -> Domain {
        match scope {
            0 => Domain { scope: Scope::Block, number: self.warps[warp].block },
            1 => Domain { scope: Scope::Cluster, number: self.slot(warp).cohort },
            _ => Domain { scope: Scope::Device, number: 0 },
        }
    }

    /// A strong write of a warp at an address; a release publishes all that the warp knows.
    pub(crate) fn publish(&mut self, warp: usize, address: u64, order: Order, scope: Scope) {
        let releases = matches!(order, Order::Release | Order::Both);
        for s in self.scopes(scope) {
            let domain = self.domain(warp, s);
            let WarpClocks { known, fenced, .. } = &self.warps[warp];
            let clocks = if releases { &known.clocks } else { &fenced[s] };
            if clocks.is_empty() {
                continue;
            }
            self.flags.publish(address, domain, (&self.slots, self.warps_a_slot), |published| {
                join(&mut published.clocks, clocks);
                join(&mut published.proxied, &known.proxied);
                merge(&mut published.flags, &known.flags);
            });
        }
        if releases {
            self.tick(warp);
        }
    }

    /// A strong read of a warp at an address; `updates` says that it is an atomic update.
    pub(crate) fn listen(&mut self, warp: usize, address: u64, order: Order, scope: Scope, updates: bool) {
        let Some(flag) = self.flags.number(address) else { return };
        let acquires = matches!(order, Order::Acquire | Order::Both)
            || updates && !self.warps[warp].fenced[scope as usize].is_empty();
        for s in self.scopes(scope) {
            let domain = self.domain(warp, s);
            let published = self.flags.published(flag, domain, (&self.slots, self.warps_a_slot));
            let Some(published) = published else { continue };
            let WarpClocks { known, heard, together, .. } = &mut self.warps[warp];
            let to = if acquires { known } else { &mut heard[s] };
            join(&mut to.clocks, &published.clocks);
            join(&mut to.proxied, &published.proxied);
            if acquires {
                // What a lane of the warp itself published, the others hear too.
                let own = published.clocks.get(warp).copied().unwrap_or(0);
                *together = (*together).max(if own == 0 { 0 } else { own + 1 });
            }
            if s == Scope::Device as usize && !to.flags.contains(&flag) {
                to.flags.push(flag);
            }
        }
    }

    /// What a warp has heard of counts from now on.
    fn acquire(&mut self, warp: usize, heard: &Knowledge) {
        let WarpClocks { known, together, .. } = &mut self.warps[warp];
        known.add(heard);
        let own = heard.clocks.get(warp).copied().unwrap_or(0);
        *together = (*together).max(if own == 0 { 0 } else { own + 1 });
    }

    /// Whether nothing orders an earlier access before that of `me`, and the two race.
    #[cold]
    pub(crate) fn unordered(&self, warp: usize, other: Cell, me: Cell, reading: bool) -> bool {
        if other == 0 {
            return false;
        }
        let Some(by) = self.find(record(other)) else { return false };
        if other & me & STRONG != 0 && self.shares(warp, by, scope(other).min(scope(me))) {
            return false;
        }
        let (by_warp, slot) = (by.warp as usize, by.warp as usize / self.warps_a_slot);
        let WarpClocks { known, together, .. } = &self.warps[warp];
        if by.cohort != self.slots[slot].cohort {
            return !self.flags.cover(&known.flags, by.cohort, (slot, by_warp), by.clock);
        }
        if by_warp != warp {
            return known.clocks[by_warp] < by.clock;
        }
        if lane(other) == lane(me) || by.clock < *together {
            return false;
        }
        // Lanes that all wrote the same value may each read it.
        if reading && other & SAME != 0 && record(other) == record(me) {
            return false;
        }
        let met = self.pairs.get(&(warp as u32)).map_or(0, |p| p[lane(me) as usize][lane(other) as usize]);
        by.clock >= met
    }

    /// Whether a warp has heard of an access, but has made no fence since that would let it rely on that.
    pub(crate) fn heard_unfenced(&self, warp: usize, number: u32) -> bool {
        let Some(by) = self.find(number) else { return false };
        let (by_warp, slot) = (by.warp as usize, by.warp as usize / self.warps_a_slot);
        self.warps[warp].heard.iter().any(|heard| match by.cohort == self.slots[slot].cohort {
            true => heard.clocks.get(by_warp).is_some_and(|&clock| clock >= by.clock),
            false => self.flags.cover(&heard.flags, by.cohort, (slot, by_warp), by.clock),
        })
    }

    /// Whether a scope of a warp holds the block of a record too.
    pub(crate) fn shares(&self, warp: usize, by: Record, scope: Scope) -> bool {
        match scope {
            Scope::Device => true,
            Scope::Cluster => by.cohort == self.slot(warp).cohort,
            Scope::Block => by.block == self.warps[warp].block,
        }
    }
}

/// What threads that meet pass on to each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gathering {
    known: Knowledge,
    fenced: [Vec<u32>; SCOPES],
    heard: [Knowledge; SCOPES],
}

/// What each warp knows to be fenced.
#[derive(Debug, Default)]
pub(crate) struct Proxies {
    /// Whether anything uses the asynchronous proxy at all.
    pub(crate) on: bool,
    /// The clock of each lane's own last fence.
    lanes: Vec<[u32; LANES]>,
}

impl Proxies {
    /// Some of `warps` warps are new.
    fn begin(&mut self, warps: usize, new: std::ops::Range<usize>) {
        if self.on {
            self.lanes.resize(warps, [0; LANES]);
            self.lanes[new].fill([0; LANES]);
        }
    }

    /// A fence of some lanes of a warp that knows so much of the others, and all of whose lanes met before clock
    /// `together`.
    fn fence(&mut self, warp: usize, lanes: u32, known: &mut Knowledge, (all, together): (bool, u32)) {
        let Knowledge { clocks, proxied, .. } = known;
        let clock = clocks[warp];
        proxied.resize(clocks.len(), 0);
        for (other, (fenced, &heard)) in proxied.iter_mut().zip(&*clocks).enumerate() {
            let own = if all { clock } else { together.saturating_sub(1) };
            *fenced = (*fenced).max(if other == warp { own } else { heard });
        }
        crate::lanes::lanes(lanes).for_each(|l| self.lanes[warp][l] = clock);
    }
}

impl Clocks {
    /// Whether the asynchronous proxy, used by a warp, does not yet see a write.
    pub(crate) fn unseen(&self, warp: usize, write: Cell) -> bool {
        let Some(by) = self.find(record(write)).filter(|_| write & ASYNC == 0) else { return false };
        let (other, fenced) = (by.warp as usize, &self.warps[warp].known.proxied);
        by.cohort == self.slot(other).cohort
            && fenced.get(other).is_none_or(|&clock| clock < by.clock)
            && self.proxies.lanes[other][lane(write) as usize] < by.clock
    }
}
