//! The plan of a backward pass: which nodes run, and how many gradients each waits for.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use phalanx_tensor::Device;
use smallvec::SmallVec;

use super::job::{Job, NodeGrads};
use crate::node::Node;

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
pub(super) struct Plan {
    /// Gradients that each node waits for.
    pub(super) waits: NodeMap<u32>,
    /// Every device that a node runs on.
    pub(super) devices: SmallVec<[Device; 2]>,
}

/// Walks from the roots along every edge that `job` follows.
pub(super) fn plan(job: &Job, roots: &[(Arc<Node>, NodeGrads)]) -> Plan {
    job.find_needed(roots);
    let mut plan = Plan { waits: NodeMap::default(), devices: SmallVec::new() };
    let mut waiting: Vec<&Arc<Node>> = Vec::new();
    for (node, _) in roots {
        if plan.waits.insert(key(node), 0).is_none() {
            waiting.push(node);
        }
    }
    while let Some(node) = waiting.pop() {
        let device = node.device();
        if !plan.devices.contains(&device) {
            plan.devices.push(device);
        }
        for edge in node.inputs.iter().flatten().filter(|e| job.follows(e)) {
            let count = plan.waits.entry(key(&edge.node)).or_insert_with(|| {
                waiting.push(&edge.node);
                0
            });
            *count += 1;
        }
    }
    plan
}
