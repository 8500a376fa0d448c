//! [`FlightRecorder`]: a ring of the last operations of a rank. A communicator notes each call when it starts, when all ranks have come,
//! and when it ends; a pipeline notes the actions of its schedule.
//!
//! The recorder is always on. A note takes a lock that only this rank's threads and its dumps take, each for a short time, and some small
//! allocations; it never waits for another rank or a file. The ring is written to a file (`dump.rs`) when the run fails, or on request.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use phalanx_tensor::{DType, unpoisoned};

use super::dump::{self, Snapshot};

/// The operations that a rank keeps.
pub const OPERATIONS_MAX: usize = 1000;
/// How long a run that fails waits for its dumps to be written.
const WRITING_MAX: Duration = Duration::from_secs(5);

/// One rank's flight recorder ([`Communicator::flight_recorder`](crate::comm::Communicator::flight_recorder)).
#[derive(Clone)]
pub struct FlightRecorder(pub(super) Arc<RankRecorder>);

/// The state of one rank's recorder.
pub(super) struct RankRecorder {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) process: Arc<ProcessRecorders>,
    pub(super) ring: Mutex<Ring>,
    /// The members of each group, by their numbers in the whole run.
    pub(super) groups: Mutex<HashMap<u64, Arc<[usize]>>>,
    counts: Mutex<SharedCounts>,
    /// The training step under way plus one; 0 if none has begun.
    step: AtomicU64,
    waits: Mutex<Waits>,
}

/// What the recorders of the ranks of one run in one process share.
pub(super) struct ProcessRecorders {
    folder: Mutex<Option<PathBuf>>,
    /// Whether the environment names the folder.
    is_fixed: bool,
    /// How far the dumps of the run's failure are.
    failure: Mutex<FailureDumps>,
    written: Condvar,
    /// Held from the moment that dumps describe until they are written, so that the failure's are the last.
    writing: Mutex<()>,
    /// When the recorders were made: the zero of their times.
    pub(super) begin: Instant,
    ranks: Mutex<Vec<Weak<RankRecorder>>>,
}

/// The dumps that are written once, when the run fails.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FailureDumps {
    /// The run has not failed.
    None,
    /// A thread writes them.
    UnderWay,
    Written,
}

/// The last operations.
#[derive(Default)]
pub(super) struct Ring {
    pub(super) last: VecDeque<Noted>,
    /// The number of the first operation in `last`.
    pub(super) first: u64,
    /// Older operations that have not ended, with their numbers.
    pub(super) open: VecDeque<(u64, Noted)>,
}

/// The counts of calls. A program repeats its calls, so equal ones are kept once.
#[derive(Default)]
struct SharedCounts {
    all: HashSet<Arc<[usize]>>,
    /// With so many, those that no call has any more are dropped.
    full: usize,
}

/// An operation of a rank.
#[derive(Clone)]
pub(crate) struct Operation {
    /// `all_reduce`, or an action of a schedule such as `forward`.
    pub(crate) kind: &'static str,
    pub(crate) what: What,
    pub(crate) site: &'static Location<'static>,
}

/// The part of an operation that depends on its kind.
#[derive(Clone)]
pub(crate) enum What {
    /// A call of a communicator.
    Call {
        group: u64,
        /// The call's number in its group; of a send or receive, among those of the pair in that direction.
        sequence: u64,
        /// By its number in the group; of a send or receive the other rank.
        root: Option<usize>,
        by: Option<&'static str>,
        dtype: Option<DType>,
        counts: Arc<[usize]>,
        wanted: Arc<[usize]>,
        /// The shapes of the input and the output.
        shapes: [Option<Box<[usize]>>; 2],
    },
    /// An action of a pipeline's schedule.
    Action { stage: usize, micro_batch: usize },
}

/// An operation and its times.
#[derive(Clone)]
pub(super) struct Noted {
    pub(super) operation: Operation,
    pub(super) step: Option<u64>,
    pub(super) started: Instant,
    /// When all ranks had come, and the rank that came last.
    pub(super) complete: Option<(Instant, usize)>,
    /// When a thread began to wait for it.
    pub(super) waited: Option<Instant>,
    pub(super) ended: Option<Instant>,
    pub(super) error: Option<Box<str>>,
}

/// How long a thread of this rank has waited for each other rank since it began to count.
struct Waits {
    /// The thread whose waits count.
    thread: Option<ThreadId>,
    since: Instant,
    seconds: HashMap<usize, f64>,
}

