//! [`Timeline`]: what was computed and copied when.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_tensor::Device;

use super::Cell;

/// What is done with a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Its forward pass.
    Forward,
    /// Its forward pass once more, for the sake of the values that backward needs.
    Recompute,
    /// Its backward pass.
    Backward,
    /// A value of the micro-batch is copied to the stage, or a gradient.
    Copy,
}

/// A phase of a cell that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where; of a copy, where to.
    pub device: Device,
    /// The stage and the micro-batch.
    pub cell: Cell,
    /// What was done.
    pub phase: Phase,
    /// From when on.
    pub begin: Instant,
    /// Until when.
    pub end: Instant,
}

/// Hears of phases that are over, on the thread that ran them; it must be quick and not panic.
pub type Observer = Arc<dyn Fn(Span) + Send + Sync>;

/// Collects spans. Clones share them.
#[derive(Clone, Default)]
pub struct Timeline(Arc<Mutex<Vec<Span>>>);

impl Timeline {
    /// Without spans.
    pub fn new() -> Timeline {
        Timeline::default()
    }

    /// What adds spans.
    pub fn observer(&self) -> Observer {
        let spans = self.0.clone();
        Arc::new(move |span| spans.lock().unwrap_or_else(PoisonError::into_inner).push(span))
    }

    /// All spans so far, in order of their begin; they are taken away.
    pub fn take(&self) -> Vec<Span> {
        let mut spans = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        spans.sort_by_key(|span| (span.begin, span.end));
        spans
    }
}

/// The share of the time from the first begin to the last end in which devices compute nothing, on average over the
/// devices; for m micro-batches over n stages of equal cost it is `(n - 1) / (m + n - 1)`.
/// Source: GPipe (arXiv:1811.06965), section 2.3.
pub fn bubble(spans: &[Span]) -> f64 {
    let computing: Vec<&Span> = spans.iter().filter(|span| span.phase != Phase::Copy).collect();
    let devices = computing.iter().map(|span| span.device).collect::<BTreeSet<_>>().len();
    let (begin, end) = (computing.iter().map(|s| s.begin).min(), computing.iter().map(|s| s.end).max());
    let (Some(begin), Some(end)) = (begin, end) else { return 0.0 };
    let busy: Duration = computing.iter().map(|span| span.end - span.begin).sum();
    1.0 - busy.as_secs_f64() / ((end - begin).as_secs_f64() * devices as f64).max(f64::MIN_POSITIVE)
}

/// A cell's observer, if there is one.
#[derive(Clone)]
pub(super) struct Watch {
    pub(super) observer: Option<Observer>,
    pub(super) device: Device,
    pub(super) cell: Cell,
}

impl Watch {
    /// A phase that began then is over.
    pub(super) fn over(&self, phase: Phase, begin: Instant) {
        if let Some(observer) = &self.observer {
            observer(Span { device: self.device, cell: self.cell, phase, begin, end: Instant::now() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bubble_of_equal_cells_is_that_of_the_formula() {
        let start = Instant::now();
        for (m, n) in [(4, 2), (8, 4), (1, 3), (5, 1)] {
            let mut spans = Vec::new();
            for (tick, cells) in (0..).zip(super::super::clock_cycles(m, n)) {
                spans.extend(cells.into_iter().map(|cell| Span {
                    device: Device::Cpu(cell.stage as u16),
                    cell,
                    phase: Phase::Forward,
                    begin: start + Duration::from_millis(tick),
                    end: start + Duration::from_millis(tick + 1),
                }));
            }
            assert!((bubble(&spans) - (n - 1) as f64 / (m + n - 1) as f64).abs() < 1e-9);
        }
        assert_eq!(bubble(&[]), 0.0);
    }
}
