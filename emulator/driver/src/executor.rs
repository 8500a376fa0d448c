//! Runs what is queued: at once, or, deferred, when something waits for it and in an order that a GPU could choose.
//!
//! Any thread that calls the driver may run any operation; what runs is out of the queue's lock, so two threads run
//! two operations at the same time.

use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use phalanx_emulator_link::lock;

use crate::device::allocation_start;
use crate::queue::{Point, Progress, Queue, Task, Ticket};
use crate::race::{Access, Origin};
use crate::settings::{Report, Schedule, settings};
use crate::status::{Status, caught, say};

/// With more queued operations than this, deferred work runs although nothing waits for it.
const QUEUED_MAX: usize = 20_000;
/// How soon an operation that waits for something else is run again if nothing has changed here.
const ASK_AGAIN: Duration = Duration::from_millis(2);

/// The queue, and what the threads that run it share.
#[derive(Debug)]
pub(crate) struct Executor {
    queue: Mutex<Queue>,
    changed: Condvar,
    random: Mutex<Random>,
    schedule: Schedule,
    races: Report,
    /// Finds the allocation that an address is in.
    allocation: fn(u64) -> Option<u64>,
}

/// Which of the runnable operations a waiting thread runs first; drawn at random for each wait.
#[derive(Debug, Clone, Copy)]
enum Preference {
    /// Only what it waits for: everything else comes as late as possible.
    Needed,
    /// Everything else first.
    Others,
    /// Any.
    Any,
}

/// The executor of this process.
pub(crate) fn executor() -> &'static Executor {
    static EXECUTOR: LazyLock<Executor> =
        LazyLock::new(|| Executor::new(settings().schedule, settings().races, allocation_start));
    &EXECUTOR
}

impl Executor {
    fn new(schedule: Schedule, races: Report, allocation: fn(u64) -> Option<u64>) -> Executor {
        let seed = if let Schedule::Deferred { seed } = schedule { seed } else { 0 };
        Executor {
            queue: Mutex::default(),
            changed: Condvar::new(),
            random: Mutex::new(Random::new(seed)),
            schedule,
            races,
            allocation,
        }
    }

    /// The queue, to look at it or to add to it. [`added`](Executor::added) has to be called afterwards.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Something was queued: runs what can run now, unless work is deferred.
    pub(crate) fn added(&self) {
        let mut queue = self.queue();
        // What waits for something else is asked once, and again when something has run here: to go on asking as long
        // as others change anything is for threads that wait.
        let mut since = queue.changes;
        while self.schedule == Schedule::Eager || queue.len() > QUEUED_MAX {
            let Some(ticket) = queue.runnable(since).next() else { break };
            queue = self.run(queue, ticket);
            if queue.has_run(ticket) {
                since = queue.changes;
            }
        }
        drop(queue);
        self.changed.notify_all();
    }

    /// Runs what `point` needs, until it is passed. The host knows then that it is.
    pub(crate) fn wait(&self, point: &Point) {
        let preference = self.preference();
        let mut queue = self.queue();
        while !queue.passed(point) {
            queue = match self.choose(&queue, point.ticket, preference) {
                Some(ticket) => self.run(queue, ticket),
                None => self.listen(queue),
            };
        }
        queue.host_waited(point);
    }

    /// Runs what `point` needs although nothing waits for it: a program whose streams call it back waits for that outside
    /// the driver, and a GPU would come to it by itself.
    pub(crate) fn drive(&'static self, point: Point) {
        if self.schedule != Schedule::Eager {
            std::thread::spawn(move || self.wait(&point));
        }
    }

    /// Whether `point` is passed. If work is deferred this runs an operation, so that a program that polls comes to
    /// an end.
    pub(crate) fn query(&self, point: &Point) -> bool {
        let mut queue = self.queue();
        if !queue.passed(point) {
            queue.changes += 1;
            if let Some(ticket) = self.choose(&queue, point.ticket, Preference::Any) {
                queue = self.run(queue, ticket);
            }
        }
        let passed = queue.passed(point);
        if passed {
            queue.host_waited(point);
        }
        passed
    }

    fn preference(&self) -> Preference {
        if self.schedule == Schedule::Eager {
            return Preference::Any;
        }
        [Preference::Needed, Preference::Others, Preference::Any][self.below(3)]
    }

    fn below(&self, bound: usize) -> usize {
        lock(&self.random).below(bound)
    }