impl fmt::Debug for FlightRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlightRecorder of rank {}", self.0.rank)
    }
}

/// Every run of this process.
static RUNS: Mutex<Vec<Weak<ProcessRecorders>>> = Mutex::new(Vec::new());

/// Writes the dumps of all ranks of this process, such as on a signal, and returns the folders. A rank without a folder writes nothing, and
/// a run that has failed keeps the dumps of its failure.
pub fn dump_all(cause: &str) -> Vec<PathBuf> {
    let runs: Vec<_> = unpoisoned(RUNS.lock()).iter().filter_map(Weak::upgrade).collect();
    runs.into_iter().filter_map(|run| run.dump(cause)).collect()
}

impl ProcessRecorders {
    fn dump(&self, cause: &str) -> Option<PathBuf> {
        let folder = unpoisoned(self.folder.lock()).clone()?;
        let writing = unpoisoned(self.writing.lock());
        if *unpoisoned(self.failure.lock()) == FailureDumps::None {
            write_all(self.snapshots(), &folder, cause);
        }
        drop(writing);
        self.await_failure();
        Some(folder)
    }

    /// The last operations of all ranks now.
    fn snapshots(&self) -> Vec<Snapshot> {
        let ranks: Vec<_> = unpoisoned(self.ranks.lock()).iter().filter_map(Weak::upgrade).collect();
        ranks.into_iter().map(|rank| Snapshot::of(FlightRecorder(rank))).collect()
    }

    fn set_failure(&self, dumps: FailureDumps) {
        *unpoisoned(self.failure.lock()) = dumps;
        self.written.notify_all();
    }

    /// Waits while the failure's dumps are being written, but no longer than a disk that answers takes.
    fn await_failure(&self) {
        let failure = unpoisoned(self.failure.lock());
        let under_way = |dumps: &mut FailureDumps| *dumps == FailureDumps::UnderWay;
        drop(self.written.wait_timeout_while(failure, WRITING_MAX, under_way));
    }
}

fn write_all(snapshots: Vec<Snapshot>, folder: &Path, cause: &str) {
    for snapshot in snapshots {
        // A dump that cannot be written must not hide the error that it is about.
        let _ = dump::write(snapshot, folder, cause);
    }
}

impl FlightRecorder {
    /// The recorders of some ranks of a run of `size` ranks, which are in this process. Their folder is `PHALANX_FLIGHT_DIR`, if it is set.
    pub(crate) fn of_ranks(ranks: std::ops::Range<usize>, size: usize) -> Vec<FlightRecorder> {
        let folder = std::env::var_os("PHALANX_FLIGHT_DIR").filter(|folder| !folder.is_empty());
        let process = Arc::new(ProcessRecorders {
            is_fixed: folder.is_some(),
            folder: Mutex::new(folder.map(PathBuf::from)),
            failure: Mutex::new(FailureDumps::None),
            written: Condvar::new(),
            writing: Mutex::new(()),
            begin: Instant::now(),
            ranks: Mutex::default(),
        });
        let of = |rank| {
            let waits = Waits { thread: None, since: process.begin, seconds: HashMap::new() };
            FlightRecorder(Arc::new(RankRecorder {
                rank,
                size,
                process: Arc::clone(&process),
                ring: Mutex::default(),
                groups: Mutex::default(),
                counts: Mutex::default(),
                step: AtomicU64::new(0),
                waits: Mutex::new(waits),
            }))
        };
        let recorders: Vec<FlightRecorder> = ranks.map(of).collect();
        *unpoisoned(process.ranks.lock()) = recorders.iter().map(|r| Arc::downgrade(&r.0)).collect();
        let mut runs = unpoisoned(RUNS.lock());
        runs.retain(|run| run.strong_count() > 0);
        runs.push(Arc::downgrade(&process));
        recorders
    }

    /// Sets the folder for the dumps of all ranks of this process, unless `PHALANX_FLIGHT_DIR` names one. It is made when it is needed.
    pub fn set_folder(&self, folder: &Path) {
        if !self.0.process.is_fixed {
            *unpoisoned(self.0.process.folder.lock()) = Some(folder.into());
        }
    }

    /// Where the dumps are written, if anywhere.
    pub fn folder(&self) -> Option<PathBuf> {
        unpoisoned(self.0.process.folder.lock()).clone()
    }

    /// Says that a training step begins. Operations are noted with it.
    pub fn set_step(&self, step: u64) {
        self.0.step.store(step + 1, Ordering::Relaxed);
    }

