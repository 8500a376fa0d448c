//! The caching allocator of a CPU device: memory once obtained is kept for the next tensor of about its size.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::Ledger;

/// Alignment of every block, in bytes: a cache line, which is also an AVX-512 vector.
const ALIGN: usize = 64;
/// Eight classes to a doubling from 64 bytes up: at most 1/8 of a block is wasted.
const CLASSES: usize = 8 * 58;

/// A piece of memory, aligned to 64 bytes, every byte of it initialized.
#[derive(Debug)]
pub(crate) struct Block {
    base: NonNull<u8>,
    start: NonNull<u8>,
    class: usize,
}

// SAFETY: a block owns its memory alone; nothing about it depends on the thread.
unsafe impl Send for Block {}
// SAFETY: `&Block` gives out nothing but the address.
unsafe impl Sync for Block {}

impl Block {
    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this very layout, and the owner frees it once.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), layout(self.class)) }
    }
}

/// Blocks that wait to be used again, by size class: small ones at the thread that released them, where nobody
/// competes for them, the others in bins that all threads share.
pub(crate) struct Allocator {
    free: Vec<Mutex<Vec<Block>>>,
}

impl Allocator {
    pub(crate) fn new() -> Allocator {
        Allocator { free: (0..CLASSES).map(|_| Mutex::default()).collect() }
    }

    /// A block of at least `bytes`; its content is unspecified but initialized. `None` if the system has no more.
    pub(crate) fn allocate(&'static self, bytes: usize, ledger: &Ledger) -> Option<Block> {
        let class = class_of(bytes)?;
        if let Some(block) = near(self, class, Vec::pop).flatten() {
            return Some(block);
        }
        if let Some(block) = lock(&self.free[class]).pop() {
            return Some(block);
        }
        // SAFETY: the layout's size is at least 128, hence not zero. Zeroed memory costs nothing for large
        // blocks (the system's pages are zero) and lets every block be read as elements from the start.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout(class)) })?;
        ledger.obtained_add(class_bytes(class));
        let skip = base.as_ptr().align_offset(ALIGN);
        // SAFETY: `skip < ALIGN`, and the layout holds ALIGN bytes more than the class.
        let start = unsafe { base.add(skip) };
        Some(Block { base, start, class })
    }

    /// Takes a block back.
    pub(crate) fn release(&'static self, block: Block) {
        let class = block.class;
        let mut block = Some(block);
        near(self, class, |bin| {
            if bin.len() < NEAR_BLOCKS {
                bin.extend(block.take());
            }
        });
        lock(&self.free[class]).extend(block);
    }

    /// Returns the blocks that wait in the shared bins and at this thread to the system; other threads keep theirs.
    pub(crate) fn trim(&'static self, ledger: &Ledger) {
        let _ = NEAR.try_with(|near| near.borrow_mut().flush());
        for (class, bin) in self.free.iter().enumerate() {
            let blocks = std::mem::take(&mut *lock(bin));
            ledger.obtained_sub(blocks.len() * class_bytes(class));
        }
    }
}

/// Classes that a thread keeps blocks of: up to 8 KiB.
const NEAR_CLASSES: usize = 8 * 7 + 1;
/// Blocks of a class that it keeps at most.
const NEAR_BLOCKS: usize = 16;

thread_local! {
    static NEAR: RefCell<Near> = const { RefCell::new(Near { owner: None, bins: Vec::new() }) };
}

/// A thread's own blocks, all of one allocator: the first that the thread used since it last had none.
struct Near {
    owner: Option<&'static Allocator>,
    bins: Vec<Vec<Block>>,
}

impl Near {
    /// Gives all blocks back to the shared bins.
    fn flush(&mut self) {
        if let Some(owner) = self.owner.take() {
            for (class, bin) in self.bins.iter_mut().enumerate() {
                lock(&owner.free[class]).append(bin);
            }
        }
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Calls `f` with this thread's bin of a class, if it keeps blocks of this class and allocator (and has not ended).
#[inline]
fn near<R>(allocator: &'static Allocator, class: usize, f: impl FnOnce(&mut Vec<Block>) -> R) -> Option<R> {
    if class >= NEAR_CLASSES {
        return None;
    }
    let mut found = None;
    let _ = NEAR.try_with(|near| {
        let Ok(mut near) = near.try_borrow_mut() else { return };
        if near.owner.is_none() {
            near.owner = Some(allocator);
            near.bins.resize_with(NEAR_CLASSES, Vec::new);
        }
        if near.owner.is_some_and(|owner| std::ptr::eq(owner, allocator)) {
            found = Some(f(&mut near.bins[class]));
        }
    });
    found
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The smallest class that holds `bytes`; `None` where no address space could.
fn class_of(bytes: usize) -> Option<usize> {
    let units = bytes.max(64).div_ceil(64);
    if units > isize::MAX as usize / 128 {
        return None;
    }
    let doubling = units.ilog2() as usize;
    let base = 1usize << doubling;
    let eighth = ((units - base) * 8).div_ceil(base);
    Some(doubling * 8 + eighth)
}

fn class_bytes(class: usize) -> usize {
    let base = 64usize << (class / 8);
    base + (base / 8).max(1) * (class % 8)
}

fn layout(class: usize) -> Layout {
    let bytes = class_bytes(class) + ALIGN;
    // SAFETY: 16 is a power of two; `class_of` admits classes of at most isize::MAX / 2 bytes.
    unsafe { Layout::from_size_align_unchecked(bytes, 16) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_what_it_is_chosen_for_and_wastes_little() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, 3 << 30, usize::MAX >> 9]) {
            let held = class_bytes(class_of(bytes).unwrap());
            assert!(held >= bytes && (bytes < 512 || held <= bytes + bytes / 8 + 64), "{bytes} {held}");
        }
        assert_eq!(class_of(usize::MAX), None);
    }

    #[test]
    fn released_blocks_are_used_again() {
        let (ledger, allocator) = (Ledger::default(), &*Box::leak(Box::new(Allocator::new())));
        for bytes in [1000, 1_000_000] {
            let first = allocator.allocate(bytes, &ledger).unwrap();
            let address = first.start();
            assert_eq!(address.as_ptr() as usize % ALIGN, 0);
            allocator.release(first);
            let obtained = ledger.obtained().now;
            let again = allocator.allocate(bytes - 10, &ledger).unwrap();
            assert_eq!((again.start(), ledger.obtained().now), (address, obtained));
            allocator.release(again);
        }
        allocator.trim(&ledger);
        assert_eq!(ledger.obtained().now, 0);
    }

    #[test]
    fn blocks_of_a_thread_that_ended_are_used_again() {
        let (ledger, allocator) = (Ledger::default(), &*Box::leak(Box::new(Allocator::new())));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| allocator.release(allocator.allocate(100, &ledger).unwrap()));
            thread.join().unwrap();
        });
        let obtained = ledger.obtained().now;
        drop(allocator.allocate(100, &ledger).unwrap());
        assert_eq!(ledger.obtained().now, obtained);
    }
}
