//! The times of a GPU's work: each kernel, copy, product, collective and graph that a stream was given, between two events.
//!
//! `PHALANX_CUDA_TRACE=FILE` traces a whole process. When it ends, a table is on stderr and a trace for Chrome or Perfetto in `FILE`,
//! in whose name `%p` stands for the number of the process. [`start_trace`] and [`take_trace`] trace a part of a program. What a
//! thread captures is not timed one by one: each launch of the graph is one span. While nothing is traced, a launch loads one flag.
//!
//! An event's time is that of the GPU. The emulator's is that of the host that interprets the kernels; table and trace say so.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use serde_json::{Value, json};

use crate::chrome::ChromeTrace;
use crate::context::{Context, GpuEvent, lock};
use crate::driver;
use crate::library::emulated;
use crate::product::Float;
use crate::program::KernelSource;
use crate::{Error, Result};

/// Names the file of a trace of the whole process.
const FILE: &str = "PHALANX_CUDA_TRACE";
/// Spans that are kept at most: about 100 MB.
const SPANS_MAX: usize = 1 << 20;
/// Work whose events are looked at only when there is more of it, so that events are used again soon and no launch waits.
const PENDING_MAX: usize = 512;
/// Microseconds after which times are taken from a later event, because the driver gives differences in 24 bits.
const ORIGIN_MAX_US: f64 = 1e6;

/// What a stream was given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// A kernel.
    Kernel {
        /// Which.
        source: &'static KernelSource,
        /// Its blocks along x, y and z.
        blocks: [u32; 3],
        /// Threads of a block along x, y and z.
        threads: [u32; 3],
        /// Dynamic shared memory of a block, in bytes.
        shared_bytes: u32,
    },
    /// A batch of cuBLASLt's matrix products.
    Product {
        /// Of the factors.
        float: Float,
        /// How many.
        count: usize,
        /// m, n and k.
        size: [usize; 3],
    },
    /// A copy, or bytes that are set.
    Copy {
        /// From where to where, such as `host to device`.
        how: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// Calls of NCCL that belong together.
    Collective,
    /// A captured graph, whole.
    Graph {
        /// The kernels and products in it.
        launches: u64,
    },
}

/// Some work of a stream, and when it ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The operation that gave it.
    pub op: &'static str,
    /// What it was.
    pub work: Work,
    /// The logical device.
    pub device: u16,
    /// The stream: an arbitrary number.
    pub stream: usize,
    /// When it began, in microseconds from the start of the trace.
    pub from: f64,
    /// Its length in microseconds.
    pub length: f64,
}

/// Kernels by operation, function and macros; other work by what it is.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = self.op;
        match self.work {
            Work::Kernel { source, .. } => write!(f, "{op} {source}"),
            Work::Product { float, count, size: [m, n, k] } => {
                write!(f, "{op} cuBLASLt {float:?} {count} x [{m}, {n}, {k}]")
            }
            Work::Copy { how, .. } => write!(f, "{op} {how}"),
            Work::Collective => write!(f, "{op} NCCL"),
            Work::Graph { launches } => write!(f, "{op} of {launches} launches, whole"),
        }
    }
}

/// Whether work is timed.
static IS_ON: AtomicBool = AtomicBool::new(false);
static TRACE: Mutex<Option<Trace>> = Mutex::new(None);

struct Trace {
    start: Instant,
    origins: HashMap<u16, Origin>,
    pending: VecDeque<Pending>,
    spans: Vec<Span>,
    /// Work that has no span: its events failed, or there were too many.
    lost: u64,
}

/// An event of a device whose time is known, in microseconds from the start.
struct Origin {
    event: GpuEvent,
    time: f64,
}

struct Pending {
    /// Without its times.
    span: Span,
    begin: GpuEvent,
    end: GpuEvent,
}

/// Begins to time the work of all devices. A trace under way is dropped.
pub fn start_trace() {
    let (origins, pending, spans) = Default::default();
    *lock(&TRACE) = Some(Trace { start: Instant::now(), origins, pending, spans, lost: 0 });
    IS_ON.store(true, Ordering::Release);
}

/// Ends the trace, waits for its work, and returns it: of each stream in its order.
pub fn take_trace() -> Vec<Span> {
    end().map_or_else(Vec::new, |trace| trace.spans)
}

fn end() -> Option<Trace> {
    IS_ON.store(false, Ordering::Release);
    let mut trace = lock(&TRACE).take()?;
    trace.settle(true);
    Some(trace)
}

