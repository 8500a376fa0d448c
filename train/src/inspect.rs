//! One step in detail for the report: what ran when, the memory of each category as it went, what each rank keeps.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use phalanx_nn::autograd::{HearingGuard, hear_recomputations};
use phalanx_parallel::tell;
use phalanx_tensor::{Category, Device};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::holds::holds;
use crate::machine::memory_bytes;
use crate::place::Place;
use crate::report::{self, Collective, Holds, Memory, Span, SpanKind, Timeline};
use crate::run::Run;
use crate::trace::Lane;

/// Steps of this process before the one that is inspected: the first steps compile and allocate what the later ones use.
const BEFORE: u64 = 3;
/// Steps of a pipeline without flushes that are inspected together: they overlap.
const OVERLAPPING: u64 = 3;
/// Changes of memory that are kept.
const CHANGES: usize = 400;

/// The steps to inspect of a run that has done so many of all.
pub(crate) fn steps_to_inspect(run: &Run) -> Range<u64> {
    let config = &run.means.config;
    // The first step of those that are captured is the one that runs as it is.
    let before = if run.captured.is_some() { 0 } else { BEFORE };
    let first = (run.done + before).min(config.steps.saturating_sub(1));
    let count = if config.asynchronous.is_some() { OVERLAPPING } else { 1 };
    first..first + count
}

/// What one rank notes of a run.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<Noted>>);

#[derive(Default)]
struct Noted {
    /// The steps that are inspected and the moment that their times count from, while they go on.
    inspected: Option<(Range<u64>, Instant)>,
    compute: Vec<Span>,
    communication: Vec<Span>,
    /// All calls of the run, by kind and group.
    calls: BTreeMap<(String, String), Collective>,
}

/// What a rank tells the first one of its step.
#[derive(Serialize, Deserialize)]
struct Seen {
    rank: usize,
    compute: Vec<Span>,
    communication: Vec<Span>,
    memory: Memory,
    holds: Holds,
}

impl Notes {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something ran on this rank in a step; of a pipeline with its stage and micro-batch.
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
            // It is all of the others.
            "step" => return,
            _ => SpanKind::Other,
        };
        let (stage, micro_batch) = place.unzip();
        noted.compute.push(Span { name: name.into(), kind, micro_batch, stage, ..span(begin, times) });
    }

    /// A call of this rank among a group is over.
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

fn ms_since(begin: Instant, at: Instant) -> f64 {
    at.saturating_duration_since(begin).as_secs_f64() * 1e3
}

fn span(begin: Instant, [started, ended]: [Instant; 2]) -> Span {
    let start_ms = ms_since(begin, started);
    Span { start_ms, ms: ms_since(begin, ended) - start_ms, ..Span::default() }
}

/// What tells this process from others: when it first asked, and a number.
fn process() -> (Instant, [f64; 2]) {
    static PROCESS: OnceLock<(Instant, [f64; 2])> = OnceLock::new();
    let born = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_nanos() as f64);
    *PROCESS.get_or_init(|| (Instant::now(), [born(), f64::from(std::process::id())]))
}

/// Whether all ranks are threads of this process. All ranks call it.
pub(crate) fn is_one_process(place: &Place) -> Result<bool> {
    let (_, own) = process();
    Ok(place.all_of(&own)?.chunks(2).all(|rank| rank == own))
}

/// The moment that all ranks count the step's time from. In one process it is the same moment; elsewhere each rank's own, at which all have come.
fn origin(place: &Place) -> Result<Instant> {
    let one = is_one_process(place)?;
    let (first, _) = process();
    let all = place.all(first.elapsed().as_secs_f64())?;
    let here = Instant::now();
    let latest = all.into_iter().fold(0.0, f64::max);
    Ok(if one { first + std::time::Duration::from_secs_f64(latest) } else { here })
}

/// Steps that are being inspected.
pub(crate) struct Inspection {
    notes: Notes,
    steps: Range<u64>,
    begin: Instant,
    /// Notes when something is computed again.
    _recomputations: HearingGuard,
}

impl Inspection {
    /// Begins. All ranks call it.
    pub fn begin(notes: &Notes, lane: &Lane, place: &Place, steps: Range<u64>) -> Result<Inspection> {
        place.device.synchronize()?;
        let begin = origin(place)?;
        let mut noted = notes.lock();
        (noted.inspected, noted.compute, noted.communication) =
            (Some((steps.clone(), begin)), Vec::new(), Vec::new());
        drop(noted);
        place.device.ledger()?.watch();
        let (heard, lane) = (notes.clone(), lane.clone());
        let recomputations =
            hear_recomputations(move |times| heard.note("recompute", lane.current(), times, None));
        Ok(Inspection { notes: notes.clone(), steps, begin, _recomputations: recomputations })
    }

