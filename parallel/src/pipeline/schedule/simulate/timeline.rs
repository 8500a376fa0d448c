//! [`Timeline`]: what was done when.

use super::super::Action;

/// A computation and its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// What was computed.
    pub action: Action,
    /// When it began, in the unit of the costs.
    pub begin: f64,
    /// When it ended.
    pub end: f64,
}

/// What every rank computed when.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The computations of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
    /// The most activations that each rank held at once, in the unit of the costs.
    pub peak_activations: Vec<f64>,
}

impl Timeline {
    /// From the beginning to the last end of any rank.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().flatten().fold(0.0, |last, span| last.max(span.end))
    }

    /// How long a rank computes.
    pub fn work(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|span| span.end - span.begin).sum()
    }

    /// From a rank's first beginning to its last end.
    pub fn span(&self, rank: usize) -> f64 {
        let spans = &self.ranks[rank];
        spans.first().zip(spans.last()).map_or(0.0, |(first, last)| last.end - first.begin)
    }

    /// The share of a step in which ranks do not compute, if every rank's step lasts from the beginning to the last end of any: the
    /// optimizer waits for all stages.
    pub fn bubble_by_makespan(&self) -> f64 {
        self.bubble(self.makespan())
    }

    /// The share of a step in which ranks do not compute, if a rank's step lasts from its own first beginning to its own last end,
    /// and the longest counts: each stage's optimizer waits for that stage alone, and the next step follows at once.
    pub fn bubble_by_span(&self) -> f64 {
        self.bubble((0..self.ranks.len()).map(|rank| self.span(rank)).fold(0.0, f64::max))
    }

    fn bubble(&self, step: f64) -> f64 {
        let work: f64 = (0..self.ranks.len()).map(|rank| self.work(rank)).sum();
        if step > 0.0 { 1.0 - work / (step * self.ranks.len() as f64) } else { 0.0 }
    }

    /// The most activations that any rank holds at once.
    pub fn peak_activation(&self) -> f64 {
        self.peak_activations.iter().fold(0.0, |most, &peak| most.max(peak))
    }
}
