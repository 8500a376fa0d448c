//! The windows of images as columns (`unfold`, im2col), and columns added up to images (`fold`, col2im).
//!
//! Derivative: each is the other's transpose. Nothing is saved.

use phalanx_kernels::{self as kernels, ConvOptions};

use super::composed::batched;
use super::linear_map::record_linear;
use crate::{Result, Var, begins};

/// How the windows of [`Var::unfold`] and [`Var::fold`] lie on an image, along height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldOptions {
    /// Pixels of a window.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: [usize; 2],
    /// Pixels from one of a window's pixels to the next.
    pub dilation: [usize; 2],
}

impl FoldOptions {
    /// Windows one pixel apart, without padding or dilation.
    pub fn new(kernel: [usize; 2]) -> FoldOptions {
        FoldOptions { kernel, stride: [1; 2], padding: [0; 2], dilation: [1; 2] }
    }

    fn conv(&self) -> ConvOptions {
        let FoldOptions { stride, padding, dilation, .. } = *self;
        ConvOptions { stride, padding, dilation, groups: 1 }
    }
}

impl Var {
    /// The windows of `[n, channels, h, w]` (or of one image without `n`) as columns: `[n, channels * kh * kw, windows]`,
    /// PyTorch's `functional.unfold`.
    ///
    /// # Errors
    /// If there are other dimensions, the window exceeds the padded image, or a number that must be positive is 0.
    pub fn unfold(&self, options: &FoldOptions) -> Result<Var> {
        batched("unfold", self, 4, |x| columns("unfold", x, *options))
    }

    /// `[n, channels * kh * kw, windows]` (or without `n`) added up to images of `size`, `[n, channels, ..size]`: the
    /// transpose of [`Var::unfold`], and PyTorch's `functional.fold`.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or the shape is not that of the windows of such images.
    pub fn fold(&self, size: [usize; 2], options: &FoldOptions) -> Result<Var> {
        batched("fold", self, 3, |x| images("fold", x, size, *options))
    }
}

fn columns(op: &'static str, x: &Var, options: FoldOptions) -> Result<Var> {
    begins();
    let y = kernels::unfold(x.tensor(), options.kernel, &options.conv())?;
    let size = [x.shape()[2], x.shape()[3]];
    record_linear(op, x, y, move |dy| images(op, dy, size, options))
}

fn images(op: &'static str, x: &Var, size: [usize; 2], options: FoldOptions) -> Result<Var> {
    begins();
    let y = kernels::fold(x.tensor(), size, options.kernel, &options.conv())?;
    record_linear(op, x, y, move |dy| columns(op, dy, options))
}

#[cfg(test)]
mod tests {
    use super::FoldOptions;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let wide =
            FoldOptions { stride: [2, 1], padding: [1, 2], dilation: [1, 2], ..FoldOptions::new([2, 3]) };
        check_twice(&[&[2, 2, 5, 4]], |v| v[0].tanh()?.unfold(&wide));
        check_twice(&[&[2, 5, 4]], |v| v[0].tanh()?.unfold(&wide));
        check_twice(&[&[2, 6, 6]], |v| v[0].tanh()?.fold([4, 3], &FoldOptions::new([3, 1])));
        check_twice(&[&[12, 12]], |v| v[0].tanh()?.fold([5, 4], &wide));
    }
}
