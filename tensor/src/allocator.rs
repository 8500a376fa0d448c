//! The caching allocator of a CPU device: it keeps memory in free lists for the next tensor of about the same size.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::cell::RefCell;
use std::ops::{Range, RangeInclusive};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use memmap2::MmapMut;

use crate::cuda::{Gpu, Pinned};
use crate::io::FileBlock;
use crate::storage::Storage;
use crate::sync::lock;
use crate::{Ledger, Result};

/// Alignment of every block, in bytes: a cache line, which is also an AVX-512 vector.
const ALIGN: usize = 64;
/// Eight classes to a doubling from 64 bytes up: at most 1/8 of a block is wasted. The first is that of no bytes.
const CLASSES: usize = 8 * 58 + 1;

/// The size of pages that large blocks lie in, where the system has such: less to fault in and to translate.
const HUGE_PAGE: usize = 2 << 20;
/// Blocks of these sizes share huge pages. Larger ones have their own, and small pages at their end.
const SHARING: RangeInclusive<usize> = 128 << 10..=REGION / 2;
/// Memory that blocks share. Its pages are taken from the system when a block first touches them.
const REGION: usize = 64 << 20;

/// A piece of memory, aligned to 64 bytes, every byte of it initialized.
#[derive(Debug)]
pub(crate) struct Block {
    memory: Memory,
    start: NonNull<u8>,
    class: usize,
}

#[derive(Debug)]
enum Memory {
    Heap(NonNull<u8>),
    Mapped { _map: MmapMut },
    Shared { region: Arc<MmapMut> },
    Pinned { _pinned: Pinned },
    File(FileBlock),
}

// SAFETY: a block owns its memory alone; nothing about it depends on the thread.
unsafe impl Send for Block {}
// SAFETY: `&Block` gives out nothing but the address.
unsafe impl Sync for Block {}

impl Block {
    /// New memory for at least `bytes`, which are not 0; `None` if the system has no more.
    pub(crate) fn obtain(bytes: usize, ledger: &Ledger) -> Option<Block> {
        let class = class_of(bytes)?;
        let bytes = class_bytes(class);
        if bytes >= *SHARING.start() {
            let (memory, start) = if SHARING.contains(&bytes) {
                share(bytes).map(|(region, start)| (Memory::Shared { region }, start))?
            } else {
                map(bytes).map(|(map, start)| (Memory::Mapped { _map: map }, start))?
            };
            ledger.obtained_add(bytes);
            return Some(Block { memory, start, class });
        }
        // SAFETY: the layout's size is at least 64, hence not zero. Zeroed memory costs nothing for large
        // blocks (the system's pages are zero) and lets every block be read as elements from the start.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout(class)) })?;
        ledger.obtained_add(bytes);
        let skip = base.as_ptr().align_offset(ALIGN);
        // SAFETY: `skip < ALIGN`, and the layout holds ALIGN bytes more than the class.
        let start = unsafe { base.add(skip) };
        Some(Block { memory: Memory::Heap(base), start, class })
    }

    /// New memory that a GPU reads and writes without the driver's help.
    pub(crate) fn pinned(bytes: usize, gpu: &'static Gpu, ledger: &Ledger) -> Result<Option<Block>> {
        let Some(class) = class_of(bytes) else { return Ok(None) };
        let mut pinned = Pinned::zeros(gpu, class_bytes(class) + ALIGN)?;
        let skip = pinned.as_ptr().align_offset(ALIGN);
        let Some(start) = NonNull::new(pinned[skip..].as_mut_ptr()) else { return Ok(None) };
        ledger.obtained_add(class_bytes(class));
        Ok(Some(Block { memory: Memory::Pinned { _pinned: pinned }, start, class }))
    }

    /// Memory in a mapped file.
    pub(crate) fn in_file(bytes: usize, file: u32) -> Result<Option<Block>> {
        let mut block = FileBlock::obtain(file, bytes)?;
        Ok(block.start().map(|start| Block { memory: Memory::File(block), start, class: 0 }))
    }

    /// Takes the pages of a mapped file out of the process's memory.
    pub(crate) fn release_pages(&self) {
        if let Memory::File(block) = &self.memory {
            block.release_pages();
        }
    }

