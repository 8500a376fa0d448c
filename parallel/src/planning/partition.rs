//! [`plan`]: which layers form a stage, and how many workers replicate it, by PipeDream's dynamic program.
//!
//! Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (SOSP 2019), section 3.1.

use std::ops::Range;

use rayon::prelude::*;

use super::LayerProfile;
use crate::{Error, Result};

/// A level of the machine's network: the lowest connects workers, each further one connects groups of the level beneath.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// The number of workers, or of groups of the level beneath, in a group of this level.
    pub width: usize,
    /// Bytes a second between two of them.
    pub bandwidth: f64,
}

/// A partition of the layers into stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The time that the slowest stage, transfer or synchronisation takes for a micro-batch. The pipeline completes one
    /// micro-batch in each such time.
    pub time: f64,
    /// The stages, in order, of the highest level.
    pub stages: Vec<PlannedStage>,
}

/// A stage: consecutive layers, which one worker or one group of the level beneath computes.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStage {
    /// The layers.
    pub layers: Range<usize>,
    /// The number of its replicas, which take micro-batches in turn.
    pub replicas: usize,
    /// How each replica is divided among the workers of its group; empty at the lowest level.
    pub inside: Vec<PlannedStage>,
}

impl Plan {
    /// The number of micro-batches in flight that keeps the pipeline busy, for each replica of the first stage: the workers of the
    /// highest level over those replicas, rounded up.
    pub fn in_flight(&self) -> usize {
        let workers: usize = self.stages.iter().map(|stage| stage.replicas).sum();
        self.stages.first().map_or(0, |first| workers.div_ceil(first.replicas.max(1)))
    }
}

/// The best partition of the layers over all workers: the one with the least time of its slowest stage or transfer.
///
/// A stage of the layers `i..j` on `m` workers takes `T = max(C, 2 (m - 1) W / bandwidth) / m` for a micro-batch: `C` is
/// the time of its layers, or that of the level beneath's best partition of them, and `W` the bytes of its parameters. The
/// replicas all-reduce the gradients of these meanwhile. A transfer between stages takes `2 a / bandwidth` for the output of `a`
/// bytes and its gradient. The best partition of `i..j` over `m` workers has one stage, or a last stage `s..j` on some of them and the
/// best partition of `i..s` on the others. `levels` begins with the lowest level.
///
/// # Errors
/// If there is no layer, no level, an empty level, or a number that is negative or not finite (of bandwidths, not above 0).
pub fn plan(layers: &[LayerProfile], levels: &[Level]) -> Result<Plan> {
    check(layers, levels)?;
    let mut tables: Vec<Table> = Vec::new();
    for level in levels {
        let table = match tables.last() {
            None => Table::new(layers, level, |range| layers[range].iter().map(|layer| layer.time).sum()),
            Some(beneath) => Table::new(layers, level, |range| beneath.entry(&range, beneath.width).time),
        };
        tables.push(table);
    }
    let all = 0..layers.len();
    let time = tables.last().map_or(0.0, |table| table.entry(&all, table.width).time);
    Ok(Plan { time, stages: stages(&tables, all) })
}

fn check(layers: &[LayerProfile], levels: &[Level]) -> Result<()> {
    let wrong = |got: String, wanted: &str| Err(Error::Config(format!("plan: got {got}, wanted {wanted}")));
    if layers.is_empty() || levels.is_empty() {
        return wrong(format!("{} layers, {} levels", layers.len(), levels.len()), "at least one of each");
    }
    let good = |number: f64| number.is_finite() && number >= 0.0;
    let is_bad = |l: &LayerProfile| ![l.time, l.activation_bytes, l.parameter_bytes].into_iter().all(good);
    if let Some(number) = layers.iter().position(is_bad) {
        return wrong(format!("layer {number}: {:?}", layers[number]), "finite numbers from 0 up");
    }
    match levels
        .iter()
        .position(|level| level.width == 0 || level.bandwidth.is_nan() || level.bandwidth <= 0.0)
    {
        Some(number) => {
            wrong(format!("level {number}: {:?}", levels[number]), "a width and a bandwidth above 0")
        }
        None => Ok(()),
    }
}