impl Context {
    /// Calls `queue`, which gives `work` to this thread's current stream, and times the work if a trace is under way.
    ///
    /// # Errors
    /// Those of `queue`; if the device is lost.
    #[inline]
    pub fn traced<T>(
        &'static self,
        op: &'static str,
        work: Work,
        queue: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match IS_ON.load(Ordering::Relaxed) {
            true => self.timed(op, work, queue),
            false => queue(),
        }
    }

    #[cold]
    fn timed<T>(&'static self, op: &'static str, work: Work, queue: impl FnOnce() -> Result<T>) -> Result<T> {
        let (device, stream) = (self.index(), self.stream_handle().addr());
        self.bind(op)?;
        // SAFETY: the stream exists.
        if self.called(op, unsafe { driver::is_capturing(self.stream()) })? {
            return queue();
        }
        self.place_clock()?;
        let begin = GpuEvent::timed(self)?;
        let done = queue()?;
        let span = Span { op, work, device, stream, from: 0.0, length: 0.0 };
        let pending = Pending { span, begin, end: GpuEvent::timed(self)? };
        if let Some(trace) = &mut *lock(&TRACE) {
            trace.pending.push_back(pending);
            if trace.pending.len() > PENDING_MAX {
                trace.settle(false);
            }
        }
        Ok(done)
    }

    /// Puts the device's clock beside the host's, once a trace. It waits for a stream without work.
    fn place_clock(&'static self) -> Result<()> {
        let placed = |trace: &Trace| trace.origins.contains_key(&self.index());
        if lock(&TRACE).as_ref().is_none_or(placed) {
            return Ok(());
        }
        let _no_work = self.enter_lane()?;
        let event = GpuEvent::timed(self)?;
        event.synchronize()?;
        if let Some(trace) = &mut *lock(&TRACE) {
            let time = trace.start.elapsed().as_secs_f64() * 1e6;
            trace.origins.entry(self.index()).or_insert(Origin { event, time });
        }
        Ok(())
    }
}

impl Trace {
    /// Turns work that is done into spans; with `wait`, all work.
    fn settle(&mut self, wait: bool) {
        while let Some(Pending { end, .. }) = self.pending.front() {
            let done = if wait { end.synchronize().map(|()| true) } else { end.is_done() };
            if matches!(done, Ok(false)) {
                return;
            }
            let Some(pending) = self.pending.pop_front() else { return };
            match done.and_then(|_| self.span(pending)) {
                Ok(span) if self.spans.len() < SPANS_MAX => self.spans.push(span),
                _ => self.lost += 1,
            }
        }
    }

    fn span(&mut self, Pending { span, begin, end }: Pending) -> Result<Span> {
        let lost = Error::Failed { op: span.op, index: span.device, what: "no clock".into() };
        let origin = self.origins.get_mut(&span.device).ok_or(lost)?;
        let from = origin.time + f64::from(origin.event.milliseconds_to(&begin)?) * 1e3;
        let length = f64::from(begin.milliseconds_to(&end)?) * 1e3;
        if from - origin.time > ORIGIN_MAX_US {
            *origin = Origin { event: end, time: from + length };
        }
        Ok(Span { from, length, ..span })
    }
}

/// Begins the trace that the environment asks for. Called when a device has been opened, so that the driver's own end comes
/// after the trace's.
pub(crate) fn start_as_asked() {
    static ONCE: Once = Once::new();
    unsafe extern "C" {
        /// C's: calls `f` when the process ends.
        fn atexit(f: extern "C" fn()) -> std::ffi::c_int;
    }
    ONCE.call_once(|| {
        if asked().is_some() {
            start_trace();
            // SAFETY: the function takes and returns nothing, lives as long as the program, and does not unwind.
            unsafe { atexit(write_at_exit) };
        }
    });
}

/// The file that the environment names.
fn asked() -> Option<PathBuf> {
    let file = std::env::var(FILE).ok().filter(|file| !file.is_empty())?;
    Some(file.replace("%p", &std::process::id().to_string()).into())
}

extern "C" fn write_at_exit() {
    // This thread's variables are gone by now, the driver's among them; a new thread has its own. Its panic is its end.
    let write = || {
        if let (Some(file), Some(trace)) = (asked(), end()) {
            trace.write(&file);
        }
    };
    let _ = thread::Builder::new().spawn(write).map(JoinHandle::join);
}

/// Whose times a trace has.
fn clock() -> &'static str {
    if emulated() { "the host's times of an emulator, not a GPU's" } else { "times of the GPU's events" }
}

