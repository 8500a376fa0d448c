//! Nodes that wait to be used again: to get one from the system and to return it takes longer than to fill it.

use std::any::TypeId;
use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::node::Node;

/// Nodes that a thread keeps at most: about a mebibyte.
const KEPT: usize = 4096;
/// Types of body that it keeps nodes of at most; a power of two.
const TYPES: usize = 512;

/// Empty nodes by the type of their body: a table with open addressing, whose entries stay.
#[derive(Default)]
struct Spare {
    bins: Vec<Option<(TypeId, Vec<Arc<Node>>)>>,
    count: usize,
}

thread_local! {
    static SPARE: RefCell<Spare> = RefCell::default();
}

impl Spare {
    /// The nodes of a type; `None` if there are too many types.
    #[inline]
    fn bin(&mut self, body: TypeId) -> Option<&mut Vec<Arc<Node>>> {
        if self.bins.is_empty() {
            self.bins.resize_with(TYPES, || None);
        }
        let mut bits = Bits(0);
        body.hash(&mut bits);
        let mut at = bits.0 as usize % TYPES;
        for _ in 0..TYPES / 2 {
            if self.bins[at].as_ref().is_none_or(|bin| bin.0 == body) {
                return Some(&mut self.bins[at].get_or_insert((body, Vec::new())).1);
            }
            at = (at + 1) % TYPES;
        }
        None
    }
}

/// An empty operation's node with a body of this type, if one waits at this thread.
pub(crate) fn take(body: TypeId) -> Option<Arc<Node>> {
    let pop = |spare: &RefCell<Spare>| {
        let mut spare = spare.try_borrow_mut().ok()?;
        let node = spare.bin(body)?.pop()?;
        spare.count -= 1;
        Some(node)
    };
    SPARE.try_with(pop).ok().flatten()
}

/// Keeps an empty node whose body is of this type.
pub(crate) fn keep(body: TypeId, node: Arc<Node>) {
    // While a thread ends its nodes may be gone; then this one goes too.
    let _ = SPARE.try_with(|spare| {
        let Ok(mut spare) = spare.try_borrow_mut() else { return };
        if spare.count < KEPT
            && let Some(bin) = spare.bin(body)
        {
            bin.push(node);
            spare.count += 1;
        }
    });
}

/// A type's identity is a hash already.
struct Bits(u64);

impl Hasher for Bits {
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