/// The best partition of a range of layers over some workers.
#[derive(Clone, Copy)]
struct Subproblem {
    /// The time as one stage.
    stage: f64,
    /// The time of the best partition.
    time: f64,
    /// The first layer of the best partition's last stage, and the number of its workers. `None` if one stage is best.
    last: Option<(usize, usize)>,
}

/// The subproblems of a level: all ranges of layers, over 1 to `width` workers.
struct Table {
    layers: usize,
    width: usize,
    entries: Vec<Subproblem>,
}

impl Table {
    /// `compute` is the time of a range of layers on one worker of this level.
    fn new(layers: &[LayerProfile], level: &Level, compute: impl Fn(Range<usize>) -> f64 + Sync) -> Table {
        let (count, width) = (layers.len(), level.width);
        let none = Subproblem { stage: f64::INFINITY, time: f64::INFINITY, last: None };
        let mut table = Table { layers: count, width, entries: vec![none; count * count * width] };
        // The partition of a range is made of those of shorter ranges.
        for length in 1..=count {
            let ranges = (0..count + 1 - length).into_par_iter().map(|first| first..first + length);
            let entries: Vec<(Range<usize>, Vec<Subproblem>)> = ranges
                .map(|range| {
                    let alone = compute(range.clone());
                    let bytes: f64 = layers[range.clone()].iter().map(|layer| layer.parameter_bytes).sum();
                    let entry = |workers| {
                        let synchronise = 2.0 * (workers - 1) as f64 * bytes / level.bandwidth;
                        let stage = alone.max(synchronise) / workers as f64;
                        table.best(layers, level, &range, workers, stage)
                    };
                    (range.clone(), (1..=width).map(entry).collect())
                })
                .collect();
            for (range, entries) in entries {
                let first = table.index(&range, 1);
                table.entries[first..first + width].copy_from_slice(&entries);
            }
        }
        table
    }

    /// The best of one stage and of every last stage with the best partition of the layers before it.
    fn best(
        &self,
        layers: &[LayerProfile],
        level: &Level,
        range: &Range<usize>,
        workers: usize,
        stage: f64,
    ) -> Subproblem {
        let mut best = Subproblem { stage, time: stage, last: None };
        for cut in range.start + 1..range.end {
            let transfer = 2.0 * layers[cut - 1].activation_bytes / level.bandwidth;
            for own in 1..workers {
                let before = self.entry(&(range.start..cut), workers - own).time;
                let time = before.max(transfer).max(self.entry(&(cut..range.end), own).stage);
                if time < best.time {
                    best = Subproblem { time, last: Some((cut, own)), ..best };
                }
            }
        }
        best
    }

    fn index(&self, range: &Range<usize>, workers: usize) -> usize {
        (range.start * self.layers + range.end - 1) * self.width + workers - 1
    }

    fn entry(&self, range: &Range<usize>, workers: usize) -> Subproblem {
        self.entries[self.index(range, workers)]
    }
}

/// The stages of the best partition of a range at the highest of these levels.
fn stages(tables: &[Table], layers: Range<usize>) -> Vec<PlannedStage> {
    let Some((table, beneath)) = tables.split_last() else { return Vec::new() };
    let (mut range, mut workers) = (layers, table.width);
    let mut found = Vec::new();
    loop {
        let last = table.entry(&range, workers).last;
        let (cut, replicas) = last.unwrap_or((range.start, workers));
        found.push(PlannedStage {
            layers: cut..range.end,
            replicas,
            inside: stages(beneath, cut..range.end),
        });
        if last.is_none() {
            found.reverse();
            return found;
        }
        (range.end, workers) = (cut, workers - replicas);
    }
}
