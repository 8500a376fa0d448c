//! [`Queue`]: the blocks of a save, between the thread that copies them out of tensors and the one that writes them.
//!
//! The first thread copies a few blocks ahead. When an update is about to write the tensors it copies the rest at once ([`Queue::release`]),
//! so the update waits for memory, not for the disk.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use phalanx_tensor::unpoisoned;

use crate::Result;

/// Bytes of blocks that are copied ahead of the disk while no update waits.
const AHEAD: usize = super::BLOCK;

/// The blocks that are copied and not yet taken.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes that may be held while an update waits.
    memory: usize,
}

#[derive(Debug, Default)]
struct State {
    blocks: VecDeque<Result<Vec<u8>>>,
    bytes: usize,
    /// The memory of blocks that are written, for the next ones: fresh pages cost as much time as the copy itself.
    spare: Vec<Vec<u8>>,
    /// Whether an update waits.
    hurried: bool,
    /// Whether no more blocks come.
    copied: bool,
    /// Whether no more blocks are wanted.
    closed: bool,
}

impl Queue {
    /// An empty queue.
    pub(super) fn new(memory: usize) -> Queue {
        Queue { state: Mutex::default(), changed: Condvar::new(), memory }
    }

    /// Adds a block, or why there is none. Waits while there are too many. Returns whether more are wanted.
    pub(super) fn push(&self, block: Result<Vec<u8>>) -> bool {
        let bytes = block.as_ref().map_or(0, Vec::len);
        let has_room = |state: &State| {
            let most = if state.hurried { self.memory.max(AHEAD) } else { AHEAD };
            state.closed || state.bytes == 0 || state.bytes + bytes <= most
        };
        let mut state = self.wait_until(has_room);
        if state.closed {
            return false;
        }
        state.blocks.push_back(block);
        state.bytes += bytes;
        self.changed.notify_all();
        true
    }

    /// The next block; none if that was the last.
    pub(super) fn pop(&self) -> Option<Result<Vec<u8>>> {
        let mut state = self.wait_until(|state| !state.blocks.is_empty() || state.copied);
        let block = state.blocks.pop_front()?;
        state.bytes -= block.as_ref().map_or(0, Vec::len);
        self.changed.notify_all();
        Some(block)
    }

    /// An empty buffer for the next block.
    pub(super) fn buffer(&self) -> Vec<u8> {
        unpoisoned(self.state.lock()).spare.pop().unwrap_or_default()
    }

    /// Takes back the memory of a block that is written.
    pub(super) fn recycle(&self, mut block: Vec<u8>) {
        block.clear();
        let mut state = unpoisoned(self.state.lock());
        let held: usize = state.spare.iter().map(Vec::capacity).sum();
        if held + block.capacity() <= 2 * AHEAD {
            state.spare.push(block);
        }
    }

    /// Waits until all blocks are copied, or none is wanted any more.
    pub(super) fn release(&self) {
        self.change(|state| state.hurried = true);
        drop(self.wait_until(|state| state.copied || state.closed));
    }

    /// No more blocks come.
    pub(super) fn end(&self) {
        self.change(|state| state.copied = true);
    }

    /// No more blocks are wanted.
    pub(super) fn close(&self) {
        self.change(|state| state.closed = true);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = unpoisoned(self.state.lock());
        change(&mut state);
        self.changed.notify_all();
    }

    fn wait_until(&self, fits: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        unpoisoned(self.changed.wait_while(unpoisoned(self.state.lock()), |state| !fits(state)))
    }
}

/// Closes a queue when it is dropped.
pub(super) struct Closing(pub(super) Arc<Queue>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_in_order_and_a_release_takes_as_much_memory_as_it_may() {
        let (queue, block) = (Queue::new(20 * AHEAD), AHEAD / 2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..10).for_each(|n| assert!(queue.push(Ok(vec![n; block]))));
                queue.end();
            });
            while unpoisoned(queue.state.lock()).bytes < AHEAD {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(unpoisoned(queue.state.lock()).blocks.len(), 2);
            queue.release();
            assert_eq!(unpoisoned(queue.state.lock()).bytes, 10 * block);
        });
        (0..10).for_each(|n| assert_eq!(queue.pop().unwrap().unwrap()[0], n));
        assert!(queue.pop().is_none());
    }

    #[test]
    fn memory_of_written_blocks_is_used_again_and_not_hoarded() {
        let queue = Queue::new(0);
        let blocks = [AHEAD, AHEAD, AHEAD].map(|bytes| vec![1; bytes]);
        let first = blocks[1].as_ptr();
        blocks.into_iter().for_each(|block| queue.recycle(block));
        let again = queue.buffer();
        assert!(again.is_empty() && again.as_ptr() == first);
        assert_eq!([queue.buffer().capacity(), queue.buffer().capacity()], [AHEAD, 0]);
    }

    #[test]
    fn a_queue_that_is_closed_holds_up_no_thread() {
        let queue = Queue::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| while queue.push(Ok(vec![0; AHEAD])) {});
            // Without memory to take, a release waits for the writer.
            scope.spawn(|| queue.release());
            queue.pop().unwrap().unwrap();
            queue.close();
        });
    }
}
