//! Pooling: images reduced window by window, `[channels, h, w]` or `[n, channels, h, w]`.
//!
//! ```text
//! max     max_pool2d: values and places        max_kernels   its SIMD kernels
//! pick    max_pick2d, max_unpool2d: pixels at given places, and the transpose (the gradient)
//! mean    mean_pool2d, mean_unpool2d           cuda          launches of pool.cu
//! ```

mod cuda;
mod max;
mod max_kernels;
mod mean;
mod pick;

use std::ops::Range;

use phalanx_tensor::{Dims, Error, Result, Tensor};

pub use max::max_pool2d;
pub use mean::{mean_pool2d, mean_unpool2d};
pub use pick::{max_pick2d, max_unpool2d};

/// Elements of a row or plane that a thread works on at least.
const PIECE: usize = 8192;

/// The last two sizes of a tensor of images.
fn image(op: &'static str, x: &Tensor) -> Result<[usize; 2]> {
    match x.shape() {
        [_, h, w] | [_, _, h, w] => Ok([*h, *w]),
        other => Err(Error::shape(op, format!("{other:?}"), "[channels, h, w] or [n, channels, h, w]")),
    }
}

/// The shape with other images.
fn resized(shape: &[usize], size: [usize; 2]) -> Dims {
    let mut shape = Dims::from_slice(shape);
    let rank = shape.len();
    shape[rank - 2..].copy_from_slice(&size);
    shape
}

/// Whole rows (or planes) of so many elements that make a piece of work.
fn piece(len: usize) -> usize {
    PIECE.div_ceil(len.max(1)) * len.max(1)
}

/// Sizes along height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Pixels of a window.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: [usize; 2],
    /// Margin around the image: minus infinity for a maximum, zeros for a mean.
    pub padding: [usize; 2],
    /// Pixels from one of a window's pixels to the next.
    pub dilation: [usize; 2],
    /// Whether a last window that does not fit is kept, if it begins inside the image or its left margin.
    pub ceil_mode: bool,
}

impl PoolOptions {
    /// Windows side by side.
    pub fn new(kernel: [usize; 2]) -> PoolOptions {
        PoolOptions { kernel, stride: kernel, padding: [0; 2], dilation: [1; 2], ceil_mode: false }
    }

    /// How many windows there are on an image.
    ///
    /// # Errors
    /// If the window exceeds the padded image, the padding half the window, a number that must be positive is 0, or
    /// one is too large.
    pub fn size(&self, op: &'static str, image: [usize; 2]) -> Result<[usize; 2]> {
        let mut size = [0; 2];
        for (i, size) in size.iter_mut().enumerate() {
            *size = self.count(op, i, image[i])?;
        }
        Ok(size)
    }

    fn count(&self, op: &'static str, i: usize, image: usize) -> Result<usize> {
        let (kernel, stride, padding, dilation) =
            (self.kernel[i], self.stride[i], self.padding[i], self.dilation[i]);
        if kernel == 0 || stride == 0 || dilation == 0 {
            return Err(Error::range(op, format!("{self:?}"), "a kernel, stride and dilation of at least 1"));
        }
        let reach = dilation.checked_mul(kernel - 1).filter(|&n| n < isize::MAX as usize);
        let reach = 1 + reach.ok_or_else(|| {
            let got = format!("dilation {dilation} of a kernel of {kernel}");
            Error::range(op, got, "a reach below 2^63 pixels")
        })?;
        if padding > reach / 2 {
            let wanted = format!("at most half of the {reach} pixels that a window reaches over");
            return Err(Error::range(op, format!("padding {padding}"), wanted));
        }
        let slack = if self.ceil_mode { stride - 1 } else { 0 };
        // The image and both margins are below 2^63 each.
        let padded = image + 2 * padding;
        let room =
            padded.saturating_add(slack).checked_sub(reach).filter(|_| image > 0).ok_or_else(|| {
                let got = format!("a window that reaches over {reach} pixels");
                Error::shape(op, got, format!("one inside the padded image of {padded}"))
            })?;
        let count = room / stride + 1;
        let beyond = self.ceil_mode && (count - 1) * stride >= image + padding;
        Ok(if beyond { count - 1 } else { count })
    }
}

/// Windows along one axis of an image: the pixels of each, and by how many it divides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    image: usize,
    count: usize,
    rule: Rule,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
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
    fn spans(&self, op: &'static str) -> Result<Vec<(Range<usize>, usize)>> {
        let mut spans = Vec::new();
        let room = spans.try_reserve_exact(self.count);
        room.map_err(|_| Error::range(op, format!("{} windows", self.count), "a table that fits in memory"))?;
        spans.extend((0..self.count).map(|at| self.span(at)));
        Ok(spans)
    }

    fn span(&self, at: usize) -> (Range<usize>, usize) {
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
