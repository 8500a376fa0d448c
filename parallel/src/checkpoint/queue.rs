//! [`Queue`]: the chunks of a save, between the thread that copies them out of tensors and the one that writes them.
//!
//! The first thread copies a little ahead. When an update is about to write the tensors it copies the rest at once ([`Queue::release`]),
//! so the update waits for memory, not for the disk.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use phalanx_tensor::unpoisoned;

use super::chunk::{CHUNK, Chunk};
use crate::Result;

/// Bytes that are copied ahead of the disk while no update waits.
const AHEAD: usize = CHUNK;

/// The chunks that are copied and not yet taken.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes that may be held while an update waits.
    memory: usize,
}

#[derive(Debug, Default)]
struct State {
    chunks: VecDeque<Result<Chunk>>,
    bytes: usize,
    /// Chunks that are written, for the next ones: fresh pages cost as much time as the copy itself.
    spare: Vec<Chunk>,
    /// Whether an update waits.
    hurried: bool,
    /// Whether no more chunks come.
    copied: bool,
    /// Whether no more chunks are wanted.
    closed: bool,
}

impl Queue {
    /// An empty queue.
    pub(super) fn new(memory: usize) -> Queue {
        Queue { state: Mutex::default(), changed: Condvar::new(), memory }
    }

    /// Adds a chunk, or why there is none. Waits while there are too many. Returns whether more are wanted.
    pub(super) fn push(&self, chunk: Result<Chunk>) -> bool {
        let bytes = size(&chunk);
        let has_room = |state: &State| {
            let most = if state.hurried { self.memory.max(AHEAD) } else { AHEAD };
            state.closed || state.bytes == 0 || state.bytes + bytes <= most
        };
        let mut state = self.wait_until(has_room);
        if state.closed {
            return false;
        }
        state.chunks.push_back(chunk);
        state.bytes += bytes;
        self.changed.notify_all();
        true
    }

    /// The next chunk; none if that was the last.
    pub(super) fn pop(&self) -> Option<Result<Chunk>> {
        let mut state = self.wait_until(|state| !state.chunks.is_empty() || state.copied);
        let chunk = state.chunks.pop_front()?;
        state.bytes -= size(&chunk);
        self.changed.notify_all();
        Some(chunk)
    }

    /// An empty chunk.
    pub(super) fn chunk(&self) -> Chunk {
        unpoisoned(self.state.lock()).spare.pop().unwrap_or_else(Chunk::with_room)
    }

    /// Takes back a chunk that is written.
    pub(super) fn recycle(&self, mut chunk: Chunk) {
        chunk.clear();
        let mut state = unpoisoned(self.state.lock());
        if (state.spare.len() + 1) * CHUNK <= 2 * AHEAD {
            state.spare.push(chunk);
        }
    }

    /// Waits until all chunks are copied, or none is wanted any more.
    pub(super) fn release(&self) {
        self.change(|state| state.hurried = true);
        drop(self.wait_until(|state| state.copied || state.closed));
    }

    /// No more chunks come.
    pub(super) fn end(&self) {
        self.change(|state| state.copied = true);
    }

    /// No more chunks are wanted.
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

fn size(chunk: &Result<Chunk>) -> usize {
    chunk.as_ref().map_or(0, |chunk| chunk.bytes().len())
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

    fn chunk(byte: u8, bytes: usize) -> Chunk {
        let mut chunk = Chunk::with_room();
        assert!(chunk.fill(&vec![byte; bytes]).is_empty());
        chunk
    }

    #[test]
    fn chunks_come_in_order_and_a_release_takes_as_much_memory_as_it_may() {
        let queue = Queue::new(20 * AHEAD);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..10).for_each(|n| assert!(queue.push(Ok(chunk(n, AHEAD / 2)))));
                queue.end();
            });
            while unpoisoned(queue.state.lock()).bytes < AHEAD {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(unpoisoned(queue.state.lock()).chunks.len(), 2);
            queue.release();
            assert_eq!(unpoisoned(queue.state.lock()).bytes, 5 * AHEAD);
        });
        (0..10).for_each(|n| assert_eq!(queue.pop().unwrap().unwrap().bytes()[0], n));
        assert!(queue.pop().is_none());
    }

    #[test]
    fn chunks_that_are_written_are_used_again_and_not_hoarded() {
        let queue = Queue::new(0);
        let chunks = [1, 2, 3].map(|byte| chunk(byte, CHUNK));
        let second = chunks[1].bytes().as_ptr();
        chunks.into_iter().for_each(|chunk| queue.recycle(chunk));
        let again = queue.chunk();
        assert!(again.bytes().is_empty() && again.bytes().as_ptr() == second);
        queue.chunk();
        assert!(unpoisoned(queue.state.lock()).spare.is_empty());
    }

    #[test]
    fn a_queue_that_is_closed_holds_up_no_thread() {
        let queue = Queue::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| while queue.push(Ok(chunk(0, CHUNK))) {});
            // Without memory to take, a release waits for the writer.
            scope.spawn(|| queue.release());
            queue.pop().unwrap().unwrap();
            queue.close();
        });
    }
}