    /// The steps are over: what all ranks have seen. All ranks call it.
    pub fn end(self, run: &Run) -> Result<(Vec<Memory>, Timeline, Vec<Holds>)> {
        let place = &run.place;
        place.device.synchronize()?;
        let changes = place.device.ledger()?.watched();
        let mut noted = self.notes.lock();
        noted.inspected = None;
        let (compute, communication) =
            (std::mem::take(&mut noted.compute), std::mem::take(&mut noted.communication));
        drop(noted);
        let changes = changes
            .into_iter()
            .map(|(at, bytes)| (ms_since(self.begin, at), bytes.map(|b| b as u64)))
            .collect();
        let memory = memory(place, self.steps.start + 1, changes);
        let own = Seen { rank: place.rank(), compute, communication, memory, holds: holds(run)? };
        let mut all = tell(place.all_ranks(), &own)?;
        if self.steps.end > self.steps.start + 1 {
            cut(&mut all);
        }
        let (mut memories, mut lanes, mut held) = (Vec::new(), Vec::new(), Vec::new());
        for Seen { rank, compute, communication, memory, holds } in all {
            memories.push(memory);
            held.push(holds);
            let lane = |name: &str, spans| report::Lane { rank, name: name.into(), spans };
            lanes.push(lane("compute", compute));
            if place.size() > 1 {
                lanes.push(lane("communication", communication));
            }
        }
        Ok((memories, Timeline { step: self.steps.start + 1, note: self.note(run), lanes }, held))
    }

    /// A sentence about what is drawn.
    fn note(&self, run: &Run) -> String {
        let config = &run.means.config;
        let mut note = match (&config.asynchronous, config.layout.pp) {
            (Some(_), _) => format!(
                "Steps {} to {} overlap, since no flush is between them.",
                self.steps.start + 1,
                self.steps.end
            ),
            (None, 1) => String::new(),
            (None, _) => format!("The schedule is {}.", config.layout.schedule),
        };
        if config.device.is_cuda() {
            note += " Spans are when the host gave the GPU its work.";
        }
        note.trim().into()
    }
}

/// Of a run that goes on before and after the steps, what lies between their first and last span.
fn cut(all: &mut [Seen]) {
    let spans = || all.iter().flat_map(|seen| &seen.compute);
    let from = spans().map(|span| span.start_ms).fold(f64::INFINITY, f64::min);
    let to = spans().map(|span| span.start_ms + span.ms).fold(0.0, f64::max);
    if from >= to {
        return;
    }
    for seen in all {
        let within = |span: &Span| span.start_ms + span.ms > from && span.start_ms < to;
        seen.communication.retain(within);
        for span in seen.compute.iter_mut().chain(&mut seen.communication) {
            let end = (span.start_ms + span.ms).min(to);
            let start = span.start_ms.max(from);
            (span.start_ms, span.ms) = (start - from, end - start);
        }
        let memory = &mut seen.memory;
        let kept: Vec<usize> =
            (0..memory.times_ms.len()).filter(|&i| (from..=to).contains(&memory.times_ms[i])).collect();
        memory.times_ms = kept.iter().map(|&i| memory.times_ms[i] - from).collect();
        for bytes in &mut memory.bytes {
            *bytes = kept.iter().map(|&i| bytes[i]).collect();
        }
    }
}

/// Changes as a chart has them; of very many only some, but always the one with the most bytes.
fn memory(place: &Place, step: u64, changes: Vec<(f64, [u64; 5])>) -> Memory {
    let each = changes.len().div_ceil(CHANGES).max(1);
    let most =
        |some: &[(f64, [u64; 5])]| some.iter().max_by_key(|(_, bytes)| bytes.iter().sum::<u64>()).copied();
    let kept: Vec<(f64, [u64; 5])> =
        changes.chunks(each).filter_map(most).chain(changes.last().copied()).collect();
    Memory {
        rank: place.rank(),
        step,
        categories: Category::ALL.iter().map(|category| category.name().to_string()).collect(),
        // The first is what there was when the step began.
        times_ms: kept.iter().enumerate().map(|(i, (at, _))| if i == 0 { 0.0 } else { *at }).collect(),
        bytes: (0..Category::ALL.len()).map(|i| kept.iter().map(|(_, bytes)| bytes[i]).collect()).collect(),
        limit_bytes: capacity(place.device),
    }
}

/// The bytes that a device has; 0 where that is not known: on a GPU.
fn capacity(device: Device) -> u64 {
    match device {
        Device::Cpu(_) => memory_bytes().unwrap_or(0),
        _ => 0,
    }
}

/// The calls of all ranks so far. All ranks call it.
pub(crate) fn collectives(notes: &Notes, place: &Place) -> Result<Vec<Collective>> {
    let rank = place.rank();
    let own = notes.lock().calls.clone();
    let own: Vec<Collective> =
        own.into_iter().map(|((kind, group), call)| Collective { rank, kind, group, ..call }).collect();
    Ok(tell(place.all_ranks(), &own)?.concat())
}
