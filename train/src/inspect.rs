//! One step seen from the inside, for the report: what ran when, and the memory of each category as it went.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_parallel::tell;
use phalanx_tensor::{Category, Device};
use serde::{Deserialize, Serialize};

use crate::place::Place;
use crate::report::{self, Collective, Memory, Span, SpanKind, Timeline};
use crate::{Error, Result};

/// The step that is looked at: the first ones make what the others find.
pub(crate) const STEP: u64 = 3;
/// How often memory is read.
const READ_EVERY: Duration = Duration::from_micros(100);
/// Readings of a step that are kept.
const READINGS: usize = 400;

/// What one rank notes of a run.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<Noted>>);

#[derive(Default)]
struct Noted {
    /// When the step began that is looked at, while it goes on.
    begin: Option<Instant>,
    compute: Vec<Span>,
    communication: Vec<Span>,
    calls: BTreeMap<String, Collective>,
}

/// What a rank tells the first one of its step.
#[derive(Serialize, Deserialize)]
struct Seen {
    rank: usize,
    compute: Vec<Span>,
    communication: Vec<Span>,
    memory: Memory,
}

impl Notes {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something ran on this rank; a call if it has a kind and bytes.
    pub fn note(&self, name: &str, [started, ended]: [Instant; 2], place: Option<(u64, u64)>) {
        let mut noted = self.lock();
        let Some(begin) = noted.begin else { return };
        let kind = match name {
            "forward" => SpanKind::Forward,
            "backward" => SpanKind::Backward,
            "backward of inputs" => SpanKind::BackwardInput,
            "backward of weights" => SpanKind::BackwardWeight,
            "optimizer" | "update" => SpanKind::Optimizer,
            "data" => SpanKind::Data,
            "wait" | "receive input" | "receive gradient" => SpanKind::Wait,
            // It is all of the others.
            "step" => return,
            _ => SpanKind::Other,
        };
        let (stage, micro_batch) = place.unzip();
        noted.compute.push(Span {
            name: name.into(),
            kind,
            micro_batch,
            stage,
            ..span(begin, [started, ended])
        });
    }

    /// A call of this rank is over.
    pub fn call(&self, kind: &str, bytes: usize, [started, ended]: [Instant; 2]) {
        let mut noted = self.lock();
        let ms = (ended - started).as_secs_f64() * 1e3;
        let call = noted.calls.entry(kind.into()).or_default();
        (call.calls, call.bytes, call.ms) = (call.calls + 1, call.bytes + bytes as u64, call.ms + ms);
        if let Some(begin) = noted.begin {
            let name = kind.to_string();
            let detail = format!("{bytes} bytes");
            let span = span(begin, [started, ended]);
            noted.communication.push(Span { name, kind: SpanKind::Communication, detail, ..span });
        }
    }
}

fn span(begin: Instant, [started, ended]: [Instant; 2]) -> Span {
    let ms = |at: Instant| at.saturating_duration_since(begin).as_secs_f64() * 1e3;
    Span { start_ms: ms(started), ms: ms(ended) - ms(started), ..Span::default() }
}

/// A step that is being looked at.
pub(crate) struct Inspection {
    notes: Notes,
    over: Arc<AtomicBool>,
    reader: JoinHandle<Vec<(f64, Vec<u64>)>>,
}

impl Inspection {
    /// Begins to look.
    pub fn begin(notes: &Notes, device: Device) -> Result<Inspection> {
        let (begin, over) = (Instant::now(), Arc::new(AtomicBool::new(false)));
        let mut noted = notes.lock();
        (noted.begin, noted.compute, noted.communication) = (Some(begin), Vec::new(), Vec::new());
        let told = over.clone();
        let reader =
            std::thread::Builder::new().name("memory".into()).spawn(move || read(device, begin, &told));
        let reader = reader.map_err(|e| Error::data("inspection", format!("no thread: {e}")))?;
        Ok(Inspection { notes: notes.clone(), over, reader })
    }

    /// The step is over: what all ranks have seen. All ranks call it.
    pub fn end(self, place: &Place, note: &str) -> Result<(Vec<Memory>, Timeline)> {
        self.over.store(true, Ordering::Relaxed);
        let readings = self.reader.join().unwrap_or_default();
        let mut noted = self.notes.lock();
        noted.begin = None;
        let (compute, communication) =
            (std::mem::take(&mut noted.compute), std::mem::take(&mut noted.communication));
        drop(noted);
        let seen = Seen { rank: place.rank(), compute, communication, memory: memory(place, readings) };
        let (mut memories, mut lanes) = (Vec::new(), Vec::new());
        for Seen { rank, compute, communication, memory } in tell(place.all_ranks(), &seen)? {
            memories.push(memory);
            let lane = |name: &str, spans| report::Lane { rank, name: name.into(), spans };
            lanes.push(lane("compute", compute));
            if place.size() > 1 {
                lanes.push(lane("communication", communication));
            }
        }
        Ok((memories, Timeline { step: STEP, note: note.into(), lanes }))
    }
}

/// The bytes of each category as they change, until the step is over.
fn read(device: Device, begin: Instant, over: &AtomicBool) -> Vec<(f64, Vec<u64>)> {
    let Ok(ledger) = device.ledger() else { return Vec::new() };
    let mut readings: Vec<(f64, Vec<u64>)> = Vec::new();
    loop {
        let is_over = over.load(Ordering::Relaxed);
        let bytes: Vec<u64> =
            Category::ALL.iter().map(|&category| ledger.category(category).now as u64).collect();
        if is_over || readings.last().is_none_or(|(_, last)| *last != bytes) {
            readings.push((begin.elapsed().as_secs_f64() * 1e3, bytes));
        }
        if is_over {
            return readings;
        }
        std::thread::sleep(READ_EVERY);
    }
}

/// Readings as a chart has them; of very many only some, but always the one with the most bytes.
fn memory(place: &Place, readings: Vec<(f64, Vec<u64>)>) -> Memory {
    let each = readings.len().div_ceil(READINGS).max(1);
    let most =
        |some: &[(f64, Vec<u64>)]| some.iter().max_by_key(|(_, bytes)| bytes.iter().sum::<u64>()).cloned();
    let end = readings.last().cloned();
    let kept: Vec<(f64, Vec<u64>)> = readings.chunks(each).filter_map(most).chain(end).collect();
    let of = |category: usize| kept.iter().map(|(_, bytes)| bytes[category]).collect();
    Memory {
        rank: place.rank(),
        step: STEP,
        categories: Category::ALL.iter().map(|category| category.name().to_string()).collect(),
        times_ms: kept.iter().map(|(at, _)| *at).collect(),
        bytes: (0..Category::ALL.len()).map(of).collect(),
        limit_bytes: 0,
    }
}

/// What all ranks have told each other. All ranks call it.
pub(crate) fn collectives(notes: &Notes, place: &Place) -> Result<Vec<Collective>> {
    let rank = place.rank();
    let own = notes.lock().calls.clone();
    let own: Vec<Collective> =
        own.into_iter().map(|(kind, call)| Collective { rank, kind, ..call }).collect();
    Ok(tell(place.all_ranks(), &own)?.concat())
}
