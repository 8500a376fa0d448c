//! [`Short`]: a list of mostly one or two items.

use std::ops::{Deref, DerefMut};

/// Up to `N` items where it lies, more in a box. It is filled at once and does not grow, so that little is to be checked.
pub(crate) struct Short<T, const N: usize> {
    few: [T; N],
    many: Option<Box<[T]>>,
    len: u32,
}

impl<T: Default, const N: usize> Default for Short<T, N> {
    #[inline]
    fn default() -> Short<T, N> {
        Short::of_len(0)
    }
}

impl<T: Default, const N: usize> Short<T, N> {
    /// So many default items.
    #[inline]
    pub(crate) fn of_len(len: usize) -> Short<T, N> {
        let many = (len > N).then(|| (0..len).map(|_| T::default()).collect());
        Short { few: std::array::from_fn(|_| T::default()), many, len: len as u32 }
    }

    /// Puts these in the place of what it holds.
    #[inline]
    pub(crate) fn fill(&mut self, items: impl ExactSizeIterator<Item = T>) {
        self.clear();
        self.len = items.len() as u32;
        if items.len() > N {
            self.many = Some(items.collect());
            return;
        }
        for (place, item) in self.few.iter_mut().zip(items) {
            *place = item;
        }
    }

    /// Of these.
    #[inline]
    pub(crate) fn of(items: impl ExactSizeIterator<Item = T>) -> Short<T, N> {
        let mut short = Short::default();
        short.fill(items);
        short
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        if self.len as usize > N {
            self.many = None;
        } else {
            self.iter_mut().for_each(|item| *item = T::default());
        }
        self.len = 0;
    }
}

impl<T, const N: usize> Deref for Short<T, N> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.few.get(..self.len as usize).unwrap_or_else(|| self.many.as_deref().unwrap_or_default())
    }
}

impl<T, const N: usize> DerefMut for Short<T, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        self.few.get_mut(..self.len as usize).unwrap_or_else(|| self.many.as_deref_mut().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::Short;

    #[test]
    fn it_holds_what_it_was_last_filled_with() {
        let mut short = Short::<String, 2>::default();
        for count in [0, 1, 3, 2, 7, 0, 2] {
            let items: Vec<String> = (0..count).map(|i| format!("{count}.{i}")).collect();
            short.fill(items.iter().cloned());
            assert_eq!(short[..], items);
            assert_eq!(Short::<String, 2>::of(items.iter().cloned())[..], items);
        }
        short.clear();
        assert!(short.is_empty());
    }
}
