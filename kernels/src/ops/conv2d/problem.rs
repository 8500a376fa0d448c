//! What a CPU is to compute: a convolution ([`Correlation`]) or the gradient of a weight ([`WeightGrad`]); and how their outputs are split into
//! the parts that threads take ([`OutputSplit`], [`Band`]). `mod.rs` makes them, `cpu.rs` and `weight_gradient.rs` carry them out.

use std::ops::Range;

use phalanx_tensor::{Element, Tensor};

use super::window::Axis;
use crate::gemm::GemmElem;
use crate::scratch::Scratch;
use crate::simd::Float;

/// Points of a product that fill panels of B well.
pub(super) const POINTS_MIN: usize = 512;
/// Elements of a window of a weight's gradient at most, unless a channel has more: it stays in the L2 cache, beside a band's gradients.
pub(super) const WEIGHT_WINDOW_MAX: usize = 1 << 16;

/// The type of a product's sums: f32 or f64.
pub(crate) trait Summed: Float + Element + Scratch + GemmElem<Acc = Self> {}

impl Summed for f32 {}
impl Summed for f64 {}

/// A convolution, plain or transposed. The source is contiguous, `[images, groups * channels_in, h, w]`.
pub(super) struct Correlation<'a> {
    pub(super) op: &'static str,
    pub(super) source: &'a Tensor,
    pub(super) weight: &'a Tensor,
    /// The weight's strides by group, output channel, input channel, row and column.
    pub(super) weight_strides: [usize; 5],
    pub(super) bias: Option<&'a Tensor>,
    /// The passes over the output, each with the axes of its rows and columns: one of a plain convolution; of a transposed one a pass for each
    /// remainder of the output's pixels to the stride.
    pub(super) passes: Vec<[Axis; 2]>,
    pub(super) groups: usize,
    /// Channels of one group.
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
}

/// The part of the output that a task computes.
pub(super) struct OutputPart {
    pub(super) images: Range<usize>,
    pub(super) channels: Range<usize>,
}

/// The gradient of a weight, of contiguous `image` `[n, groups * channels_in, h, w]` and `grid` `[n, groups * channels_out, ..]`.
pub(super) struct WeightGrad<'a> {
    pub(super) op: &'static str,
    pub(super) image: &'a Tensor,
    pub(super) grid: &'a Tensor,
    pub(super) axes: [Axis; 2],
    pub(super) groups: usize,
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
}

/// Points that are summed in one chain: some rows of points of some images. The shapes alone decide.
pub(super) struct Band {
    pub(super) images: Range<usize>,
    pub(super) rows: Range<usize>,
}

/// Multiplications below which starting threads costs more than it brings.
const PARALLEL_WORK_MIN: usize = 1 << 19;
/// With fewer output channels a thread would spend more time on gathering pixels than on products.
const CHANNELS_MIN: usize = 16;

/// The output split into chunks, each of some images, or of some channels of one image.
pub(super) struct OutputSplit {
    /// Elements in a chunk.
    pub(super) chunk: usize,
    /// Output channels of a *unit*: they are computed together and are all in one group.
    pub(super) unit: usize,
    images: usize,
    all_images: usize,
    /// Channels in a chunk.
    channels: usize,
    all_channels: usize,
}

impl OutputSplit {
    /// For an output of `shape`, so many multiplications in all, and so many threads.
    pub(super) fn new(
        [images, channels, height, width]: [usize; 4],
        groups: usize,
        work: usize,
        threads: usize,
    ) -> OutputSplit {
        let (plane, group) = (height * width, channels / groups);
        let split = |images_here: usize, channels_here: usize| OutputSplit {
            chunk: images_here * channels_here * plane,
            unit: channels_here.min(group),
            images: images_here,
            all_images: images,
            channels: channels_here,
            all_channels: channels,
        };
        if threads == 1 || work < PARALLEL_WORK_MIN {
            return split(images, channels);
        }
        if images >= 2 * threads {
            let filled = POINTS_MIN.div_ceil(plane).min(images.div_ceil(threads));
            // As many chunks for each thread.
            let chunks = images.div_ceil(filled.max(images / (4 * threads))).next_multiple_of(threads);
            return split(images.div_ceil(chunks), channels);
        }
        let enough = |parts: &usize| images * groups * parts >= threads || group / parts < 2 * CHANNELS_MIN;
        let parts = (1..=group).filter(|parts| group.is_multiple_of(*parts)).find(enough);
        split(1, group / parts.unwrap_or(1))
    }

    /// The images and channels of chunk `i`.
    pub(super) fn part(&self, i: usize) -> OutputPart {
        let blocks = self.all_channels / self.channels;
        let (image, channel) = (i / blocks * self.images, i % blocks * self.channels);
        let images = image..self.all_images.min(image + self.images);
        OutputPart { images, channels: channel..channel + self.channels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_output_once_and_units_stay_inside_groups() {
        for (shape, groups) in
            [([16, 64, 56, 56], 1), ([1, 64, 56, 56], 1), ([1, 6, 9, 9], 3), ([300, 8, 2, 2], 2)]
        {
            for (work, threads) in [(0, 8), (1 << 30, 1), (1 << 30, 2), (1 << 30, 32)] {
                let split = OutputSplit::new(shape, groups, work, threads);
                let total: usize = shape.iter().product();
                let mut covered = 0;
                for i in 0..total.div_ceil(split.chunk) {
                    let part = split.part(i);
                    assert!(part.channels.len().is_multiple_of(split.unit));
                    assert!((shape[1] / groups).is_multiple_of(split.unit));
                    let start = (part.images.start * shape[1] + part.channels.start) * shape[2] * shape[3];
                    assert_eq!(start, covered);
                    covered += part.images.len() * part.channels.len() * shape[2] * shape[3];
                }
                assert_eq!(covered, total);
            }
        }
    }
}