    fn choose(&self, queue: &Queue, target: Ticket, preference: Preference) -> Option<Ticket> {
        let runnable: Vec<Ticket> = queue.runnable(queue.changes).collect();
        if self.schedule == Schedule::Eager || runnable.len() <= 1 {
            return runnable.first().copied();
        }
        let needed = queue.needed(target);
        let (wanted, others): (Vec<Ticket>, Vec<Ticket>) =
            runnable.iter().partition(|ticket| needed.contains(ticket));
        let among = match preference {
            // What is needed may itself wait for something that only the others bring about.
            Preference::Needed if !wanted.is_empty() => wanted,
            Preference::Others if !others.is_empty() => others,
            _ => runnable,
        };
        among.get(self.below(among.len())).copied()
    }

    /// Nothing can run here: other threads run something, or the program has to queue something first.
    fn listen<'a>(&'a self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        let waited = self.changed.wait_timeout(queue, ASK_AGAIN).unwrap_or_else(PoisonError::into_inner);
        let (mut queue, timeout) = waited;
        // Threads that are woken find what has changed.
        queue.changes += u64::from(timeout.timed_out());
        queue
    }

    fn run<'a>(&'a self, mut queue: MutexGuard<'a, Queue>, ticket: Ticket) -> MutexGuard<'a, Queue> {
        let Some((task, origin)) = queue.start(ticket) else { return queue };
        drop(queue);
        // A lost context runs nothing any more, but others must not wait for it for ever.
        let progress = match task.context.is_lost() && !task.even_if_lost {
            true => Progress::Done(Vec::new()),
            false => caught(|| Ok((task.run)(ticket))).unwrap_or_else(Progress::Failed),
        };
        let mut queue = self.queue();
        let is_news = match progress {
            Progress::Waiting => queue.postpone(ticket),
            Progress::Failed(failure) => {
                task.context.lose(failure, &origin.what);
                queue.finish(ticket)
            }
            Progress::Done(touched) => {
                self.record(&mut queue, &task, &origin, &touched);
                queue.finish(ticket)
            }
        };
        // Waiting threads must not wake each other by asking in vain.
        if is_news {
            self.changed.notify_all();
        }
        queue
    }

    fn record(&self, queue: &mut Queue, task: &Task, origin: &Origin, touched: &[Access]) {
        if self.races == Report::Off || task.context.is_lost() {
            return;
        }
        for access in task.accesses.iter().chain(touched) {
            let allocation = (self.allocation)(access.start).unwrap_or(access.start);
            let Some(conflict) = queue.accesses.touch(allocation, *access, origin) else { continue };
            match self.races {
                Report::Error => task.context.lose(Status::LAUNCH_FAILED.because(conflict), &origin.what),
                _ => say(&format!("{}: {conflict}", origin.what)),
            }
            break;
        }
    }
}

/// Random numbers for orders that a GPU could choose; the same seed gives the same ones.
///
/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::context::Context;
    use crate::device::initialize;

    fn executor() -> Arc<Executor> {
        Arc::new(Executor::new(Schedule::Eager, Report::Off, |_| None))
    }

    /// Queues an operation that waits until it and others like it were asked `most` times.
    fn push(
        executor: &Executor,
        asked: &Arc<AtomicU32>,
        most: u32,
        on_asked: impl Fn() + Send + Sync + 'static,
    ) -> Point {
        let (context, asked) = (Arc::new(Context::new(initialize(), 0)), asked.clone());
        let run = move |_| {
            on_asked();
            if asked.fetch_add(1, Ordering::Relaxed) + 1 < most {
                Progress::Waiting
            } else {
                Progress::Done(vec![])
            }
        };
        let mut queue = executor.queue();
        let chain = queue.chain();
        queue.push(Arc::new(Task::new("waits", &context, run)), "", chain, &[])
    }

    #[test]
    fn who_only_adds_does_not_ask_for_ever_while_others_look() {
        let (executor, asked) = (executor(), Arc::default());
        let same = executor.clone();
        // Another thread asks how something is at just that time, each time.
        push(&executor, &asked, 1000, move || same.queue().changes += 1);
        executor.added();
        assert!(asked.load(Ordering::Relaxed) < 10, "asked {asked:?} times");
    }

    #[test]
    fn those_who_wait_for_something_else_leave_the_cores_to_others() {
        let (executor, asked, begin) = (executor(), Arc::default(), Instant::now());
        let points = [(); 2].map(|()| push(&executor, &asked, 100, || ()));
        std::thread::scope(|scope| {
            points.iter().for_each(|point| drop(scope.spawn(|| executor.wait(point))));
        });
        // Each of the two threads asks both operations each time that it has heard nothing.
        assert!(begin.elapsed() > ASK_AGAIN * 15, "100 questions in {:?}", begin.elapsed());
    }
}
