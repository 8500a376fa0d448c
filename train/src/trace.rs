//! [`Trace`]: a timeline of the ranks as trace events for browsers. Rank `r` computes on lane (row) `2r` and
//! communicates on lane `2r + 1`. A span of communication lasts from the start of a call until its tensors are free
//! again. [`Notes`] has the spans of one step for the report.
//!
//! Ranks of one process share one sink. Ranks in other processes keep their events, which the first rank gathers at the end.
//! Source: Trace Event Format, the JSON array form, whose closing bracket may be missing: a killed run's file is valid.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use phalanx_parallel::all_gather_object;
use phalanx_parallel::comm::{Comm, Observer};
use phalanx_parallel::flight::FlightRecorder;
use phalanx_parallel::pipeline::ranks::{self as actions, Executed};
use phalanx_parallel::pipeline::schedule::ActionKind;
use serde_json::{Value, json};

use phalanx_tensor::unpoisoned;

use crate::mesh_rank::Observers;
use crate::report::{Collective, Span, SpanKind};
use crate::{Config, Error, Result};

/// The spans of this process's ranks, or nothing.
#[derive(Clone)]
pub struct Trace {
    sink: Option<Arc<Mutex<Sink>>>,
    /// Whether ranks note a step for the report.
    inspects: bool,
    begin: Instant,
}

/// The file of the events, or the events that wait for it.
#[derive(Default)]
struct Sink {
    file: Option<(PathBuf, BufWriter<File>)>,
    waiting: String,
}

/// One rank's part of a trace: two lanes, for computation and communication.
#[derive(Clone)]
pub struct RankTrace {
    trace: Trace,
    rank: usize,
    notes: Option<Notes>,
    /// The step under way.
    step: Arc<AtomicU64>,
    recorder: Option<FlightRecorder>,
}

impl Trace {
    /// The trace of a run. Its time begins now, or, if several processes trace together, when all have reached this call.
    ///
    /// # Errors
    /// If a process does not take part.
    pub fn new(config: &Config, processes: Option<&Comm>) -> Result<Trace> {
        let wanted = config.trace.is_some();
        if let Some(comm) = processes.filter(|_| wanted) {
            comm.barrier()?;
        }
        let inspects = config.folder().is_some() && !config.device.is_meta();
        Ok(Trace { sink: wanted.then(Arc::default), inspects, begin: Instant::now() })
    }

    /// The trace of rank `rank`.
    pub fn rank(&self, rank: usize) -> RankTrace {
        let notes = self.inspects.then(Notes::default);
        RankTrace { trace: self.clone(), rank, notes, step: Arc::default(), recorder: None }
    }

    /// Begins the file.
    pub fn open(&self, path: &Path) -> Result<()> {
        let Some(sink) = &self.sink else { return Ok(()) };
        let file = File::create(path).map_err(|e| Error::file(path, e))?;
        let mut sink = unpoisoned(sink.lock());
        sink.file = Some((path.to_path_buf(), BufWriter::new(file)));
        sink.waiting.insert_str(0, "[\n");
        sink.write("")
    }

    /// Adds the events of other processes and closes the array, so that any JSON parser reads the file.
    pub fn finish(&self, processes: Option<&Comm>) -> Result<()> {
        let Some(sink) = &self.sink else { return Ok(()) };
        let mut sink = unpoisoned(sink.lock());
        if let Some(comm) = processes {
            sink.waiting = all_gather_object(comm, &sink.waiting)?.concat();
        }
        match sink.file {
            Some(_) => sink.write(
                "{\"name\": \"end\", \"ph\": \"i\", \"ts\": 0, \"pid\": 0, \"tid\": 0, \"s\": \"g\"}]\n",
            ),
            None => Ok(()),
        }
    }

    fn note(&self, event: &Value) -> Result<()> {
        let Some(sink) = &self.sink else { return Ok(()) };
        unpoisoned(sink.lock()).write(&format!("{event},\n"))
    }

    fn name(&self, lane: usize, name: &str) {
        // An error of the file is returned by the next span.
        let _ = self.note(&json!({
            "name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}
        }));
    }

    fn span(&self, lane: usize, name: &str, times: [Instant; 2], args: &Value) -> Result<()> {
        let [start, end] = times.map(|t| t.saturating_duration_since(self.begin).as_secs_f64() * 1e6);
        self.note(&json!({
            "name": name, "ph": "X", "ts": start, "dur": end - start, "pid": 0, "tid": lane, "args": args
        }))
    }
}

impl RankTrace {
    /// Begins the file of all lanes, and names this one's.
    pub fn open(&self, path: &Path) -> Result<()> {
        self.trace.open(path)
    }

    /// Runs `work` and notes when it ran, under the step's number.
    pub fn span<T>(&self, name: &str, step: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let done = work()?;
        self.note(name, step, start)?;
        Ok(done)
    }

    /// Adds a span from `start` until now.
    pub fn note(&self, name: &str, step: u64, start: Instant) -> Result<()> {
        let times = [start, Instant::now()];
        self.notes.iter().for_each(|notes| notes.note(name, step, times, None));
        if self.trace.sink.is_none() {
            return Ok(());
        }
        self.trace.span(2 * self.rank, name, times, &json!({"step": step}))
    }

    /// The same trace, which also tells the flight recorder of the steps.
    pub(crate) fn recorded(self, recorder: Option<&FlightRecorder>) -> RankTrace {
        RankTrace { recorder: recorder.cloned(), ..self }
    }

    /// The notes for the report, if there is one.
    pub(crate) fn notes(&self) -> Option<&Notes> {
        self.notes.as_ref()
    }

