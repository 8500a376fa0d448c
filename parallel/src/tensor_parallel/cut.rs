//! [`Cut`]: which part of a size each rank has. Pure.

use std::ops::Range;

use phalanx_nn::{Error, Result};

use crate::comm::shares;

/// A dimension cut into parts, one a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// The dimension.
    pub(super) dim: usize,
    /// The parts' sizes.
    pub(super) lengths: Vec<usize>,
}

impl Cut {
    /// `count` along `dim` over `ranks`: parts differ by at most one, the larger first. Nothing is padded.
    pub(super) fn shares(what: &str, dim: usize, count: usize, ranks: usize) -> Result<Cut> {
        if count < ranks {
            let why = format!("got {count} to cut over {ranks} ranks, wanted at least one each");
            return Err(Error::invalid(what, why));
        }
        Ok(Cut { dim, lengths: shares(count, ranks) })
    }

    /// `count` along `dim` in equal parts.
    pub(super) fn even(what: &str, dim: usize, count: usize, ranks: usize) -> Result<Cut> {
        if !count.is_multiple_of(ranks) || count == 0 {
            let why = format!("got {count} to cut over {ranks} ranks, wanted a multiple of {ranks}");
            return Err(Error::invalid(what, why));
        }
        Ok(Cut { dim, lengths: vec![count / ranks; ranks] })
    }

    /// The whole that a part of `length` on every rank makes.
    pub(super) fn of_parts(dim: usize, length: usize, ranks: usize) -> Cut {
        Cut { dim, lengths: vec![length; ranks] }
    }

    /// Where a rank's part lies.
    pub(super) fn range(&self, rank: usize) -> Range<usize> {
        let start = self.lengths[..rank].iter().sum();
        start..start + self.lengths[rank]
    }

    /// The whole's size.
    pub(super) fn whole(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The shape of a rank's part of a tensor of `shape`.
    pub(super) fn shape(&self, shape: &[usize], length: usize) -> Vec<usize> {
        let mut shape = shape.to_vec();
        shape[self.dim] = length;
        shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_differ_by_at_most_one_and_cover_the_whole() {
        let cut = Cut::shares("vocabulary", 0, 256, 3).unwrap();
        assert_eq!(cut.lengths, [86, 85, 85]);
        assert_eq!([cut.range(0), cut.range(1), cut.range(2)], [0..86, 86..171, 171..256]);
        assert_eq!((cut.whole(), cut.shape(&[256, 7], 85)), (256, vec![85, 7]));
        assert_eq!(Cut::even("heads", 1, 6, 3).unwrap().lengths, [2, 2, 2]);
        assert_eq!(Cut::of_parts(1, 4, 2).whole(), 8);
    }

    #[test]
    fn what_cannot_be_cut_is_refused_with_both_numbers() {
        let error = Cut::even("heads", 1, 6, 4).unwrap_err().to_string();
        assert_eq!(error, "heads: got 6 to cut over 4 ranks, wanted a multiple of 4");
        let error = Cut::shares("vocabulary", 0, 2, 3).unwrap_err().to_string();
        assert!(error.contains("vocabulary") && error.contains("2") && error.contains("3 ranks"), "{error}");
    }
}