    /// The first byte.
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &self.memory {
            // SAFETY: it came from `alloc_zeroed` with this very layout, and the owner frees it once.
            Memory::Heap(base) => unsafe { std::alloc::dealloc(base.as_ptr(), layout(self.class)) },
            Memory::Shared { region } => give_back(region, self.start, class_bytes(self.class)),
            Memory::Mapped { .. } | Memory::Pinned { .. } | Memory::File(_) => {}
        }
    }
}

/// A region, and the bytes of it that no block has had.
static REST: Mutex<Option<(Arc<MmapMut>, Range<usize>)>> = Mutex::new(None);

/// Zeroed memory for `bytes` in a region, which no other block gets: its whole pages go [back](give_back) to the system with the block, and the
/// region with the last of its blocks.
fn share(bytes: usize) -> Option<(Arc<MmapMut>, NonNull<u8>)> {
    let mut rest = lock(&REST);
    if rest.as_ref().is_none_or(|(_, free)| free.len() < bytes) {
        let (map, start) = map(REGION)?;
        let skip = start.addr().get() - map.as_ptr().addr();
        *rest = Some((Arc::new(map), skip..skip + REGION));
    }
    let (map, free) = rest.as_mut()?;
    let start = NonNull::new(map.as_ptr().wrapping_add(free.start).cast_mut())?;
    free.start += bytes;
    Some((map.clone(), start))
}

/// Gives the whole huge pages of a block of a region back to the system, where it takes back a part.
#[cfg_attr(any(not(target_os = "linux"), miri), allow(unused_variables))]
fn give_back(region: &MmapMut, start: NonNull<u8>, bytes: usize) {
    let skip = start.as_ptr().align_offset(HUGE_PAGE);
    let whole = bytes.saturating_sub(skip) / HUGE_PAGE * HUGE_PAGE;
    #[cfg(all(target_os = "linux", not(miri)))]
    if whole > 0 {
        let from = start.addr().get() + skip - region.as_ptr().addr();
        // SAFETY: the pages are the block's alone, and it is dropped. A hint that fails leaves them as they are.
        let _ = unsafe { region.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from, whole) };
    }
}

/// Zeroed memory for `bytes`, and where it begins. Its end, where no whole huge page fits, has small ones.
fn map(bytes: usize) -> Option<(MmapMut, NonNull<u8>)> {
    let mut map = MmapMut::map_anon(bytes + HUGE_PAGE).ok()?;
    let skip = map.as_ptr().align_offset(HUGE_PAGE);
    // A hint: a system without huge pages gives others. Miri knows no such hint.
    #[cfg(all(target_os = "linux", not(miri)))]
    let _ = map.advise_range(memmap2::Advice::HugePage, skip, bytes / HUGE_PAGE * HUGE_PAGE);
    let start = NonNull::new(map[skip..].as_mut_ptr())?;
    Some((map, start))
}

/// Free lists of whole storages by size class. Small storages are in lists of the thread that recycled them, which need no lock; the others
/// are in lists that all threads share.
pub(crate) struct Allocator {
    lists: Vec<Mutex<FreeList>>,
}

type FreeList = Vec<Box<Storage>>;

impl Allocator {
    pub(crate) fn new() -> Allocator {
        Allocator { lists: (0..CLASSES).map(|_| Mutex::default()).collect() }
    }

    /// A storage with memory for `bytes`, if a free list has one; what it holds is unspecified.
    #[inline]
    pub(crate) fn take(&'static self, bytes: usize) -> Option<Box<Storage>> {
        let class = class_of(bytes)?;
        local(self, class, |list| {
            if list.is_empty() {
                let mut shared = lock(&self.lists[class]);
                let rest = shared.len().saturating_sub(local_max(class) / 2);
                list.extend(shared.drain(rest..));
            }
            list.pop()
        })
        .unwrap_or_else(|| lock(&self.lists[class]).pop())
    }

