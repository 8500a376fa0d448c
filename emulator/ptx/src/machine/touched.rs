//! What a launch touched in global memory, read off the shadows that look for races.

use crate::Touched;
use crate::memory::Space;

/// Ranges of one allocation that are told; a launch that touches more tells the first ones.
const RANGES_MAX: usize = 64;

impl Space {
    /// What the launch whose records begin at `launch` touched.
    pub(crate) fn touched(&self, launch: u32) -> Vec<Touched> {
        let of_one = |allocation: &crate::memory::Allocation| {
            let (start, bytes) = (allocation.start, allocation.bytes);
            let ranges = allocation.contents.shadow.touched(launch).take(RANGES_MAX);
            let touched = move |(range, written): (std::ops::Range<usize>, bool)| Touched {
                start: start + range.start as u64,
                end: start + (range.end as u64).min(bytes),
                written,
            };
            ranges.map(touched).collect::<Vec<_>>()
        };
        self.allocations().flat_map(of_one).collect()
    }
}
