//! How pooling windows lie on an image.

use phalanx_tensor::{Error, Result};

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
