//! How nodes lie in memory: short lists inline, and a free list of nodes that are used again.

use std::any::TypeId;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, DerefMut};

/// A list of mostly one or two items: up to `N` of them inline, more in a box. It is filled at once and does not grow, so
/// that it checks less than a growing list does.
pub(crate) struct SmallList<T, const N: usize> {
    inline: [T; N],
    boxed: Option<Box<[T]>>,
    len: u32,
}

impl<T: Default, const N: usize> Default for SmallList<T, N> {
    #[inline]
    fn default() -> SmallList<T, N> {
        SmallList::of_len(0)
    }
}

impl<T: Default, const N: usize> SmallList<T, N> {
    /// A list of `len` default items.
    #[inline]
    pub(crate) fn of_len(len: usize) -> SmallList<T, N> {
        let boxed = (len > N).then(|| (0..len).map(|_| T::default()).collect());
        SmallList { inline: std::array::from_fn(|_| T::default()), boxed, len: len as u32 }
    }

    /// Replaces the content by `items`.
    #[inline]
    pub(crate) fn fill(&mut self, items: impl ExactSizeIterator<Item = T>) {
        self.clear();
        self.len = items.len() as u32;
        if items.len() > N {
            self.boxed = Some(items.collect());
            return;
        }
        for (place, item) in self.inline.iter_mut().zip(items) {
            *place = item;
        }
    }

    /// A list of `items`.
    #[inline]
    pub(crate) fn of(items: impl ExactSizeIterator<Item = T>) -> SmallList<T, N> {
        let mut list = SmallList::default();
        list.fill(items);
        list
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        if self.len as usize > N {
            self.boxed = None;
        } else {
            self.iter_mut().for_each(|item| *item = T::default());
        }
        self.len = 0;
    }
}

impl<T, const N: usize> Deref for SmallList<T, N> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.inline.get(..self.len as usize).unwrap_or_else(|| self.boxed.as_deref().unwrap_or_default())
    }
}

impl<T, const N: usize> DerefMut for SmallList<T, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        self.inline
            .get_mut(..self.len as usize)
            .unwrap_or_else(|| self.boxed.as_deref_mut().unwrap_or_default())
    }
}

/// Items that a list keeps at most: of nodes about a mebibyte.
const KEPT: usize = 4096;
/// Types whose items it keeps at most; a power of two.
const TYPES: usize = 512;

/// A free list: empty items by a type that they are to be filled with. A table with open addressing, whose entries stay.
pub(crate) struct FreeList<T> {
    bins: Vec<Option<(TypeId, Vec<T>)>>,
    count: usize,
}

impl<T> Default for FreeList<T> {
    fn default() -> FreeList<T> {
        FreeList { bins: Vec::new(), count: 0 }
    }
}

impl<T> FreeList<T> {
    /// The items of a type; `None` if there are too many types.
    #[inline]
    fn bin(&mut self, of: TypeId) -> Option<&mut Vec<T>> {
        if self.bins.is_empty() {
            self.bins.resize_with(TYPES, || None);
        }
        let mut bits = Bits(0);
        of.hash(&mut bits);
        let mut at = bits.0 as usize % TYPES;
        for _ in 0..TYPES / 2 {
            if self.bins[at].as_ref().is_none_or(|bin| bin.0 == of) {
                return Some(&mut self.bins[at].get_or_insert((of, Vec::new())).1);
            }
            at = (at + 1) % TYPES;
        }
        None
    }

    /// An item of this type, if there is one.
    #[inline]
    pub(crate) fn take(&mut self, of: TypeId) -> Option<T> {
        let item = self.bin(of)?.pop()?;
        self.count -= 1;
        Some(item)
    }

    /// Keeps an item of this type. Returns it if there is no room.
    #[inline]
    pub(crate) fn put(&mut self, of: TypeId, item: T) -> Option<T> {
        if self.count >= KEPT {
            return Some(item);
        }
        let Some(bin) = self.bin(of) else { return Some(item) };
        bin.push(item);
        self.count += 1;
        None
    }
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

#[cfg(test)]
mod tests {
    use super::SmallList;

    #[test]
    fn it_holds_what_it_was_last_filled_with() {
        let mut list = SmallList::<String, 2>::default();
        for count in [0, 1, 3, 2, 7, 0, 2] {
            let items: Vec<String> = (0..count).map(|i| format!("{count}.{i}")).collect();
            list.fill(items.iter().cloned());
            assert_eq!(list[..], items);
            assert_eq!(SmallList::<String, 2>::of(items.iter().cloned())[..], items);
        }
        list.clear();
        assert!(list.is_empty());
    }
}
