//! (engine/queue.rs)
//! [`Queue`]: a lane's operations that may run, and the workers that look for one.
//!
//! ```text
//! push ──> inbox ──(all at once)──> levels ──> worker
//! ```
//! Who pushes and who runs meet as seldom as the order of priorities allows: a worker empties the inbox when it has nothing
//! left, or when the inbox holds a higher priority than the levels do.
//!
//! (engine/levels.rs)
//! [`Levels`]: a queue of priorities, first in first out within each.

use std::collections::VecDeque;

use super::sync::{AtomicI64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, Padded, lock, sleep, watch};

/// Items by priority, for workers that watch before they sleep. Of equals the oldest comes first.
pub(crate) struct Queue<T> {
    /// Locked before the inbox where both are.
    work: Padded<Mutex<Work<T>>>,
    inbox: Padded<Mutex<Inbox<T>>>,
    /// The highest priority in the inbox, or [`EMPTY`]. Written under the inbox's lock, and only when it changes.
    top: Padded<AtomicI64>,
    /// Workers that sleep and have not been woken. Written under the inbox's lock; grows under both.
    sleeping: AtomicUsize,
    /// Items in the levels, for workers that watch.
    left: Padded<AtomicUsize>,
    wake: Condvar,
}

const EMPTY: i64 = i64::MIN;
/// Something other than [`EMPTY`], so that workers stop watching.
const CLOSED: i64 = i64::MIN + 1;

struct Work<T> {
    levels: Levels<T>,
    /// Changes places with the inbox's items.
    spare: Vec<(i32, T)>,
}

struct Inbox<T> {
    items: Vec<(i32, T)>,
    /// Workers that watch, and need not be woken.
    watching: usize,
    /// Workers that were woken and have not got up yet.
    woken: usize,
    closed: bool,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Queue<T> {
        let inbox = Inbox { items: Vec::new(), watching: 0, woken: 0, closed: false };
        Queue {
            work: Padded(Mutex::new(Work { levels: Levels::new(), spare: Vec::new() })),
            inbox: Padded(Mutex::new(inbox)),
            top: Padded(AtomicI64::new(EMPTY)),
            sleeping: AtomicUsize::new(0),
            left: Padded(AtomicUsize::new(0)),
            wake: Condvar::new(),
        }
    }

    /// Adds an item, and wakes a worker if none is coming for it.
    pub(crate) fn push(&self, priority: i32, item: T) {
        let mut inbox = lock(&self.inbox.0);
        inbox.items.push((priority, item));
        if self.top.0.load(Ordering::Relaxed) < i64::from(priority) {
            self.top.0.store(i64::from(priority), Ordering::Relaxed);
        }
        let items = inbox.items.len();
        self.wake(inbox, items);
    }

    /// Adds items and takes the first of all; blocks until there is one. `None` when closed. Calls `idle` once if it
    /// finds none at first.
    pub(crate) fn exchange(
        &self,
        items: impl ExactSizeIterator<Item = (i32, T)>,
        idle: impl FnOnce(),
    ) -> Option<T> {
        let mut work = lock(&self.work.0);
        self.empty_inbox(&mut work, items.len() > 0);
        items.for_each(|(priority, item)| work.levels.push(priority, item));
        if let Some(item) = self.take(&mut work) {
            return Some(item);
        }
        lock(&self.inbox.0).watching += 1;
        drop(work);
        idle();
        watch(|| self.top.0.load(Ordering::Relaxed) != EMPTY || self.left.0.load(Ordering::Relaxed) > 0);
        lock(&self.inbox.0).watching -= 1;
        loop {
            let mut work = lock(&self.work.0);
            self.empty_inbox(&mut work, true);
            if let Some(item) = self.take(&mut work) {
                return Some(item);
            }
            if !self.sleep(work) {
                return None;
            }
        }
    }

    /// Lets workers end when they find nothing.
    pub(crate) fn close(&self) {
        let mut inbox = lock(&self.inbox.0);
        inbox.closed = true;
        if inbox.items.is_empty() {
            self.top.0.store(CLOSED, Ordering::Relaxed);
        }
        drop(inbox);
        self.wake.notify_all();
    }

    /// Moves the inbox's items to the levels: if one of them is the first of all, or if others are to come after them.
    fn empty_inbox(&self, work: &mut Work<T>, others: bool) {
        let top = self.top.0.load(Ordering::Relaxed);
        if top == EMPTY || !(others || work.levels.top().is_none_or(|priority| i64::from(priority) < top)) {
            return;
        }
        let mut inbox = lock(&self.inbox.0);
        std::mem::swap(&mut inbox.items, &mut work.spare);
        self.top.0.store(if inbox.closed { CLOSED } else { EMPTY }, Ordering::Relaxed);
        drop(inbox);
        let Work { levels, spare } = work;
        spare.drain(..).for_each(|(priority, item)| levels.push(priority, item));
    }

    /// The first item of the levels; wakes workers for the others.
    fn take(&self, work: &mut Work<T>) -> Option<T> {
        let item = work.levels.pop()?;
        let left = work.levels.len();
        if left > 0 || self.left.0.load(Ordering::Relaxed) > 0 {
            self.left.0.store(left, Ordering::Relaxed);
        }
        // Whoever goes to sleep does so under the lock of the levels, and after a look at them.
        if left > 0 && self.sleeping.load(Ordering::Relaxed) > 0 {
            self.wake(lock(&self.inbox.0), left);
        }
        Some(item)
    }

    /// Wakes a worker for each of `items` that none is coming for.
    fn wake(&self, mut inbox: MutexGuard<'_, Inbox<T>>, items: usize) {
        let sleeping = self.sleeping.load(Ordering::Relaxed);
        let wake = items.saturating_sub(inbox.watching + inbox.woken).min(sleeping);
        if wake > 0 {
            self.sleeping.store(sleeping - wake, Ordering::Relaxed);
            inbox.woken += wake;
        }
        drop(inbox);
        (0..wake).for_each(|_| self.wake.notify_one());
    }

    /// Sleeps until woken, unless there is work after all; whether to look again.
    fn sleep(&self, work: MutexGuard<'_, Work<T>>) -> bool {
        let mut inbox = lock(&self.inbox.0);
        if !inbox.items.is_empty() || inbox.closed {
            return !inbox.items.is_empty();
        }
        self.sleeping.fetch_add(1, Ordering::Relaxed);
        drop(work);
        while inbox.woken == 0 && !inbox.closed {
            inbox = sleep(&self.wake, inbox);
        }
        match inbox.woken {
            0 => drop(self.sleeping.fetch_sub(1, Ordering::Relaxed)),
            _ => inbox.woken -= 1,
        }
        true
    }
}

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
