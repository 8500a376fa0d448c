//! [`Levels`]: a queue of priorities, first in first out within each.

use std::collections::VecDeque;

/// Items by priority. There are few different priorities at a time, so a level is found by a short search, and nothing
/// is allocated once the levels have grown.
pub(crate) struct Levels<T> {
    /// Highest priority first.
    levels: Vec<(i32, VecDeque<T>)>,
    /// No level before this one has items.
    first: usize,
    len: usize,
}

/// Empty levels are kept until there are this many.
const LEVELS: usize = 32;

impl<T> Levels<T> {
    pub(crate) fn new() -> Levels<T> {
        Levels { levels: Vec::new(), first: 0, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push(&mut self, priority: i32, item: T) {
        let at = match self.find(priority) {
            Ok(at) => at,
            Err(_) => self.add(priority),
        };
        self.levels[at].1.push_back(item);
        self.first = self.first.min(at);
        self.len += 1;
    }

    /// The highest priority of an item.
    pub(crate) fn top(&mut self) -> Option<i32> {
        while self.levels.get(self.first).is_some_and(|(_, level)| level.is_empty()) {
            self.first += 1;
        }
        self.levels.get(self.first).map(|&(priority, _)| priority)
    }

    /// The item of highest priority, of equals the oldest.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.top()?;
        let item = self.levels[self.first].1.pop_front()?;
        self.len -= 1;
        Some(item)
    }

    /// Where the level of `priority` is, or belongs.
    fn find(&self, priority: i32) -> Result<usize, usize> {
        self.levels.binary_search_by_key(&std::cmp::Reverse(priority), |(p, _)| std::cmp::Reverse(*p))
    }

    fn add(&mut self, priority: i32) -> usize {
        if self.levels.len() >= LEVELS {
            self.levels.retain(|(_, level)| !level.is_empty());
            self.first = 0;
        }
        let at = self.find(priority).unwrap_or_else(|at| at);
        self.levels.insert(at, (priority, VecDeque::new()));
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_come_by_priority_and_then_by_age() {
        let mut levels = Levels::new();
        let mut expected = Vec::new();
        for round in 0..3 {
            for n in 0..500 {
                let priority = (n * 37 % (50 << round)) - 20;
                levels.push(priority, n);
                expected.push((-priority, n));
            }
            expected.sort();
            for &(_, n) in &expected[..300] {
                assert_eq!(levels.pop(), Some(n));
            }
            levels.push(1000, -1);
            assert_eq!((levels.top(), levels.pop(), levels.len()), (Some(1000), Some(-1), 200));
            for (_, n) in expected.drain(..).skip(300) {
                assert_eq!(levels.pop(), Some(n));
            }
            assert_eq!(levels.pop(), None);
        }
    }
}
