//! [`Spare`]: nodes that have run and wait to be used again.
//!
//! ```text
//! push <── near <──(all at once)── far <──(a batch at a time)── workers
//! ```
//! One thread allocates what another frees: the allocator's locks would cost more than the rest of a push.

use std::sync::Arc;

use super::node::Node;
use super::sync::{Mutex, Padded, lock};

/// Nodes that an engine keeps at most: some 15 MiB.
const KEPT: usize = 1 << 16;

/// Empty nodes of an engine.
pub(crate) struct Spare {
    /// Those that pushes take.
    near: Padded<Mutex<Vec<Arc<Node>>>>,
    /// Those that workers have brought back.
    far: Padded<Mutex<Vec<Arc<Node>>>>,
}

impl Spare {
    pub(crate) fn new() -> Spare {
        Spare { near: Padded(Mutex::new(Vec::new())), far: Padded(Mutex::new(Vec::new())) }
    }

    /// A node that `fill` has filled.
    pub(crate) fn take(&self, fill: impl FnOnce(&mut Node)) -> Arc<Node> {
        let mut near = lock(&self.near.0);
        if near.is_empty() {
            std::mem::swap(&mut *near, &mut *lock(&self.far.0));
        }
        let kept = near.pop();
        drop(near);
        let mut node = kept.unwrap_or_else(|| Arc::new(Node::empty()));
        fill(Arc::get_mut(&mut node).unwrap_or_else(|| unreachable!("what is kept has one handle")));
        node
    }

    /// Keeps nodes that [`empty`] has emptied.
    pub(crate) fn keep(&self, empty: impl IntoIterator<Item = Arc<Node>>) {
        let mut far = lock(&self.far.0);
        let room = KEPT.saturating_sub(far.len());
        far.extend(empty.into_iter().take(room));
    }
}

/// Lets a node that has run go of all it holds; the node, if nobody else has it.
pub(crate) fn empty(mut node: Arc<Node>) -> Option<Arc<Node>> {
    Arc::get_mut(&mut node)?.clear();
    Some(node)
}
