//! [`Profile`]: what an engine ran while it was recorded: names, lanes, order, times and dependencies. A trace for Perfetto.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use phalanx_tensor::cuda::ChromeTrace;
use serde_json::{Value, json};

use super::error::{Error, Result};
use super::node::{Node, Outcome};
use super::op::Lane;
use super::sync::{Mutex, lock};
use super::variable::Access;

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It has run.
    Done,
    /// It returned an error or panicked.
    Failed,
    /// It did not run, because a failure poisons a variable of its.
    Skipped,
}

/// An operation that has ended.
///
/// Beginnings and ends have one numbering over all threads, so that order can be told without a clock: if one operation's end
/// has a lower number than another's beginning, it ended before that one began.
#[derive(Clone, Debug)]
pub struct OpEvent {
    /// Its name.
    pub name: String,
    /// The number of its push, by which [`OpEvent::depends_on`] names it.
    pub number: u64,
    /// The lane it was pushed on; `None` if it named none.
    pub lane: Option<Lane>,
    /// The thread that ran its closure, by name.
    pub thread: String,
    /// Its place among all beginnings and ends.
    pub begin: u64,
    /// As [`OpEvent::begin`]; of an operation that completes by callback, when that came.
    pub end: u64,
    /// When it began, from the start of the recording.
    pub began: Duration,
    /// When it ended.
    pub ended: Duration,
    /// The numbers of variables that it read.
    pub reads: Vec<u64>,
    /// The numbers of variables that it mutated.
    pub mutates: Vec<u64>,
    /// The recorded operations that it had to wait for: the last that mutated what it uses, and those that have read since what
    /// it mutates.
    pub depends_on: Vec<u64>,
    /// How it ended.
    pub ending: Ending,
}

impl OpEvent {
    /// Whether both were under way at the same time.
    pub fn overlaps(&self, other: &OpEvent) -> bool {
        self.begin < other.end && other.begin < self.end
    }
}

/// The operations that ended while an engine was recorded ([`Engine::start_profile`](super::Engine::start_profile)), in the
/// order of their pushes.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// The operations.
    pub events: Vec<OpEvent>,
}

impl Profile {
    /// The operations whose names begin with `prefix`.
    pub fn named<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a OpEvent> {
        self.events.iter().filter(move |event| event.name.starts_with(prefix))
    }

    /// For how long operations whose names begin with `ours` ran beside others whose names begin with `beside`, and for how long
    /// in all.
    pub fn overlap(&self, ours: &str, beside: &str) -> (Duration, Duration) {
        let mut others: Vec<&OpEvent> = self.named(beside).collect();
        others.sort_by_key(|event| event.began);
        let both = |event: &OpEvent| {
            let (mut time, mut from) = (Duration::ZERO, event.began);
            for other in &others {
                let end = other.ended.min(event.ended);
                time += end.saturating_sub(other.began.max(from));
                from = from.max(end); // what two others cover counts once
            }
            time
        };
        (self.named(ours).map(both).sum(), self.named(ours).map(|e| e.ended - e.began).sum())
    }

    /// Chrome's trace format, which Perfetto reads too: a row for each lane, an arrow for each dependency.
    pub fn to_chrome_trace(&self) -> Value {
        let mut lanes: Vec<Option<Lane>> = Vec::new();
        let mut trace = ChromeTrace::default();
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let by_number: HashMap<u64, &OpEvent> =
            self.events.iter().map(|event| (event.number, event)).collect();
        let mut row = |lane: Option<Lane>, trace: &mut ChromeTrace| {
            let known = lanes.iter().position(|known| *known == lane);
            let number = known.unwrap_or(lanes.len()) as u64;
            if known.is_none() {
                let name = lane.map_or("the first lane".into(), |lane| lane.to_string());
                trace.name_row((0, number), &name);
                lanes.push(lane);
            }
            (0, number)
        };
        for event in &self.events {
            let here = row(event.lane, &mut trace);
            let (began, length) = (micros(event.began), micros(event.ended - event.began));
            let args = json!({
                "number": event.number, "thread": event.thread, "reads": event.reads, "mutates": event.mutates,
                "ending": format!("{:?}", event.ending),
            });
            trace.span(here, &event.name, began, length, args);
            for from in event.depends_on.iter().filter_map(|number| by_number.get(number)) {
                let (id, source) = (format!("{} {}", from.number, event.number), row(from.lane, &mut trace));
                trace.arrow("dependency", &id, (source, micros(from.ended)), (here, began));
            }
        }
        trace.into_json()
    }

