//! The windows of a mean along one axis.

use std::ops::Range;

use phalanx_tensor::{Error, Result};

use super::PoolOptions;

/// Windows along one axis of an image: the pixels of each, and by how many it divides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    pub(super) image: usize,
    pub(super) spans: Vec<(Range<usize>, usize)>,
}

impl Windows {
    /// The windows of rows and of columns that `options` describe. With `count_padding` a window divides by its zeros
    /// too, though not by what a last window has beyond the margin.
    ///
    /// # Errors
    /// As [`PoolOptions::size`]; if there is a dilation.
    pub fn fixed(
        op: &'static str,
        image: [usize; 2],
        options: &PoolOptions,
        count_padding: bool,
    ) -> Result<[Windows; 2]> {
        if options.dilation != [1; 2] {
            return Err(Error::range(op, format!("dilation {:?}", options.dilation), "[1, 1]"));
        }
        let counts = options.size(op, image)?;
        let axis = |i: usize| {
            let padding = options.padding[i];
            let span = |at: usize| {
                let (start, end) = (at * options.stride[i], at * options.stride[i] + options.kernel[i]);
                let end = end.min(image[i] + 2 * padding);
                let inside = |x: usize| x.saturating_sub(padding).min(image[i]);
                let pixels = inside(start)..inside(end);
                let divisor = if count_padding { end - start } else { pixels.len() };
                (pixels, divisor)
            };
            Windows { image: image[i], spans: (0..counts[i]).map(span).collect() }
        };
        Ok([axis(0), axis(1)])
    }

    /// `size` windows of rows and of columns that cover the image: window i holds the pixels from
    /// `floor(i image / size)` to `ceil((i + 1) image / size)`.
    ///
    /// # Errors
    /// If there is a window and no pixel.
    pub fn adaptive(op: &'static str, image: [usize; 2], size: [usize; 2]) -> Result<[Windows; 2]> {
        if (0..2).any(|i| image[i] == 0 && size[i] > 0) {
            return Err(Error::shape(op, format!("an image of {image:?}"), "one of at least one pixel"));
        }
        let axis = |i: usize| {
            let span = |at: usize| {
                let pixels = at * image[i] / size[i]..((at + 1) * image[i]).div_ceil(size[i]);
                (pixels.clone(), pixels.len())
            };
            Windows { image: image[i], spans: (0..size[i]).map(span).collect() }
        };
        Ok([axis(0), axis(1)])
    }
}