    pub(super) fn step(&self) -> Option<u64> {
        self.0.step.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Writes the dumps of all ranks of this process now, unless those of the run's failure are there. Returns their folder, if there is
    /// one.
    pub fn dump(&self, cause: &str) -> Option<PathBuf> {
        self.0.process.dump(cause)
    }

    /// The run has failed, and all threads know: see [`FlightRecorder::failing`].
    pub(crate) fn failed(&self, cause: &str) {
        self.failing(|| cause.to_string());
    }

    /// The run fails. `tell` lets the other threads know, and returns the cause. The dumps, which are written once, have the operations as
    /// they are before that: what is under way is so in them, though the failure ends it. This returns when they are written, also if
    /// another thread writes them, so that the process does not end before, but waits no longer than five seconds for a disk that does not
    /// answer.
    pub(crate) fn failing(&self, tell: impl FnOnce() -> String) {
        let process = &self.0.process;
        let Some(folder) = self.folder() else { return drop(tell()) };
        let is_first = {
            let mut failure = unpoisoned(process.failure.lock());
            let before = *failure;
            *failure = before.max(FailureDumps::UnderWay);
            before == FailureDumps::None
        };
        let snapshots = if is_first { process.snapshots() } else { Vec::new() };
        let cause = tell();
        if is_first {
            let writer = Arc::clone(process);
            let write = move || {
                let _writing = unpoisoned(writer.writing.lock());
                write_all(snapshots, &folder, &cause);
                writer.set_failure(FailureDumps::Written);
            };
            if std::thread::Builder::new().name("phalanx flight".into()).spawn(write).is_err() {
                process.set_failure(FailureDumps::Written);
            }
        }
        process.await_failure();
    }

    /// What an error of a run that hangs says about dumps.
    pub(crate) fn hint(&self) -> String {
        match self.folder() {
            Some(folder) => format!("; `flight {}` shows the last calls of all ranks", folder.display()),
            None => "; with PHALANX_FLIGHT_DIR=DIR every rank writes its last calls there".into(),
        }
    }

    /// Names the members of a group, whose calls will be noted.
    pub(crate) fn group(&self, id: u64, ranks: &[usize]) {
        unpoisoned(self.0.groups.lock()).insert(id, ranks.into());
    }

    /// The counts of a call that will be noted.
    pub(crate) fn counts(&self, counts: &[usize]) -> Arc<[usize]> {
        unpoisoned(self.0.counts.lock()).share(counts)
    }

    pub(super) fn ring(&self) -> MutexGuard<'_, Ring> {
        unpoisoned(self.0.ring.lock())
    }

    /// Notes that an operation starts. Returns its number.
    pub(crate) fn started(&self, operation: Operation) -> u64 {
        let (step, started) = (self.step(), Instant::now());
        let (complete, waited, ended, error) = Default::default();
        self.ring().push(Noted { operation, step, started, complete, waited, ended, error })
    }

    /// Notes that a thread waits for an operation.
    pub(crate) fn waits(&self, number: u64, since: Instant) {
        self.ring().change(number, |noted| noted.waited = Some(since));
    }

    /// Notes that an operation has ended, and when all ranks had come to it.
    pub(crate) fn ended(&self, number: u64, complete: Option<(Instant, usize)>, error: Option<String>) {
        let ended = Instant::now();
        let mut ring = self.ring();
        ring.change(number, |noted| {
            (noted.complete, noted.ended) = (complete, Some(ended));
            noted.error = error.map(String::into_boxed_str);
        });
        ring.open.retain(|(_, noted)| noted.ended.is_none());
    }

    /// Counts the time for which the calling thread waits for other ranks from now on, in place of any other thread's.
    pub fn count_waits(&self) {
        let thread = Some(std::thread::current().id());
        *unpoisoned(self.0.waits.lock()) = Waits { thread, since: Instant::now(), seconds: HashMap::new() };
    }

    /// The seconds for which the counted thread has waited for each other rank, the most first, and the seconds that have passed since
    /// counting began. Counting begins anew.
    pub fn take_waits(&self) -> (Vec<(usize, f64)>, f64) {
        let mut waits = unpoisoned(self.0.waits.lock());
        let mut seconds: Vec<(usize, f64)> = waits.seconds.drain().collect();
        seconds.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let since = std::mem::replace(&mut waits.since, Instant::now());
        (seconds, since.elapsed().as_secs_f64())
    }