    /// Writes [`Profile::to_chrome_trace`] into a file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_chrome_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        std::fs::write(path, self.to_chrome_trace().to_string())
            .map_err(|e| Error::Trace { path: path.display().to_string(), why: e.to_string() })
    }

    /// Sorts the events by their pushes and finds their dependencies, from what they read and mutated.
    fn ordered(mut events: Vec<OpEvent>) -> Profile {
        events.sort_by_key(|event| event.number);
        // Of each variable: the last operation that mutated it, and those that have read it since.
        let mut last: HashMap<u64, (Option<u64>, Vec<u64>)> = HashMap::new();
        for event in &mut events {
            for variable in &event.reads {
                let (writer, readers) = last.entry(*variable).or_default();
                event.depends_on.extend(*writer);
                readers.push(event.number);
            }
            for variable in &event.mutates {
                let (writer, readers) = last.entry(*variable).or_default();
                if readers.is_empty() {
                    event.depends_on.extend(*writer);
                }
                event.depends_on.append(readers);
                *writer = Some(event.number);
            }
            event.depends_on.sort_unstable();
            event.depends_on.dedup();
        }
        Profile { events }
    }
}

/// Records the operations of an engine while it is on.
pub(crate) struct Recorder {
    is_on: AtomicBool,
    /// The next number of a beginning or an end.
    next: AtomicU64,
    recorded: Mutex<Recorded>,
}

struct Recorded {
    start: Instant,
    /// By the number of the push.
    running: HashMap<u64, OpEvent>,
    ended: Vec<OpEvent>,
}

impl Recorder {
    pub(crate) fn new() -> Recorder {
        let recorded = Recorded { start: Instant::now(), running: HashMap::new(), ended: Vec::new() };
        Recorder { is_on: AtomicBool::new(false), next: AtomicU64::new(0), recorded: Mutex::new(recorded) }
    }

    /// Begins a new recording.
    pub(crate) fn start(&self) {
        let mut recorded = lock(&self.recorded);
        *recorded = Recorded { start: Instant::now(), running: HashMap::new(), ended: Vec::new() };
        self.is_on.store(true, Ordering::Release);
    }

    /// Ends the recording.
    pub(crate) fn take(&self) -> Profile {
        self.is_on.store(false, Ordering::Release);
        Profile::ordered(std::mem::take(&mut lock(&self.recorded).ended))
    }

    /// An operation is about to run or to be skipped.
    pub(crate) fn begins(&self, node: &Node) {
        if self.is_on.load(Ordering::Relaxed) {
            self.record_beginning(node);
        }
    }

    /// An operation has ended, and has not yet released its variables.
    pub(crate) fn ends(&self, node: &Node, outcome: &Outcome) {
        if self.is_on.load(Ordering::Relaxed) {
            self.record_end(node, outcome);
        }
    }

    #[cold]
    fn record_beginning(&self, node: &Node) {
        let number = node.sequence.load(Ordering::Relaxed);
        let used = |wanted| {
            let uses = node.uses.iter().filter(move |(_, access)| *access == wanted);
            uses.map(|(variable, _)| variable.0.id).collect()
        };
        let thread = std::thread::current().name().unwrap_or("a thread without a name").into();
        let mut recorded = lock(&self.recorded);
        let began = recorded.start.elapsed();
        let event = OpEvent {
            name: node.name.to_string(),
            number,
            lane: node.named_lane,
            thread,
            begin: self.next.fetch_add(1, Ordering::Relaxed),
            end: 0,
            began,
            ended: began,
            reads: used(Access::Read),
            mutates: used(Access::Write),
            depends_on: Vec::new(),
            ending: Ending::Done,
        };
        recorded.running.insert(number, event);
    }

    #[cold]
    fn record_end(&self, node: &Node, outcome: &Outcome) {
        let mut recorded = lock(&self.recorded);
        // What began before the recording is not in it.
        let Some(mut event) = recorded.running.remove(&node.sequence.load(Ordering::Relaxed)) else { return };
        event.end = self.next.fetch_add(1, Ordering::Relaxed);
        event.ended = recorded.start.elapsed();
        event.ending = match outcome {
            Outcome::Skipped(_) => Ending::Skipped,
            Outcome::Failed(_) => Ending::Failed,
            _ => Ending::Done,
        };
        recorded.ended.push(event);
    }
}
