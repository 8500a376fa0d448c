//! Which rows a step has here, and how they are dealt to workers.

use std::ops::Range;

use super::super::wrong;
use crate::Result;

/// The rows of all steps.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    batch: usize,
    /// Rows that are read here, a batch each.
    pieces: Vec<Range<usize>>,
    /// Samples until the end, if there is one.
    total: Option<u64>,
    /// A run has at most so many rows.
    run_rows: usize,
}

/// Rows that a worker reads in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The piece that they belong to.
    pub(super) piece: usize,
    /// The number of the run in its piece.
    pub(super) place: usize,
    pub(super) rows: Range<usize>,
}

impl Plan {
    /// Steps of `batch` rows; without pieces, the batch is one.
    pub(super) fn new(
        batch: usize,
        pieces: Option<Vec<Range<usize>>>,
        total: Option<u64>,
        workers: usize,
    ) -> Result<Plan> {
        if batch == 0 {
            return Err(wrong("DataLoader", "got batches of 0 rows, wanted at least 1"));
        }
        let pieces = pieces.unwrap_or_else(|| std::iter::once(0..batch).collect());
        if let Some(rows) = pieces.iter().find(|rows| rows.is_empty() || rows.end > batch) {
            let why =
                format!("got the rows {rows:?} as a piece, wanted at least one row of a batch of {batch}");
            return Err(wrong("DataLoader", why));
        }
        let rows: usize = pieces.iter().map(Range::len).sum();
        Ok(Plan { batch, pieces, total, run_rows: rows.div_ceil(workers.max(1)).max(1) })
    }

    /// Steps until the end.
    pub(super) fn steps(&self) -> Option<u64> {
        self.total.map(|total| total.div_ceil(self.batch as u64))
    }

    /// The number of a step's first sample.
    pub(super) fn first_sample(&self, step: u64) -> u64 {
        step * self.batch as u64
    }

    /// The rows of each piece of a step: fewer in the last step, and no empty piece.
    pub(super) fn pieces(&self, step: u64) -> Vec<Range<usize>> {
        let left = self.total.map_or(u64::MAX, |total| total.saturating_sub(self.first_sample(step)));
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let cut = |rows: &Range<usize>| rows.start..rows.end.min(left);
        self.pieces.iter().map(cut).filter(|rows| !rows.is_empty()).collect()
    }

    /// What workers take of these pieces, in the order of the rows.
    pub(super) fn runs(&self, pieces: &[Range<usize>]) -> Vec<Run> {
        let of_piece = |(piece, rows): (usize, &Range<usize>)| {
            let (rows, most) = (rows.clone(), self.run_rows);
            rows.clone().step_by(most).enumerate().map(move |(place, start)| Run {
                piece,
                place,
                rows: start..rows.end.min(start + most),
            })
        };
        pieces.iter().enumerate().flat_map(of_piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(batch: usize, pieces: &[Range<usize>], total: Option<u64>, workers: usize) -> Plan {
        Plan::new(batch, Some(pieces.to_vec()), total, workers).unwrap()
    }

    #[test]
    fn a_step_is_dealt_in_runs_of_equal_size() {
        let runs = |pieces: &[Range<usize>], workers: usize| -> Vec<(usize, usize, Range<usize>)> {
            let runs = plan(8, pieces, None, workers).runs(pieces);
            runs.into_iter().map(|run| (run.piece, run.place, run.rows)).collect()
        };
        let whole = std::slice::from_ref(&(0..8));
        assert_eq!(runs(whole, 1), [(0, 0, 0..8)]);
        assert_eq!(runs(whole, 3), [(0, 0, 0..3), (0, 1, 3..6), (0, 2, 6..8)]);
        assert_eq!(runs(&[2..4, 4..7], 2), [(0, 0, 2..4), (1, 0, 4..7)]);
        assert_eq!(
            runs(&[2..4, 4..7], 9),
            [(0, 0, 2..3), (0, 1, 3..4), (1, 0, 4..5), (1, 1, 5..6), (1, 2, 6..7)]
        );
        assert_eq!(runs(&[], 2), []);
    }

    #[test]
    fn the_last_step_of_an_evaluation_has_what_is_left() {
        let plan = plan(4, &[0..2, 2..4], Some(9), 1);
        assert_eq!(plan.steps(), Some(3));
        assert_eq!(plan.pieces(1), [0..2, 2..4]);
        assert_eq!(plan.pieces(2), std::slice::from_ref(&(0..1)));
        assert!(plan.pieces(7).is_empty());
        assert_eq!(plan.first_sample(2), 8);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let error =
            |batch, rows: Range<usize>| Plan::new(batch, Some(vec![rows]), None, 1).unwrap_err().to_string();
        assert_eq!(error(0, 0..1), "DataLoader: got batches of 0 rows, wanted at least 1");
        for rows in [2..5, 1..1, 0..usize::MAX] {
            assert!(error(4, rows.clone()).contains(&format!("got the rows {rows:?} as a piece")));
        }
        assert_eq!(Plan::new(3, None, None, 1).unwrap().pieces(5).len(), 1);
    }
}
