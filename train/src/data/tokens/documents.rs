//! Where the documents of an index begin: a sparse list in memory, the rest in the file.

use std::ops::Range;

use super::index::Index;
use crate::Result;

/// One document in so many is kept in memory.
const STRIDE: u64 = 256;

/// The first tokens of documents 0, 256, 512, ..
#[derive(Debug)]
pub(super) struct Documents(Vec<u64>);

impl Documents {
    pub(super) fn new(index: &Index) -> Result<Documents> {
        let kept = (0..index.documents()).step_by(STRIDE as usize);
        Ok(Documents(kept.map(|number| index.document_start(number)).collect::<Result<_>>()?))
    }

    /// The places in `range` at which a document with tokens begins.
    pub(super) fn starts(&self, index: &Index, range: Range<u64>) -> Result<Vec<u64>> {
        let mut starts = Vec::new();
        for number in self.first_from(index, range.start)?..index.documents() {
            let start = index.document_start(number)?;
            if start >= range.end {
                break;
            }
            // A document without tokens begins where the next does.
            if starts.last() != Some(&start) {
                starts.push(start);
            }
        }
        Ok(starts)
    }

    /// The first document that begins at `place` or later.
    fn first_from(&self, index: &Index, place: u64) -> Result<u64> {
        let kept = self.0.partition_point(|&start| start < place) as u64;
        // The one kept before it begins earlier, so the search is among those between.
        let (mut low, mut high) = ((kept.max(1) - 1) * STRIDE, (kept * STRIDE).min(index.documents()));
        while low < high {
            let middle = low + (high - low) / 2;
            match index.document_start(middle)? < place {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Ok(low)
    }
}
