//! Which source pixel a kernel element meets at each point of the output, along one axis.

use std::ops::Range;

/// Output pixel `out_start + i * out_step`, for `i` below `count`, is made of source pixels
/// `i * step + tap.offset`; those outside the source count as zero.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) count: usize,
    pub(super) step: usize,
    pub(super) taps: Vec<Tap>,
    pub(super) out_start: usize,
    pub(super) out_step: usize,
}

/// A kernel element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tap {
    pub(super) kernel: usize,
    pub(super) offset: isize,
}

/// A convolution's axis: every output is made of all kernel elements. A single point needs no step, however large.
pub(super) fn direct(count: usize, kernel: usize, stride: usize, padding: usize, dilation: usize) -> Axis {
    let tap = |k: usize| Tap { kernel: k, offset: (k * dilation) as isize - padding as isize };
    let step = if count > 1 { stride } else { 1 };
    Axis { count, step, taps: (0..kernel).map(tap).collect(), out_start: 0, out_step: 1 }
}

/// A transposed convolution's axes: the output pixels that leave one remainder to the stride are made of the kernel
/// elements that reach them from a source pixel, which are the same for all of them. So it is `stride` convolutions of
/// step 1, each dense.
pub(super) fn transposed(
    size: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
) -> Vec<Axis> {
    // No distance is as large.
    let stride = stride.min(isize::MAX as usize);
    let axis = |start: usize| {
        let tap = |k: usize| {
            let distance = (start + padding) as isize - (k * dilation) as isize;
            let exact = distance.rem_euclid(stride as isize) == 0;
            exact.then(|| Tap { kernel: k, offset: distance.div_euclid(stride as isize) })
        };
        let taps = (0..kernel).filter_map(tap).collect();
        Axis { count: (size - start).div_ceil(stride), step: 1, taps, out_start: start, out_step: stride }
    };
    (0..stride.min(size)).map(axis).collect()
}

impl Axis {
    /// The output pixel of a point.
    pub(super) fn place(&self, point: usize) -> usize {
        self.out_start + point * self.out_step
    }

    /// The kernel elements that meet a pixel of a source of so many at a point, by number, and the pixel.
    pub(super) fn inside(&self, point: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
        let pixel =
            move |tap: &Tap| (point * self.step).checked_add_signed(tap.offset).filter(|&at| at < size);
        self.taps.iter().enumerate().filter_map(move |(nth, tap)| Some((nth, pixel(tap)?)))
    }

    /// The points at which a kernel element meets a pixel of a source of so many.
    pub(super) fn met(&self, tap: &Tap, size: usize) -> Range<usize> {
        let before = |pixels: isize| pixels.max(0).unsigned_abs().div_ceil(self.step).min(self.count);
        before(-tap.offset)..before(size as isize - tap.offset)
    }

    /// The lowest and highest source pixel that `count` points from `start` on meet; any if there are no taps.
    pub(super) fn span(&self, start: usize, count: usize) -> (isize, isize) {
        let offsets = || self.taps.iter().map(|tap| tap.offset);
        let (low, high) = (offsets().min().unwrap_or(0), offsets().max().unwrap_or(0));
        let last = (start + count - 1) * self.step;
        ((start * self.step) as isize + low, last as isize + high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposed_axes_are_the_converse_of_the_direct_one() {
        for (image, kernel, stride, padding, dilation) in
            [(7, 3, 1, 1, 1), (8, 3, 2, 1, 1), (9, 2, 3, 0, 2), (5, 4, 4, 2, 1), (3, 1, 5, 0, 1)]
        {
            let grid = (image + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
            let mut pairs = Vec::new();
            let there = direct(grid, kernel, stride, padding, dilation);
            for i in 0..grid {
                for tap in &there.taps {
                    pairs.push(((i * stride) as isize + tap.offset, i as isize, tap.kernel));
                }
            }
            let mut converse = Vec::new();
            for axis in transposed(image, kernel, stride, padding, dilation) {
                for i in 0..axis.count {
                    let pixel = (axis.out_start + i * axis.out_step) as isize;
                    converse.extend(axis.taps.iter().map(|tap| (pixel, i as isize + tap.offset, tap.kernel)));
                }
            }
            pairs.retain(|p| (0..image as isize).contains(&p.0));
            converse.retain(|p| (0..grid as isize).contains(&p.1));
            pairs.sort_unstable();
            converse.sort_unstable();
            assert_eq!(pairs, converse);
        }
    }
}