    /// A thread has waited since `since` for a call to which `last` came at `complete`, after all others.
    pub(crate) fn waited(&self, since: Instant, (complete, last): (Instant, usize)) {
        let waited = complete.saturating_duration_since(since);
        if last == self.0.rank || waited.is_zero() {
            return;
        }
        let mut waits = unpoisoned(self.0.waits.lock());
        if waits.thread == Some(std::thread::current().id()) {
            *waits.seconds.entry(last).or_default() += waited.as_secs_f64();
        }
    }
}

impl SharedCounts {
    fn share(&mut self, counts: &[usize]) -> Arc<[usize]> {
        if let Some(same) = self.all.get(counts) {
            return Arc::clone(same);
        }
        if self.all.len() >= self.full {
            self.all.retain(|counts| Arc::strong_count(counts) > 1);
            self.full = 2 * self.all.len() + 16;
        }
        let shared: Arc<[usize]> = counts.into();
        self.all.insert(Arc::clone(&shared));
        shared
    }
}

impl Ring {
    fn push(&mut self, noted: Noted) -> u64 {
        if self.last.len() == OPERATIONS_MAX {
            let number = self.first;
            self.first += 1;
            if let Some(oldest) = self.last.pop_front().filter(|oldest| oldest.ended.is_none()) {
                if self.open.len() == OPERATIONS_MAX {
                    self.open.pop_front();
                }
                self.open.push_back((number, oldest));
            }
        }
        self.last.push_back(noted);
        self.first + self.last.len() as u64 - 1
    }

    /// Changes an operation, if it is still there.
    fn change(&mut self, number: u64, change: impl FnOnce(&mut Noted)) {
        let found = match number.checked_sub(self.first) {
            Some(place) => self.last.get_mut(place as usize),
            None => self.open.iter_mut().find(|(open, _)| *open == number).map(|(_, noted)| noted),
        };
        if let Some(noted) = found {
            change(noted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(recorder: &FlightRecorder, stage: usize) -> u64 {
        let what = What::Action { stage, micro_batch: 0 };
        recorder.started(Operation { kind: "forward", what, site: Location::caller() })
    }

    #[test]
    fn the_ring_is_bounded_and_keeps_what_has_not_ended() {
        let recorder = FlightRecorder::of_ranks(0..1, 1).remove(0);
        let stuck = note(&recorder, 7);
        for stage in 0..3 * OPERATIONS_MAX {
            let number = note(&recorder, stage);
            recorder.ended(number, None, None);
        }
        let stages = |noted: &Noted| match noted.operation.what {
            What::Action { stage, .. } => stage,
            What::Call { .. } => unreachable!(),
        };
        {
            let ring = recorder.ring();
            assert_eq!((ring.last.len(), ring.first), (OPERATIONS_MAX, 2 * OPERATIONS_MAX as u64 + 1));
            assert_eq!(ring.last.back().map(stages), Some(3 * OPERATIONS_MAX - 1));
            assert_eq!(ring.open.iter().map(|(n, noted)| (*n, stages(noted))).collect::<Vec<_>>(), [(0, 7)]);
        }
        recorder.ended(stuck, None, None);
        assert!(recorder.ring().open.is_empty());
    }

    #[test]
    fn equal_counts_are_kept_once_and_those_of_no_call_are_dropped() {
        let recorder = FlightRecorder::of_ranks(0..1, 1).remove(0);
        let kept = recorder.counts(&[1, 2]);
        for count in 0..100 {
            recorder.counts(&[count]);
        }
        assert!(Arc::ptr_eq(&kept, &recorder.counts(&[1, 2])));
        assert!(unpoisoned(recorder.0.counts.lock()).all.len() <= 18);
    }

    #[test]
    fn only_the_counted_thread_waits_and_only_for_others() {
        let recorder = FlightRecorder::of_ranks(1..2, 3).remove(0);
        let since = Instant::now();
        let late = since + Duration::from_secs(2);
        recorder.waited(since, (late, 2));
        assert!(recorder.take_waits().0.is_empty(), "no thread is counted yet");
        recorder.count_waits();
        for last in [0, 1, 2, 2] {
            recorder.waited(since, (late, last));
        }
        recorder.waited(late, (since, 0));
        std::thread::scope(|scope| drop(scope.spawn(|| recorder.waited(since, (late, 0)))));
        assert_eq!(recorder.take_waits().0, [(2, 4.0), (0, 2.0)]);
        assert!(recorder.take_waits().0.is_empty());
    }
}