    /// The step under way.
    pub(crate) fn current(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// A step begins.
    pub fn begin(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.recorder.iter().for_each(|recorder| recorder.set_step(step));
    }

    /// The observer of a pipeline's actions, if they are traced. Sends are left out, since they are traced as calls.
    pub fn actions(&self) -> Option<actions::Observer> {
        if self.trace.sink.is_none() && self.notes.is_none() {
            return None;
        }
        let lane = self.clone();
        Some(Arc::new(move |done: Executed| {
            if matches!(done.action.kind, ActionKind::SendForward | ActionKind::SendBackward) {
                return;
            }
            let name = done.action.kind.name();
            let Executed { action, started, ended } = done;
            let place = Some((action.stage as u64, action.micro_batch as u64));
            let step = lane.step.load(Ordering::Relaxed);
            lane.notes.iter().for_each(|notes| notes.note(name, step, [started, ended], place));
            if lane.trace.sink.is_none() {
                return;
            }
            let args = json!({"step": step, "stage": action.stage, "micro_batch": action.micro_batch});
            // An error of the file is returned by the next span.
            let _ = lane.trace.span(2 * lane.rank, name, [started, ended], &args);
        }))
    }

    /// Names the lanes. Returns the observers of this rank's calls in each group, if they are traced.
    pub fn observer(&self) -> Option<Observers> {
        if self.trace.sink.is_none() && self.notes.is_none() {
            return None;
        }
        let lane = 2 * self.rank + 1;
        self.trace.name(lane - 1, &format!("rank {}", self.rank));
        self.trace.name(lane, &format!("rank {} communication", self.rank));
        let (trace, notes) = (self.trace.clone(), self.notes.clone());
        let of = move |group: &'static str| -> Observer {
            let (trace, notes) = (trace.clone(), notes.clone());
            Arc::new(move |call| {
                let times = [call.started, call.ended];
                notes.iter().for_each(|notes| notes.call(call.kind.name(), group, call.bytes, times));
                if trace.sink.is_none() {
                    return;
                }
                let args = json!({"kind": call.kind.name(), "group": group, "bytes": call.bytes});
                // An error of the file is returned by the next span.
                let _ = trace.span(lane, "communication", times, &args);
            })
        };
        Some(Arc::new(of))
    }
}

impl Sink {
    /// Writes the waiting events and `text`, or keeps both until there is a file.
    fn write(&mut self, text: &str) -> Result<()> {
        self.waiting += text;
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let text = std::mem::take(&mut self.waiting);
        let written = file.write_all(text.as_bytes()).and_then(|()| file.flush());
        written.map_err(|e| Error::file(path, e))
    }
}

/// One rank's record of a run for its report: the spans of the inspected steps, and all communication calls.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<Noted>>);

#[derive(Default)]
pub(crate) struct Noted {
    /// The steps that are being inspected, and the start of their time axis.
    pub(crate) inspected: Option<(Range<u64>, Instant)>,
    pub(crate) compute: Vec<Span>,
    pub(crate) communication: Vec<Span>,
    /// All calls of the run, by kind and group.
    pub(crate) calls: BTreeMap<(String, String), Collective>,
}

impl Notes {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Noted> {
        unpoisoned(self.0.lock())
    }

    /// Adds a span of this rank in a step, with the stage and the micro-batch of a pipeline's action.
    pub fn note(&self, name: &str, step: u64, times: [Instant; 2], place: Option<(u64, u64)>) {
        let mut noted = self.lock();
        let Some(begin) =
            noted.inspected.as_ref().filter(|(steps, _)| steps.contains(&step)).map(|(_, b)| *b)
        else {
            return;
        };
        let kind = match name {
            "forward" => SpanKind::Forward,
            "backward" => SpanKind::Backward,
            "backward of inputs" => SpanKind::BackwardInput,
            "backward of weights" => SpanKind::BackwardWeight,
            "recompute" => SpanKind::Recompute,
            "optimizer" | "update" => SpanKind::Optimizer,
            "data" => SpanKind::Data,
            "wait" | "receive input" | "receive gradient" => SpanKind::Wait,
            // The span of the step covers all others.
            "step" => return,
            _ => SpanKind::Other,
        };
        let (stage, micro_batch) = place.unzip();
        noted.compute.push(Span { name: name.into(), kind, micro_batch, stage, ..span(begin, times) });
    }

    /// Adds a finished communication call of this rank in a group.
    pub fn call(&self, kind: &str, group: &str, bytes: usize, times: [Instant; 2]) {
        let mut noted = self.lock();
        let call = noted.calls.entry((kind.into(), group.into())).or_default();
        let ms = (times[1] - times[0]).as_secs_f64() * 1e3;
        (call.calls, call.bytes, call.ms) = (call.calls + 1, call.bytes + bytes as u64, call.ms + ms);
        if let Some((_, begin)) = noted.inspected {
            let detail = format!("{bytes} bytes among {group}");
            let span = span(begin, times);
            noted.communication.push(Span {
                name: kind.into(),
                kind: SpanKind::Communication,
                detail,
                ..span
            });
        }
    }
}

pub(crate) fn ms_since(begin: Instant, at: Instant) -> f64 {
    at.saturating_duration_since(begin).as_secs_f64() * 1e3
}

fn span(begin: Instant, [started, ended]: [Instant; 2]) -> Span {
    let start_ms = ms_since(begin, started);
    Span { start_ms, ms: ms_since(begin, ended) - start_ms, ..Span::default() }
}
