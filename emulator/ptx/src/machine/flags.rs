//! What is published at addresses: a strong write of a warp passes on what the warp knows, in a scope, and a strong read
//! of the address hears of it.
//!
//! A flag is an address that was written so. For each domain (the device, one cluster, one block) it holds what was
//! published there: a write of block scope reaches readers of the same block only.

use std::collections::HashMap;

use crate::code::Scope;

/// The place of a cluster on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// The cluster that is in it.
    pub(crate) cohort: u32,
    /// The first record of that.
    pub(super) first: u32,
    /// Its records below came before a barrier of all its threads.
    pub(super) barrier: u32,
}

/// The threads that see what was published: of the device, of the cluster (cohort) or the block of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Domain {
    pub(crate) scope: Scope,
    pub(crate) number: u32,
}

/// What a warp knows, or what is passed on to warps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Knowledge {
    /// By resident warp: all that it did before this clock. May be shorter than there are warps.
    pub(crate) clocks: Vec<u32>,
    /// The same for what is fenced for the asynchronous proxy, if anything uses that.
    pub(crate) proxied: Vec<u32>,
    /// Flags through which it knows of clusters that have ended.
    pub(crate) flags: Vec<u32>,
}

impl Knowledge {
    pub(crate) fn add(&mut self, other: &Knowledge) {
        join(&mut self.clocks, &other.clocks);
        join(&mut self.proxied, &other.proxied);
        merge(&mut self.flags, &other.flags);
    }

    pub(crate) fn clear(&mut self) {
        self.clocks.clear();
        self.proxied.clear();
        self.flags.clear();
    }

    /// Forgets the warps of a range, which others replace.
    pub(crate) fn forget(&mut self, warps: std::ops::Range<usize>) {
        for clocks in [&mut self.clocks, &mut self.proxied] {
            let end = warps.end.min(clocks.len());
            clocks[warps.start.min(end)..end].fill(0);
        }
    }
}

/// What was published in one domain.
#[derive(Debug, Default)]
struct Published {
    /// Of the clusters that were resident when the flag was last used.
    now: Knowledge,
    /// Which cluster each slot of `now` is about.
    cohorts: Vec<u32>,
    /// Of clusters that have ended: the clocks of their warps.
    past: HashMap<u32, Vec<u32>>,
}

impl Published {
    /// Moves what is about clusters that have ended from `now` to `past`.
    fn settle(&mut self, slots: &[Slot], warps_a_slot: usize) {
        for (s, slot) in slots.iter().enumerate() {
            let Some(cohort) = self.cohorts.get_mut(s) else {
                self.cohorts.push(slot.cohort);
                continue;
            };
            if *cohort == slot.cohort {
                continue;
            }
            let range = s * warps_a_slot..(s + 1) * warps_a_slot;
            let clocks = self.now.clocks.get(range.clone()).filter(|clocks| clocks.iter().any(|&c| c != 0));
            if let Some(clocks) = clocks {
                self.past.insert(*cohort, clocks.to_vec());
            }
            self.now.forget(range);
            *cohort = slot.cohort;
        }
    }
}

/// An address at which something was published.
#[derive(Debug, Default)]
struct Flag {
    domains: HashMap<Domain, Published>,
}

/// The flags of a launch.
#[derive(Debug, Default)]
pub(crate) struct Flags {
    flags: Vec<Flag>,
    numbers: HashMap<u64, u32>,
}

impl Flags {
    pub(crate) fn is_empty(&self) -> bool {
        self.flags.is_empty()
    }

    pub(crate) fn number(&self, address: u64) -> Option<u32> {
        self.numbers.get(&address).copied()
    }

    /// Adds to what is published at an address in a domain.
    pub(crate) fn publish(
        &mut self,
        address: u64,
        domain: Domain,
        (slots, warps_a_slot): (&[Slot], usize),
        add: impl FnOnce(&mut Knowledge),
    ) {
        let number = *self.numbers.entry(address).or_insert_with(|| {
            self.flags.push(Flag::default());
            self.flags.len() as u32 - 1
        });
        let published = self.flags[number as usize].domains.entry(domain).or_default();
        published.settle(slots, warps_a_slot);
        add(&mut published.now);
    }

    /// What is published at a flag in a domain by clusters that are resident.
    pub(crate) fn published(
        &mut self,
        flag: u32,
        domain: Domain,
        (slots, warps_a_slot): (&[Slot], usize),
    ) -> Option<&Knowledge> {
        let published = self.flags[flag as usize].domains.get_mut(&domain)?;
        published.settle(slots, warps_a_slot);
        Some(&published.now)
    }

    /// Whether what flags say, or the flags whose publishers had heard of those, covers a clock of a warp of a cluster
    /// that has ended; the warp is given as its number among all and in its slot.
    pub(crate) fn cover(&self, heard: &[u32], cohort: u32, (slot, warp): (usize, usize), clock: u32) -> bool {
        const DEVICE: Domain = Domain { scope: Scope::Device, number: 0 };
        let mut waiting = heard.to_vec();
        let mut seen = waiting.clone();
        while let Some(flag) = waiting.pop() {
            let Some(published) = self.flags[flag as usize].domains.get(&DEVICE) else { continue };
            let known = match published.cohorts.get(slot) == Some(&cohort) {
                true => published.now.clocks.get(warp),
                false => published.past.get(&cohort).and_then(|clocks| clocks.get(warp % clocks.len())),
            };
            if known.is_some_and(|&known| known >= clock) {
                return true;
            }
            for &more in &published.now.flags {
                if !seen.contains(&more) {
                    seen.push(more);
                    waiting.push(more);
                }
            }
        }
        false
    }
}

/// Each clock becomes the later one of both; what is missing is 0.
pub(super) fn join(into: &mut Vec<u32>, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (into, from) in into.iter_mut().zip(from) {
        *into = (*into).max(*from);
    }
}

pub(super) fn merge(into: &mut Vec<u32>, from: &[u32]) {
    for flag in from {
        if !into.contains(flag) {
            into.push(*flag);
        }
    }
}
