//! The plan of a backward pass: which nodes run, and how many gradients each still waits for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use phalanx_tensor::Device;
use smallvec::SmallVec;

use super::job::Job;
use super::task::Task;
use crate::node::{Edge, Node};

/// A node's identity: its number. (Not its address: recomputed nodes come and go. Not its sequence number: two
/// recomputations of one checkpoint have the same.)
pub(super) type Key = u64;

/// A map by node: one multiplication spreads consecutive numbers well enough.
pub(super) type NodeMap<V> = HashMap<Key, V, BuildHasherDefault<NumberHasher>>;

/// Spreads a number over 64 bits.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// What will run.
#[derive(Default)]
pub(super) struct Plan {
    /// Gradients that each node still waits for.
    waits: NodeMap<u32>,
    /// Every device that a node runs on.
    pub(super) devices: SmallVec<[Device; 2]>,
}

impl Plan {
    /// Everything that `job` reaches from the roots.
    pub(super) fn new(job: &Job, roots: &[Task]) -> Plan {
        job.find_needed(roots.iter().map(|r| &r.node));
        let mut plan = Plan::default();
        let mut waiting: Vec<&Arc<Node>> = Vec::new();
        for root in roots {
            if plan.waits.insert(root.node.id, 0).is_none() {
                waiting.push(&root.node);
            }
        }
        plan.walk(job, waiting);
        plan
    }

    /// Adds a graph that was recorded during the pass and hangs on what is planned already; each of `entries` is
    /// where a gradient will come in.
    pub(super) fn extend(&mut self, job: &Job, entries: &[Edge]) {
        job.find_needed(entries.iter().map(|e| &e.node));
        let mut waiting = Vec::new();
        for edge in entries {
            self.count(&edge.node, &mut waiting);
        }
        self.walk(job, waiting);
    }

    fn walk(&mut self, job: &Job, mut waiting: Vec<&Arc<Node>>) {
        while let Some(node) = waiting.pop() {
            let device = node.device();
            if !self.devices.contains(&device) {
                self.devices.push(device);
            }
            for edge in node.inputs.iter().flatten().filter(|e| job.follows(e)) {
                self.count(&edge.node, &mut waiting);
            }
        }
    }

    fn count<'a>(&mut self, node: &'a Arc<Node>, new: &mut Vec<&'a Arc<Node>>) {
        match self.waits.entry(node.id) {
            Entry::Occupied(mut waits) => *waits.get_mut() += 1,
            Entry::Vacant(slot) => {
                slot.insert(1);
                new.push(node);
            }
        }
    }

    /// Gradients that the node still waits for.
    pub(super) fn waits(&self, node: &Arc<Node>) -> u32 {
        self.waits.get(&node.id).copied().unwrap_or(0)
    }

    /// Notes that one has come; whether it was the last.
    pub(super) fn arrived(&mut self, node: &Arc<Node>) -> bool {
        // Whatever is sent to was counted, each time.
        let Some(waits) = self.waits.get_mut(&node.id) else { return true };
        *waits -= 1;
        *waits == 0
    }
}