    /// Puts a storage that is no longer used into a free list.
    #[inline]
    pub(crate) fn recycle(&'static self, storage: Box<Storage>) {
        let class = storage.block().map_or(0, |block| block.class);
        let mut storage = Some(storage);
        local(self, class, |list| {
            if list.len() == local_max(class) {
                lock(&self.lists[class]).extend(list.drain(local_max(class) / 2..));
            }
            if let Some(storage) = storage.take() {
                list.push(storage);
            }
        });
        if let Some(storage) = storage {
            lock(&self.lists[class]).push(storage);
        }
    }

    /// Returns the storages of the shared lists and of this thread's to the system; other threads keep theirs.
    pub(crate) fn trim(&'static self, ledger: &Ledger) {
        let _ = LOCAL.try_with(|local| local.borrow_mut().flush());
        for (class, list) in self.lists.iter().enumerate() {
            let waiting = std::mem::take(&mut *lock(list));
            ledger.obtained_sub(waiting.len() * class_bytes(class));
        }
        let mut rest = lock(&REST);
        if rest.as_ref().is_some_and(|(map, _)| Arc::strong_count(map) == 1) {
            *rest = None;
        }
    }
}

/// Classes that a thread keeps storages of: up to 8 KiB.
const LOCAL_CLASSES: usize = 8 * 7 + 2;

/// Storages of a class that a thread keeps at most: 32 KiB, and no fewer than 16. It exchanges half of them at a time
/// with the others.
#[inline]
fn local_max(class: usize) -> usize {
    (512 >> (class / 8)).max(16)
}

thread_local! {
    static LOCAL: RefCell<LocalLists> = const { RefCell::new(LocalLists { owner: None, lists: Vec::new() }) };
}

/// A thread's own free lists, all of one allocator: the first that the thread used since the lists were last empty.
struct LocalLists {
    owner: Option<&'static Allocator>,
    lists: Vec<FreeList>,
}

impl LocalLists {
    /// Moves everything to the shared lists.
    fn flush(&mut self) {
        if let Some(owner) = self.owner.take() {
            for (class, list) in self.lists.iter_mut().enumerate() {
                lock(&owner.lists[class]).append(list);
            }
        }
    }
}

