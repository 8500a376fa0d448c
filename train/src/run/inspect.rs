//! One step in detail for the report: its timeline, the memory of each category over time, and what each rank stores of the model.

use std::ops::Range;
use std::time::Instant;

use phalanx_nn::Parameters;
use phalanx_nn::autograd::{HearingGuard, hear_recomputations};
use phalanx_parallel::all_gather_object;
use phalanx_parallel::mesh::{Axis, Coordinates};
use phalanx_tensor::{Category, Device};
use serde::{Deserialize, Serialize};

use crate::machine::memory_bytes;
use crate::mesh_rank::{MeshRank, process};
use crate::report::{Collective, Layout, Memory, RankStorage, Span, Timeline};
use crate::run::Run;
use crate::trace::{Notes, RankTrace, ms_since};
use crate::{Config, Result, report};

/// Steps of this process before the inspected one. The first steps compile kernels and allocate memory.
const BEFORE: u64 = 3;
/// Steps of a pipeline without flushes that are inspected together: they overlap.
const OVERLAPPING: u64 = 3;
/// The largest number of memory changes in the report.
const CHANGES: usize = 400;

/// The steps of a run to inspect.
pub(crate) fn steps_to_inspect(run: &Run) -> Range<u64> {
    let config = &run.setup.config;
    // If steps are captured, only the first one runs its operations one by one.
    let before = if run.captured.is_some() { 0 } else { BEFORE };
    let first = (run.done + before).min(config.steps.saturating_sub(1));
    let count = if config.asynchronous.is_some() { OVERLAPPING } else { 1 };
    first..first + count
}

/// A rank's observations, which it sends to the first rank.
#[derive(Serialize, Deserialize)]
struct RankObservations {
    rank: usize,
    compute: Vec<Span>,
    communication: Vec<Span>,
    memory: Memory,
    holds: RankStorage,
}

/// The start of the step's time axis. In one process it is the same moment for all ranks; else each rank takes the moment after an
/// exchange with all others.
fn time_origin(mesh_rank: &MeshRank) -> Result<Instant> {
    let one = mesh_rank.is_one_process()?;
    let (first, _) = process();
    let all = mesh_rank.all_gather(first.elapsed().as_secs_f64())?;
    let here = Instant::now();
    let latest = all.into_iter().fold(0.0, f64::max);
    Ok(if one { first + std::time::Duration::from_secs_f64(latest) } else { here })
}

/// Steps that are being inspected.
pub(crate) struct Inspection {
    notes: Notes,
    steps: Range<u64>,
    begin: Instant,
    /// Records when operations are recomputed.
    _recomputations: HearingGuard,
}

impl Inspection {
    /// Begins. All ranks call it.
    pub fn begin(
        notes: &Notes,
        trace: &RankTrace,
        mesh_rank: &MeshRank,
        steps: Range<u64>,
    ) -> Result<Inspection> {
        mesh_rank.device.synchronize()?;
        let begin = time_origin(mesh_rank)?;
        let mut noted = notes.lock();
        (noted.inspected, noted.compute, noted.communication) =
            (Some((steps.clone(), begin)), Vec::new(), Vec::new());
        drop(noted);
        mesh_rank.device.ledger()?.watch();
        let (heard, trace) = (notes.clone(), trace.clone());
        let recomputations =
            hear_recomputations(move |times| heard.note("recompute", trace.current(), times, None));
        Ok(Inspection { notes: notes.clone(), steps, begin, _recomputations: recomputations })
    }

    /// Ends the inspection and gathers the observations of all ranks. All ranks call it.
    pub fn end(self, run: &Run) -> Result<(Vec<Memory>, Timeline, Vec<RankStorage>)> {
        let mesh_rank = &run.mesh_rank;
        mesh_rank.device.synchronize()?;
        let changes = mesh_rank.device.ledger()?.watched();
        let mut noted = self.notes.lock();
        noted.inspected = None;
        let (compute, communication) =
            (std::mem::take(&mut noted.compute), std::mem::take(&mut noted.communication));
        drop(noted);
        let changes = changes
            .into_iter()
            .map(|(at, bytes)| (ms_since(self.begin, at), bytes.map(|b| b as u64)))
            .collect();
        let memory = memory(mesh_rank, self.steps.start + 1, changes);
        let own =
            RankObservations { rank: mesh_rank.rank(), compute, communication, memory, holds: holds(run)? };
        let mut all = all_gather_object(mesh_rank.all_ranks(), &own)?;
        if self.steps.end > self.steps.start + 1 {
            crop(&mut all);
        }
        let (mut memories, mut lanes, mut held) = (Vec::new(), Vec::new(), Vec::new());
        for RankObservations { rank, compute, communication, memory, holds } in all {
            memories.push(memory);
            held.push(holds);
            let lane = |name: &str, spans| report::Lane { rank, name: name.into(), spans };
            lanes.push(lane("compute", compute));
            if mesh_rank.size() > 1 {
                lanes.push(lane("communication", communication));
            }
        }
        Ok((memories, Timeline { step: self.steps.start + 1, note: self.note(run), lanes }, held))
    }

