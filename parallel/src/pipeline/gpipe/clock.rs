//! The clock cycles: in which order the cells of a pipeline are computed ([`clock_cycles`]), which of them each device
//! computes ([`device_orders`]), and when each was computed ([`Timeline`], [`bubble`]).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_tensor::{Device, unpoisoned};

use super::Cell;
use super::observe::await_reports;

/// The clock cycles (ticks) of a pipeline of `micro_batches` over `stages`: a cell runs one tick after the cell that makes its
/// input. There are `micro_batches + stages - 1` ticks. The cells of one tick do not depend on each other.
///
/// ```text
/// m = 4, n = 3        tick   0    1    2    3    4    5
///                  stage 0   0    1    2    3
///                  stage 1        0    1    2    3
///                  stage 2             0    1    2    3
/// ```
/// Source: torchgpipe (arXiv:2004.09910), algorithm 1.
pub fn clock_cycles(micro_batches: usize, stages: usize) -> Vec<Vec<Cell>> {
    if micro_batches == 0 || stages == 0 {
        return Vec::new();
    }
    let tick = |tick: usize| {
        let first = (tick + 1).saturating_sub(micro_batches);
        let last = (tick + 1).min(stages);
        (first..last).map(|stage| Cell { micro_batch: tick - stage, stage }).collect()
    };
    (0..micro_batches + stages - 1).map(tick).collect()
}

/// The cells of each device, in order of their ticks, given the device of each stage. Devices come in the order of
/// their first stages.
pub fn device_orders(micro_batches: usize, stages: &[Device]) -> Vec<(Device, Vec<Cell>)> {
    let mut orders: Vec<(Device, Vec<Cell>)> = Vec::new();
    for cell in clock_cycles(micro_batches, stages.len()).into_iter().flatten() {
        let device = stages[cell.stage];
        match orders.iter_mut().find(|(known, _)| *known == device) {
            Some((_, cells)) => cells.push(cell),
            None => orders.push((device, vec![cell])),
        }
    }
    orders
}

/// A pass of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Its forward pass.
    Forward,
    /// Its forward pass once more, for the values that backward needs.
    Recompute,
    /// Its backward pass.
    Backward,
    /// The copy of an activation or a gradient of the micro-batch to the stage.
    Copy,
}

/// A phase of a cell that has ended, by the device's time: a GPU's phase begins and ends when the GPU comes to it, not when the
/// host has queued it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The device that computes; of a copy, the target.
    pub device: Device,
    /// The stage and the micro-batch.
    pub cell: Cell,
    /// The phase.
    pub phase: Phase,
    /// When it began.
    pub begin: Instant,
    /// When it ended.
    pub end: Instant,
}

/// An observer of the phases of cells. It hears of a CPU's phases on the thread that computes them, and of a GPU's on a thread
/// of their own, when the GPU has ended them.
pub type Observer = crate::pipeline::Observer<Span>;

/// Collects spans. Clones share them.
#[derive(Clone, Default)]
pub struct Timeline(Arc<Mutex<Vec<Span>>>);

impl Timeline {
    /// A timeline without spans.
    pub fn new() -> Timeline {
        Timeline::default()
    }

    /// An observer that adds spans to this timeline.
    pub fn observer(&self) -> Observer {
        let spans = self.0.clone();
        Arc::new(move |span| unpoisoned(spans.lock()).push(span))
    }

    /// Removes and returns all spans so far, in order of their begin. Waits for GPUs that still compute one.
    pub fn take(&self) -> Vec<Span> {
        await_reports();
        let mut spans = std::mem::take(&mut *unpoisoned(self.0.lock()));
        spans.sort_by_key(|span| (span.begin, span.end));
        spans
    }
}

/// The share of the time from the first begin to the last end in which devices are idle, on average over the devices. For m
/// micro-batches over n stages of equal cost it is `(n - 1) / (m + n - 1)`.
/// Source: GPipe (arXiv:1811.06965), section 2.3.
pub fn bubble(spans: &[Span]) -> f64 {
    let computing: Vec<&Span> = spans.iter().filter(|span| span.phase != Phase::Copy).collect();
    let devices = computing.iter().map(|span| span.device).collect::<BTreeSet<_>>().len();
    let (begin, end) = (computing.iter().map(|s| s.begin).min(), computing.iter().map(|s| s.end).max());
    let (Some(begin), Some(end)) = (begin, end) else { return 0.0 };
    let busy: Duration = computing.iter().map(|span| span.end - span.begin).sum();
    1.0 - busy.as_secs_f64() / ((end - begin).as_secs_f64() * devices as f64).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(micro_batches: usize, stages: usize) -> Vec<Vec<(usize, usize)>> {
        let pair = |c: Cell| (c.micro_batch, c.stage);
        let cycles = clock_cycles(micro_batches, stages);
        cycles.into_iter().map(|tick| tick.into_iter().map(pair).collect()).collect()
    }

    #[test]
    fn ticks_are_the_diagonals() {
        assert_eq!(pairs(1, 1), [[(0, 0)]]);
        assert_eq!(pairs(1, 3), [[(0, 0)], [(0, 1)], [(0, 2)]]);
        assert_eq!(pairs(3, 1), [[(0, 0)], [(1, 0)], [(2, 0)]]);
        let wanted = vec![
            vec![(0, 0)],
            vec![(1, 0), (0, 1)],
            vec![(2, 0), (1, 1), (0, 2)],
            vec![(2, 1), (1, 2)],
            vec![(2, 2)],
        ];
        assert_eq!(pairs(3, 3), wanted);
        assert_eq!(pairs(4, 2).len(), 5);
        assert!(pairs(0, 3).is_empty() && pairs(3, 0).is_empty());
    }

    #[test]
    fn a_device_takes_its_cells_tick_by_tick() {
        let [a, b] = [Device::Cpu(0), Device::Cpu(1)];
        let cells = |order: &[Cell]| order.iter().map(|c| (c.micro_batch, c.stage)).collect::<Vec<_>>();
        let orders = device_orders(3, &[a, b]);
        assert_eq!(orders.iter().map(|o| o.0).collect::<Vec<_>>(), [a, b]);
        assert_eq!(cells(&orders[0].1), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(cells(&orders[1].1), [(0, 1), (1, 1), (2, 1)]);
        let one = device_orders(3, &[a, a]);
        assert_eq!(cells(&one[0].1), [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]);
        let back = device_orders(2, &[a, b, a]);
        assert_eq!(cells(&back[0].1), [(0, 0), (1, 0), (0, 2), (1, 2)]);
    }

    #[test]
    fn the_bubble_of_equal_cells_is_that_of_the_formula() {
        let start = Instant::now();
        for (m, n) in [(4, 2), (8, 4), (1, 3), (5, 1)] {
            let mut spans = Vec::new();
            for (tick, cells) in (0..).zip(clock_cycles(m, n)) {
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
