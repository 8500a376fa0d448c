//! [`ReadyQueue`]: the operations of a lane that may run, by priority, and the workers that take them.
//!
//! ```text
//! push ──► inbox ──(all at once)──► priority levels ──► worker
//!          own lock                 own lock
//! ```
//! Pushing threads and workers seldom take the same lock: a worker empties the inbox only when the levels are empty, or when
//! the inbox holds a higher priority than the levels do.

use std::collections::VecDeque;

use super::sync::{
    AtomicI64, AtomicUsize, CachePadded, Condvar, Mutex, MutexGuard, Ordering, lock, sleep, spin_until,
};

/// Items by priority; of equal priority the oldest comes first. A worker that finds none spins for a while, then sleeps.
pub(crate) struct ReadyQueue<T> {
    /// A thread that takes both locks takes this one first.
    worker_side: CachePadded<Mutex<WorkerSide<T>>>,
    inbox: CachePadded<Mutex<Inbox<T>>>,
    /// The highest priority in the inbox, or [`EMPTY`]. Written under the inbox's lock, and only when it changes.
    top: CachePadded<AtomicI64>,
    /// Workers that sleep and have not been woken. Written under the inbox's lock; increased under both locks.
    sleeping: AtomicUsize,
    /// How many items the levels hold, for workers that spin.
    left: CachePadded<AtomicUsize>,
    wake: Condvar,
}

const EMPTY: i64 = i64::MIN;
/// A value other than [`EMPTY`], at which workers stop spinning.
const CLOSED: i64 = i64::MIN + 1;

/// The items that workers take.
struct WorkerSide<T> {
    levels: PriorityLevels<T>,
    /// The empty vector that is swapped with the inbox's items.
    spare: Vec<(i32, T)>,
}

/// The items that pushing threads add, and the workers that wait for some.
struct Inbox<T> {
    items: Vec<(i32, T)>,
    /// Workers that spin, which need not be woken.
    spinning: usize,
    /// Workers that were woken and do not run yet.
    woken: usize,
    closed: bool,
}

impl<T> ReadyQueue<T> {
    pub(crate) fn new() -> ReadyQueue<T> {
        let inbox = Inbox { items: Vec::new(), spinning: 0, woken: 0, closed: false };
        ReadyQueue {
            worker_side: CachePadded(Mutex::new(WorkerSide {
                levels: PriorityLevels::new(),
                spare: Vec::new(),
            })),
            inbox: CachePadded(Mutex::new(inbox)),
            top: CachePadded(AtomicI64::new(EMPTY)),
            sleeping: AtomicUsize::new(0),
            left: CachePadded(AtomicUsize::new(0)),
            wake: Condvar::new(),
        }
    }

    /// Adds an item, and wakes a worker unless one is about to look.
    pub(crate) fn push(&self, priority: i32, item: T) {
        let mut inbox = lock(&self.inbox.0);
        inbox.items.push((priority, item));
        if self.top.0.load(Ordering::Relaxed) < i64::from(priority) {
            self.top.0.store(i64::from(priority), Ordering::Relaxed);
        }
        let items = inbox.items.len();
        self.wake(inbox, items);
    }

    /// Adds items, then takes the first item; blocks until there is one. `None` when the queue is closed. Calls `idle` once
    /// if there is none at first.
    pub(crate) fn exchange(
        &self,
        items: impl ExactSizeIterator<Item = (i32, T)>,
        idle: impl FnOnce(),
    ) -> Option<T> {
        let mut side = lock(&self.worker_side.0);
        self.empty_inbox(&mut side, items.len() > 0);
        items.for_each(|(priority, item)| side.levels.push(priority, item));
        if let Some(item) = self.take(&mut side) {
            return Some(item);
        }
        lock(&self.inbox.0).spinning += 1;
        drop(side);
        idle();
        spin_until(|| self.top.0.load(Ordering::Relaxed) != EMPTY || self.left.0.load(Ordering::Relaxed) > 0);
        lock(&self.inbox.0).spinning -= 1;
        loop {
            let mut side = lock(&self.worker_side.0);
            self.empty_inbox(&mut side, true);
            if let Some(item) = self.take(&mut side) {
                return Some(item);
            }
            if !self.sleep(side) {
                return None;
            }
        }
    }

    /// Workers that find no item end from now on.
    pub(crate) fn close(&self) {
        let mut inbox = lock(&self.inbox.0);
        inbox.closed = true;
        if inbox.items.is_empty() {
            self.top.0.store(CLOSED, Ordering::Relaxed);
        }
        drop(inbox);
        self.wake.notify_all();
    }

    /// Moves the inbox's items to the levels, if one of them is the first of all, or if the caller has `others` to add
    /// behind them.
    fn empty_inbox(&self, side: &mut WorkerSide<T>, others: bool) {
        let top = self.top.0.load(Ordering::Relaxed);
        if top == EMPTY || !(others || side.levels.top().is_none_or(|priority| i64::from(priority) < top)) {
            return;
        }
        let mut inbox = lock(&self.inbox.0);
        std::mem::swap(&mut inbox.items, &mut side.spare);
        self.top.0.store(if inbox.closed { CLOSED } else { EMPTY }, Ordering::Relaxed);
        drop(inbox);
        let WorkerSide { levels, spare } = side;
        spare.drain(..).for_each(|(priority, item)| levels.push(priority, item));
    }

    /// Takes the first item of the levels, and wakes workers for the others.
    fn take(&self, side: &mut WorkerSide<T>) -> Option<T> {
        let item = side.levels.pop()?;
        let left = side.levels.len();
        if left > 0 || self.left.0.load(Ordering::Relaxed) > 0 {
            self.left.0.store(left, Ordering::Relaxed);
        }
        // A worker goes to sleep under the lock of the levels, after it has found them empty.
        if left > 0 && self.sleeping.load(Ordering::Relaxed) > 0 {
            self.wake(lock(&self.inbox.0), left);
        }
        Some(item)
    }

    /// Wakes workers until there is one for each of `items`.
    fn wake(&self, mut inbox: MutexGuard<'_, Inbox<T>>, items: usize) {
        let sleeping = self.sleeping.load(Ordering::Relaxed);
        let wake = items.saturating_sub(inbox.spinning + inbox.woken).min(sleeping);
        if wake > 0 {
            self.sleeping.store(sleeping - wake, Ordering::Relaxed);
            inbox.woken += wake;
        }
        drop(inbox);
        (0..wake).for_each(|_| self.wake.notify_one());
    }

    /// Sleeps until woken, unless there are items after all. Returns whether to look again.
    fn sleep(&self, side: MutexGuard<'_, WorkerSide<T>>) -> bool {
        let mut inbox = lock(&self.inbox.0);
        if !inbox.items.is_empty() || inbox.closed {
            return !inbox.items.is_empty();
        }
        self.sleeping.fetch_add(1, Ordering::Relaxed);
        drop(side);
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

/// A queue for each priority, first in first out. There are few priorities at a time, so a binary search finds a level,
/// and pushes do not allocate once the levels have grown.
pub(crate) struct PriorityLevels<T> {
    /// Highest priority first.
    levels: Vec<(i32, VecDeque<T>)>,
    /// The levels before this one are empty.
    first: usize,
    len: usize,
}

/// Empty levels are kept until there are this many.
const LEVELS: usize = 32;

impl<T> PriorityLevels<T> {
    pub(crate) fn new() -> PriorityLevels<T> {
        PriorityLevels { levels: Vec::new(), first: 0, len: 0 }
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

    /// The priority of the first item.
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
        let mut levels = PriorityLevels::new();
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
