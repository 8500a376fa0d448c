//! How a convolution's output is shared among threads. Nothing here changes a bit of it.

use super::unit::{POINTS_MIN, Part};

/// Multiplications below which starting threads costs more than it brings.
const PARALLEL_WORK_MIN: usize = 1 << 19;
/// Output channels that are worth gathering what they are made of.
const CHANNELS_MIN: usize = 16;

/// The output in chunks, each of some images, or of some channels of one image.
pub(super) struct Cut {
    /// Elements in a chunk.
    pub(super) chunk: usize,
    /// Output channels that are computed together, all in one group.
    pub(super) unit: usize,
    images: usize,
    all_images: usize,
    /// Channels in a chunk.
    channels: usize,
    all_channels: usize,
}

impl Cut {
    /// For an output of `shape`, so many multiplications in all, and so many threads.
    pub(super) fn new(
        [images, channels, height, width]: [usize; 4],
        groups: usize,
        work: usize,
        threads: usize,
    ) -> Cut {
        let (plane, group) = (height * width, channels / groups);
        let cut = |images_here: usize, channels_here: usize| Cut {
            chunk: images_here * channels_here * plane,
            unit: channels_here.min(group),
            images: images_here,
            all_images: images,
            channels: channels_here,
            all_channels: channels,
        };
        if threads == 1 || work < PARALLEL_WORK_MIN {
            return cut(images, channels);
        }
        if images >= 2 * threads {
            let filled = POINTS_MIN.div_ceil(plane).min(images.div_ceil(threads));
            // As many chunks for each thread.
            let chunks = images.div_ceil(filled.max(images / (4 * threads))).next_multiple_of(threads);
            return cut(images.div_ceil(chunks), channels);
        }
        let enough = |parts: &usize| images * groups * parts >= threads || group / parts < 2 * CHANNELS_MIN;
        let parts = (1..=group).filter(|parts| group.is_multiple_of(*parts)).find(enough);
        cut(1, group / parts.unwrap_or(1))
    }

    /// What chunk `i` holds.
    pub(super) fn part(&self, i: usize) -> Part {
        let blocks = self.all_channels / self.channels;
        let (image, channel) = (i / blocks * self.images, i % blocks * self.channels);
        let images = image..self.all_images.min(image + self.images);
        Part { images, channels: channel..channel + self.channels }
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
                let cut = Cut::new(shape, groups, work, threads);
                let total: usize = shape.iter().product();
                let mut covered = 0;
                for i in 0..total.div_ceil(cut.chunk) {
                    let part = cut.part(i);
                    assert!(part.channels.len().is_multiple_of(cut.unit));
                    assert!((shape[1] / groups).is_multiple_of(cut.unit));
                    let start = (part.images.start * shape[1] + part.channels.start) * shape[2] * shape[3];
                    assert_eq!(start, covered);
                    covered += part.images.len() * part.channels.len() * shape[2] * shape[3];
                }
                assert_eq!(covered, total);
            }
        }
    }
}
