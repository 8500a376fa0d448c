//! Nodes that wait to be used again: to get one from the system and to return it takes longer than to fill it.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::node::Node;

/// Nodes that a thread keeps at most: about a mebibyte.
const KEPT: usize = 4096;

/// Empty nodes by the type of their body.
#[derive(Default)]
struct Spare {
    nodes: HashMap<TypeId, Vec<Arc<Node>>, BuildHasherDefault<TypeHasher>>,
    count: usize,
}

thread_local! {
    static SPARE: RefCell<Spare> = RefCell::default();
}

/// An empty operation's node with a body of this type, if one waits at this thread.
pub(crate) fn take(body: TypeId) -> Option<Arc<Node>> {
    let pop = |spare: &RefCell<Spare>| {
        let mut spare = spare.try_borrow_mut().ok()?;
        let node = spare.nodes.get_mut(&body)?.pop()?;
        spare.count -= 1;
        Some(node)
    };
    SPARE.try_with(pop).ok().flatten()
}

/// Takes what a node holds away, and keeps the node if it is an operation's and nobody else's.
pub(crate) fn keep(mut node: Arc<Node>) {
    let Some(empty) = Arc::get_mut(&mut node) else { return };
    if !empty.body.empty() {
        return;
    }
    let body = empty.body.type_id();
    empty.inputs.clear();
    empty.outputs.clear();
    empty.hooks.take();
    empty.recorded = None;
    // While a thread ends its nodes may be gone; then this one goes too.
    let _ = SPARE.try_with(|spare| {
        let Ok(mut spare) = spare.try_borrow_mut() else { return };
        if spare.count < KEPT {
            spare.count += 1;
            spare.nodes.entry(body).or_default().push(node);
        }
    });
}

/// A type's identity is a hash already.
#[derive(Default)]
struct TypeHasher(u64);

impl Hasher for TypeHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}