    /// The caption of the timeline.
    fn note(&self, run: &Run) -> String {
        let config = &run.setup.config;
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

/// Crops the observations of overlapping steps to the time between their first and last span.
fn crop(all: &mut [RankObservations]) {
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

/// The changes of memory for the chart. Of very many only some are kept, but always the one with the most bytes.
fn memory(mesh_rank: &MeshRank, step: u64, changes: Vec<(f64, [u64; 5])>) -> Memory {
    let each = changes.len().div_ceil(CHANGES).max(1);
    let most =
        |some: &[(f64, [u64; 5])]| some.iter().max_by_key(|(_, bytes)| bytes.iter().sum::<u64>()).copied();
    let kept: Vec<(f64, [u64; 5])> =
        changes.chunks(each).filter_map(most).chain(changes.last().copied()).collect();
    Memory {
        rank: mesh_rank.rank(),
        step,
        categories: Category::ALL.iter().map(|category| category.name().to_string()).collect(),
        // The first entry is the memory at the start of the step.
        times_ms: kept.iter().enumerate().map(|(i, (at, _))| if i == 0 { 0.0 } else { *at }).collect(),
        bytes: (0..Category::ALL.len()).map(|i| kept.iter().map(|(_, bytes)| bytes[i]).collect()).collect(),
        limit_bytes: capacity(mesh_rank.device),
    }
}

/// The bytes of a device's memory; 0 if unknown, as on a GPU.
fn capacity(device: Device) -> u64 {
    match device {
        Device::Cpu(_) => memory_bytes().unwrap_or(0),
        _ => 0,
    }
}

/// The calls of all ranks so far. All ranks call it.
pub(crate) fn collectives(notes: &Notes, mesh_rank: &MeshRank) -> Result<Vec<Collective>> {
    let rank = mesh_rank.rank();
    let own = notes.lock().calls.clone();
    let own: Vec<Collective> =
        own.into_iter().map(|((kind, group), call)| Collective { rank, kind, group, ..call }).collect();
    Ok(all_gather_object(mesh_rank.all_ranks(), &own)?.concat())
}

/// The layout of the ranks, if there are several.
pub(crate) fn layout(config: &Config) -> Option<Layout> {
    let (mesh, schedule) = (config.layout.mesh().ok()?, config.layout.schedule().ok()?);
    if config.ranks() == 1 {
        return None;
    }
    let holds = |rank: usize| {
        let Coordinates { tp, dp, pp } = mesh.coordinates(rank);
        let stages: Vec<usize> = schedule.stages_of(pp).collect();
        RankStorage { rank, data: dp, tensor: tp, pipeline: pp, stages, ..RankStorage::default() }
    };
    Some(Layout {
        data: mesh.size(Axis::Dp),
        tensor: mesh.size(Axis::Tp),
        pipeline: mesh.size(Axis::Pp),
        zero_stage: config.zero,
        schedule: if schedule.stages() > 1 { config.layout.schedule.clone() } else { String::new() },
        ranks: (0..config.ranks()).map(holds).collect(),
    })
}

/// What this rank stores of the model now.
pub(crate) fn holds(run: &Run) -> Result<RankStorage> {
    let (mesh_rank, config) = (&run.mesh_rank, &run.setup.config);
    let Coordinates { tp, dp, pp } = mesh_rank.groups.at();
    let names: Vec<String> = run.model.parameters().iter().map(|p| p.name().to_string()).collect();
    let elements: usize = run.setup.data_parallel.parameters().iter().map(|p| p.tensor().numel()).sum();
    let whole: usize = run.model.parameters().iter().map(|p| p.tensor().numel()).sum();
    let ledger = mesh_rank.device.ledger()?;
    let bytes = |category| ledger.category(category).now as u64;
    Ok(RankStorage {
        rank: mesh_rank.rank(),
        data: dp,
        tensor: tp,
        pipeline: pp,
        stages: config.layout.schedule()?.stages_of(pp).collect(),
        holds: collapsed(&names),
        // ZeRO's third stage keeps a share of each parameter.
        parameters: if config.zero == 3 { elements } else { whole } as u64,
        parameters_bytes: bytes(Category::Parameters),
        gradients_bytes: bytes(Category::Gradients),
        optimizer_bytes: bytes(Category::OptimizerState),
        device: mesh_rank.device.to_string(),
    })
}

/// Parameters' names in short: `token_embedding.weight, blocks.0.norm.weight, blocks.1.norm.weight` become `token_embedding, blocks 0-1`.
pub(crate) fn collapsed(names: &[String]) -> String {
    let mut parts: Vec<(String, Vec<u64>)> = Vec::new();
    for name in names {
        let words: Vec<&str> = name.split('.').collect();
        let number = words.iter().position(|word| word.parse::<u64>().is_ok());
        let (part, number) = match number {
            Some(at) => (words[..at].last().copied().unwrap_or("layers"), words[at].parse().ok()),
            None => (words[0], None),
        };
        match parts.iter_mut().find(|(known, _)| known == part) {
            Some((_, numbers)) => numbers.extend(number),
            None => parts.push((part.into(), number.into_iter().collect())),
        }
    }
    let text = |(part, mut numbers): (String, Vec<u64>)| {
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.is_empty() { part } else { format!("{part} {}", ranges(&numbers)) }
    };
    parts.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// `0-3, 6` of 0, 1, 2, 3 and 6.
fn ranges(numbers: &[u64]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let text = |run: &[u64]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    };
    runs.map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> String {
        collapsed(&names.iter().map(|name| name.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn names_are_collapsed_to_parts_and_runs_of_numbers() {
        let names =
            ["embedding.weight", "blocks.0.a.weight", "blocks.0.b.weight", "blocks.1.a.weight", "norm.bias"];
        assert_eq!(of(&names), "embedding, blocks 0-1, norm");
        assert_eq!(of(&["model.layers.2.w", "model.layers.3.w", "model.layers.7.w"]), "layers 2-3, 7");
        assert_eq!(of(&["0.weight", "0.bias", "6.weight"]), "layers 0, 6");
        assert_eq!(of(&["weight"]), "weight");
        assert_eq!(of(&[]), "");
    }
}
