//! [`TapRange`]: the steps (output positions) at which one kernel element reads inside the input, along one dimension.
//!
//! ```text
//!  input of 5 places, stride 2, padding 1, kernel element 0:   step    0   1   2
//!                                                              place  -1   1   3      inside at steps 1 and 2:
//!                                                                                     first 1, count 2, start 1
//! ```
//!
//! Convolutions (`conv2d`, `conv3d`), `fold` and max pooling leave out by it what lies outside the input.

use std::ops::Range;

/// The steps at which one kernel element lies inside a dimension, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TapRange {
    /// The first such step.
    pub first: usize,
    /// How many there are.
    pub count: usize,
    /// The place of the first such step.
    pub start: usize,
}

impl TapRange {
    /// For `steps` steps of `stride` places from place `offset` on, in a dimension of `size` places. Sizes and offsets are
    /// below 2^63.
    pub fn new(offset: isize, stride: usize, steps: usize, size: usize) -> TapRange {
        let first = offset.min(0).unsigned_abs().div_ceil(stride);
        // Below the stride if steps were left out at the beginning.
        let start = first.checked_mul(stride).and_then(|n| n.checked_add_signed(offset)).unwrap_or(size);
        let inside = size.saturating_sub(start).div_ceil(stride);
        let count = inside.min(steps.saturating_sub(first));
        match count {
            0 => TapRange { first: 0, count: 0, start: 0 },
            _ => TapRange { first, count, start },
        }
    }

    /// For element `nth` of a kernel.
    pub fn of_kernel(
        nth: usize,
        [stride, padding, dilation]: [usize; 3],
        steps: usize,
        size: usize,
    ) -> TapRange {
        TapRange::new((nth * dilation) as isize - padding as isize, stride, steps, size)
    }

    /// The steps.
    pub fn steps(&self) -> Range<usize> {
        self.first..self.first + self.count
    }

    /// One past the last place: the end of a strided slice from `start` on.
    pub fn end(&self, stride: usize) -> usize {
        if self.count == 0 { self.start } else { self.start + (self.count - 1) * stride + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::TapRange;

    #[test]
    fn touches_what_plain_counting_says() {
        for (offset, stride, steps, size) in (-5..4).flat_map(|o| {
            (1..4).flat_map(move |s| (0..5).flat_map(move |n| (0..6).map(move |z| (o, s, n, z))))
        }) {
            let tap = TapRange::new(offset, stride, steps, size);
            let place = |step: usize| offset + (step * stride) as isize;
            let inside: Vec<usize> = (0..steps).filter(|&i| (0..size as isize).contains(&place(i))).collect();
            let wanted = match inside.first() {
                Some(&first) => TapRange { first, count: inside.len(), start: place(first) as usize },
                None => TapRange { first: 0, count: 0, start: 0 },
            };
            assert_eq!(tap, wanted, "{offset} {stride} {steps} {size}");
        }
    }
}