impl Trace {
    fn write(&self, file: &Path) {
        let written = std::fs::write(file, chrome(&self.spans).to_string());
        let place = match written {
            Ok(()) => format!("trace in {}", file.display()),
            Err(error) => format!("no trace in {}: {error}", file.display()),
        };
        let lost = if self.lost > 0 { format!("; {} more are not in it", self.lost) } else { String::new() };
        eprint!("{FILE}: {}; {place}{lost}\n{}", clock(), table(&self.spans));
    }
}

/// The streams of each device, in the order of their first work; the name of each.
fn streams(spans: &[Span]) -> BTreeMap<u16, Vec<usize>> {
    let mut streams: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
    for span in spans {
        let known = streams.entry(span.device).or_default();
        if !known.contains(&span.stream) {
            known.push(span.stream);
        }
    }
    streams
}

/// For each stream its work, the longest first: total, share of the stream's work, calls, mean, name.
fn table(spans: &[Span]) -> String {
    let mut text = String::new();
    for (device, streams) in streams(spans) {
        for (number, stream) in streams.into_iter().enumerate() {
            let mut kinds: BTreeMap<String, (u64, f64)> = BTreeMap::new();
            for span in spans.iter().filter(|span| (span.device, span.stream) == (device, stream)) {
                let (calls, time) = kinds.entry(span.to_string()).or_default();
                (*calls, *time) = (*calls + 1, *time + span.length);
            }
            let all: f64 = kinds.values().map(|(_, time)| time).sum();
            let mut kinds: Vec<_> = kinds.into_iter().collect();
            kinds.sort_by(|(_, (_, a)), (_, (_, b))| b.total_cmp(a));
            let _ = writeln!(text, "cuda:{device} stream {number}: {:.3} ms", all / 1e3);
            let _ = writeln!(text, "    total ms   share    calls    mean us  work");
            for (name, (calls, time)) in kinds {
                let (share, mean) = (100.0 * time / all.max(f64::MIN_POSITIVE), time / calls as f64);
                let _ = writeln!(text, "{:>12.3} {share:>6.1}% {calls:>8} {mean:>10.2}  {name}", time / 1e3);
            }
        }
    }
    text
}

/// A group of rows for each device, a row for each stream.
fn chrome(spans: &[Span]) -> Value {
    let (mut trace, streams) = (ChromeTrace::default(), streams(spans));
    for (&device, streams) in &streams {
        trace.name_group(device.into(), &format!("cuda:{device} ({})", clock()));
        for number in 0..streams.len() as u64 {
            trace.name_row((device.into(), number), &format!("stream {number}"));
        }
    }
    for span in spans {
        let number = streams[&span.device].iter().position(|&known| known == span.stream).unwrap_or(0);
        let args = match span.work {
            Work::Kernel { blocks, threads, shared_bytes, .. } => {
                json!({ "blocks": blocks, "threads": threads, "shared_bytes": shared_bytes })
            }
            Work::Copy { bytes, .. } => json!({ "bytes": bytes }),
            Work::Product { .. } | Work::Collective | Work::Graph { .. } => json!({}),
        };
        let row = (span.device.into(), number as u64);
        trace.span(row, &span.to_string(), span.from, span.length, args);
    }
    trace.into_json()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_shares_of_each_stream_the_longest_first() {
        let copy = |how, stream, from, length| {
            let work = Work::Copy { how, bytes: 8 };
            Span { op: "copy", work, device: 1, stream, from, length }
        };
        let spans =
            [copy("in", 70, 0.0, 1000.0), copy("out", 70, 1000.0, 2000.0), copy("out", 70, 3000.0, 1000.0)];
        let all = [&spans[..], &[copy("in", 9, 5.0, 500.0)]].concat();
        let text = table(&all);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["cuda:1", "stream", "0:", "4.000", "ms"]);
        assert_eq!(lines[2], ["3.000", "75.0%", "2", "1500.00", "copy", "out"]);
        assert_eq!(lines[3], ["1.000", "25.0%", "1", "1000.00", "copy", "in"]);
        assert_eq!(lines[4], ["cuda:1", "stream", "1:", "0.500", "ms"]);
        assert_eq!(lines[6], ["0.500", "100.0%", "1", "500.00", "copy", "in"]);
        let trace = chrome(&all);
        let rows: Vec<_> = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(rows.iter().map(|e| e["tid"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 0, 0, 1]);
        assert_eq!((rows[1]["ts"].as_f64(), rows[1]["dur"].as_f64()), (Some(1000.0), Some(2000.0)));
    }
}
