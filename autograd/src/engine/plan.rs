//! The plan of a backward pass: which nodes run, and how many gradients each still waits for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use phalanx_tensor::Device;
use smallvec::SmallVec;

use super::job::{Job, Task};
use crate::node::{Edge, Node};

/// A node's identity: its address, which the graph keeps alive; compared, never followed.
pub(super) type Key = usize;

/// The identity of a node.
pub(super) fn key(node: &Arc<Node>) -> Key {
    Arc::as_ptr(node).addr()
}

/// A map by node: an address is random enough for a hash after one multiplication.
pub(super) type NodeMap<V> = HashMap<Key, V, BuildHasherDefault<AddressHasher>>;

/// Spreads an address over 64 bits.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(usize::from(byte));
        }
    }

    fn write_usize(&mut self, n: usize) {
        self.0 = (self.0.rotate_left(5) ^ n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 ^= self.0 >> 29;
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
            if plan.waits.insert(key(&root.node), 0).is_none() {
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

    fn walk<'a>(&mut self, job: &Job, mut waiting: Vec<&'a Arc<Node>>) {
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
        match self.waits.entry(key(node)) {
            Entry::Occupied(mut waits) => *waits.get_mut() += 1,
            Entry::Vacant(slot) => {
                slot.insert(1);
                new.push(node);
            }
        }
    }

    /// Gradients that the node still waits for.
    pub(super) fn waits(&self, node: &Arc<Node>) -> u32 {
        self.waits.get(&key(node)).copied().unwrap_or(0)
    }

    /// Notes that one has come; whether it was the last.
    pub(super) fn arrived(&mut self, node: &Arc<Node>) -> bool {
        // Whatever is sent to was counted, each time.
        let Some(waits) = self.waits.get_mut(&key(node)) else { return true };
        *waits -= 1;
        *waits == 0
    }
}