impl Drop for LocalLists {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Calls `f` with this thread's list of a class, if it keeps storages of this class and allocator (and has not ended).
#[inline]
fn local<R>(allocator: &'static Allocator, class: usize, f: impl FnOnce(&mut FreeList) -> R) -> Option<R> {
    if class >= LOCAL_CLASSES {
        return None;
    }
    let mut found = None;
    let _ = LOCAL.try_with(|local| {
        let Ok(mut local) = local.try_borrow_mut() else { return };
        if local.owner.is_none() {
            local.owner = Some(allocator);
            local.lists.resize_with(LOCAL_CLASSES, Vec::new);
        }
        if local.owner.is_some_and(|owner| std::ptr::eq(owner, allocator)) {
            found = Some(f(&mut local.lists[class]));
        }
    });
    found
}

/// The smallest class that holds `bytes`; `None` where no address space could.
#[inline]
fn class_of(bytes: usize) -> Option<usize> {
    if bytes <= 64 {
        return Some(bytes.min(1));
    }
    let units = bytes.div_ceil(64);
    if units > isize::MAX as usize / 128 {
        return None;
    }
    let doubling = units.ilog2() as usize;
    let base = 1usize << doubling;
    let eighth = ((units - base) * 8).div_ceil(base);
    Some(1 + doubling * 8 + eighth)
}

fn class_bytes(class: usize) -> usize {
    let Some(class) = class.checked_sub(1) else { return 0 };
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
    use crate::Device;

    #[test]
    fn a_class_holds_what_it_is_chosen_for_and_wastes_little() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, 3 << 30, usize::MAX >> 9]) {
            let held = class_bytes(class_of(bytes).unwrap());
            assert!(held >= bytes && (bytes < 512 || held <= bytes + bytes / 8 + 64), "{bytes} {held}");
        }
        assert_eq!(class_of(usize::MAX), None);
    }

    #[test]
    fn what_is_dropped_is_used_again() {
        let device = Device::Cpu(900);
        let ledger = device.ledger().unwrap();
        for bytes in [0, 1000, 1_000_000, 5_000_000] {
            let first = Storage::allocate("test", &[], bytes, device).unwrap();
            let address = first.block().map(Block::start);
            assert!(address.is_none_or(|a| a.as_ptr().addr().is_multiple_of(ALIGN)));
            drop(first);
            let obtained = ledger.obtained().now;
            let again = Storage::allocate("test", &[], bytes.saturating_sub(10), device).unwrap();
            assert_eq!((again.block().map(Block::start), ledger.obtained().now), (address, obtained));
        }
        assert_eq!(ledger.total().now, 0);
        device.trim().unwrap();
        assert_eq!(ledger.obtained().now, 0);
    }

    #[test]
    fn blocks_of_a_region_are_zero_and_apart() {
        let ledger = Device::Cpu(903).ledger().unwrap();
        let lens = [*SHARING.start(), HUGE_PAGE - 64, 200_000, 3 * HUGE_PAGE + 64, *SHARING.end()];
        let blocks = (0..12).map(|i| (Block::obtain(lens[i % 5], ledger).unwrap(), lens[i % 5]));
        let mut all: Vec<(NonNull<u8>, usize, Block)> = blocks.map(|(b, len)| (b.start(), len, b)).collect();
        for (nth, (start, len, _)) in all.iter().enumerate() {
            assert!(start.as_ptr().addr().is_multiple_of(ALIGN));
            // SAFETY: the block's own bytes, which nothing else reads.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), *len) };
            assert!(bytes.iter().all(|&byte| byte == 0), "block {nth}");
            bytes.fill(1);
        }
        all.sort_by_key(|block| block.0);
        assert!(all.windows(2).all(|two| two[0].0.addr().get() + two[0].1 <= two[1].0.addr().get()));
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn a_dropped_block_gives_its_own_pages_back() {
        let ledger = Device::Cpu(904).ledger().unwrap();
        let len = 3 * HUGE_PAGE + 64;
        let blocks: Vec<Block> = (0..2 * REGION / len).map(|_| Block::obtain(len, ledger).unwrap()).collect();
        let ones = |block: &Block| {
            // SAFETY: the block's own bytes, which nothing else reads.
            unsafe { std::slice::from_raw_parts_mut(block.start().as_ptr(), len) }.fill(1);
        };
        blocks.iter().for_each(ones);
        let region = |block: &Block| match &block.memory {
            Memory::Shared { region } => region.clone(),
            memory => panic!("{memory:?} is not shared"),
        };
        let places: Vec<_> = blocks.iter().map(|block| (block.start(), region(block))).collect();
        // Every other one goes.
        let kept: Vec<Block> =
            blocks.into_iter().enumerate().filter(|(i, _)| i % 2 == 0).map(|(_, b)| b).collect();
        for (i, (start, _)) in places.iter().enumerate() {
            // SAFETY: `places` keeps the region mapped.
            let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), len) };
            let zeros = bytes.iter().filter(|&&byte| byte == 0).count();
            let wanted = if i % 2 == 0 { 0..=0 } else { 2 * HUGE_PAGE..=len };
            assert!(wanted.contains(&zeros), "block {i}: {zeros} bytes are zero");
        }
        drop(kept);
    }

    #[test]
    fn many_go_by_way_of_the_shared_bins_and_come_back() {
        let device = Device::Cpu(901);
        let ledger = device.ledger().unwrap();
        let many =
            || (0..3000).map(|_| Storage::allocate("test", &[], 100, device).unwrap()).collect::<Vec<_>>();
        drop(many());
        let obtained = ledger.obtained().now;
        drop(many());
        assert_eq!((ledger.obtained().now, ledger.total().now), (obtained, 0));
        device.trim().unwrap();
        assert_eq!(ledger.obtained().now, 0);
    }

    #[test]
    fn what_a_thread_that_ended_has_kept_is_used_again() {
        let device = Device::Cpu(902);
        let thread = std::thread::spawn(move || drop(Storage::allocate("test", &[], 100, device).unwrap()));
        thread.join().unwrap();
        let obtained = device.ledger().unwrap().obtained().now;
        drop(Storage::allocate("test", &[], 100, device).unwrap());
        assert_eq!(device.ledger().unwrap().obtained().now, obtained);
    }
}
