//! The windows of a mean along one axis.

use std::ops::Range;

use phalanx_tensor::{Error, Result};

use super::PoolOptions;

/// Windows along one axis of an image: the pixels of each, and by how many it divides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    pub(super) image: usize,
    pub(super) count: usize,
    pub(super) rule: Rule,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    Fixed { kernel: usize, stride: usize, padding: usize, count_padding: bool },
    Adaptive,
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
            let (kernel, stride, padding) = (options.kernel[i], options.stride[i], options.padding[i]);
            let rule = Rule::Fixed { kernel, stride, padding, count_padding };
            Windows { image: image[i], count: counts[i], rule }
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
        let axis = |i: usize| Windows { image: image[i], count: size[i], rule: Rule::Adaptive };
        Ok([axis(0), axis(1)])
    }

    /// The pixels and the divisor of each. As long as a side of the pooled images, so made once these have their memory.
    pub(super) fn spans(&self, op: &'static str) -> Result<Vec<(Range<usize>, usize)>> {
        let mut spans = Vec::new();
        let room = spans.try_reserve_exact(self.count);
        room.map_err(|_| Error::range(op, format!("{} windows", self.count), "a table that fits in memory"))?;
        spans.extend((0..self.count).map(|at| self.span(at)));
        Ok(spans)
    }

    pub(super) fn span(&self, at: usize) -> (Range<usize>, usize) {
        match self.rule {
            Rule::Fixed { kernel, stride, padding, count_padding } => {
                let start = at * stride;
                let end = start.saturating_add(kernel).min(self.image + 2 * padding);
                let inside = |x: usize| x.saturating_sub(padding).min(self.image);
                let pixels = inside(start)..inside(end);
                let divisor = if count_padding { end - start } else { pixels.len() };
                (pixels, divisor)
            }
            Rule::Adaptive => {
                let pixels = at * self.image / self.count..((at + 1) * self.image).div_ceil(self.count);
                (pixels.clone(), pixels.len())
            }
        }
    }
}
