//! [`ConvOptions`]: stride, padding, dilation and groups of a convolution, and the output sizes that follow.

use phalanx_tensor::{Error, Result};

/// Stride, padding and dilation along height and width, and the number of channel groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvOptions {
    /// Image pixels from one grid point to the next.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: [usize; 2],
    /// Image pixels from one kernel element to the next.
    pub dilation: [usize; 2],
    /// Channels are cut into so many groups that see nothing of each other.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        ConvOptions { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

impl ConvOptions {
    /// How many places a kernel has on an image: `(image + 2 padding - dilation (kernel - 1) - 1) / stride + 1`.
    ///
    /// # Errors
    /// If the kernel exceeds the padded image, a number that must be positive is 0, or one is too large.
    pub fn size(&self, op: &'static str, image: [usize; 2], kernel: [usize; 2]) -> Result<[usize; 2]> {
        self.steps().size(op, image, kernel)
    }

    /// The size of the image that a transposed convolution makes of a grid:
    /// `(grid - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1`.
    ///
    /// # Errors
    /// If that is not positive, the output padding is not below the stride or the dilation, a number that must be
    /// positive is 0, or one is too large.
    pub fn transposed_size(
        &self,
        op: &'static str,
        grid: [usize; 2],
        kernel: [usize; 2],
        output_padding: [usize; 2],
    ) -> Result<[usize; 2]> {
        self.steps().transposed_size(op, grid, kernel, output_padding)
    }

    fn steps(&self) -> Steps<2> {
        Steps { stride: self.stride, padding: self.padding, dilation: self.dilation }
    }
}

/// Stride, padding and dilation along depth, height and width, and the number of channel groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv3dOptions {
    /// Places of the volume from one grid point to the next.
    pub stride: [usize; 3],
    /// Zeros around the volume.
    pub padding: [usize; 3],
    /// Places of the volume from one kernel element to the next.
    pub dilation: [usize; 3],
    /// Channels are cut into so many groups that see nothing of each other.
    pub groups: usize,
}

impl Default for Conv3dOptions {
    fn default() -> Conv3dOptions {
        Conv3dOptions { stride: [1; 3], padding: [0; 3], dilation: [1; 3], groups: 1 }
    }
}

impl Conv3dOptions {
    /// [`ConvOptions::size`] of a volume.
    ///
    /// # Errors
    /// As [`ConvOptions::size`].
    pub fn size(&self, op: &'static str, volume: [usize; 3], kernel: [usize; 3]) -> Result<[usize; 3]> {
        self.steps().size(op, volume, kernel)
    }

    /// [`ConvOptions::transposed_size`] of a volume.
    ///
    /// # Errors
    /// As [`ConvOptions::transposed_size`].
    pub fn transposed_size(
        &self,
        op: &'static str,
        grid: [usize; 3],
        kernel: [usize; 3],
        output_padding: [usize; 3],
    ) -> Result<[usize; 3]> {
        self.steps().transposed_size(op, grid, kernel, output_padding)
    }

    /// Those along height and width.
    pub(in crate::ops) fn plane(&self) -> ConvOptions {
        let [stride, padding, dilation] =
            [self.stride, self.padding, self.dilation].map(|[_, height, width]| [height, width]);
        ConvOptions { stride, padding, dilation, groups: self.groups }
    }

    fn steps(&self) -> Steps<3> {
        Steps { stride: self.stride, padding: self.padding, dilation: self.dilation }
    }
}

/// How a kernel steps over `N` dimensions.
struct Steps<const N: usize> {
    stride: [usize; N],
    padding: [usize; N],
    dilation: [usize; N],
}

impl<const N: usize> Steps<N> {
    /// [`ConvOptions::size`].
    fn size(&self, op: &'static str, image: [usize; N], kernel: [usize; N]) -> Result<[usize; N]> {
        self.check(op, kernel)?;
        let reach = self.reach(op, kernel)?;
        let mut padded = [0; N];
        for i in 0..N {
            padded[i] = sum(&[Some(image[i]), self.padding[i].checked_mul(2)]).ok_or_else(|| {
                let wanted = "a padded image below 2^63 pixels";
                Error::range(op, format!("padding {:?} of an image of {image:?}", self.padding), wanted)
            })?;
        }
        if (0..N).any(|i| reach[i] > padded[i]) {
            let got = format!("a kernel that reaches over {reach:?} pixels");
            return Err(Error::shape(op, got, format!("one inside the padded image of {padded:?}")));
        }
        Ok(std::array::from_fn(|i| (padded[i] - reach[i]) / self.stride[i] + 1))
    }

    /// [`ConvOptions::transposed_size`].
    fn transposed_size(
        &self,
        op: &'static str,
        grid: [usize; N],
        kernel: [usize; N],
        output_padding: [usize; N],
    ) -> Result<[usize; N]> {
        self.check(op, kernel)?;
        if (0..N).any(|i| output_padding[i] >= self.stride[i].max(self.dilation[i])) {
            let wanted = format!("below the stride {:?} or the dilation {:?}", self.stride, self.dilation);
            return Err(Error::range(op, format!("output padding {output_padding:?}"), wanted));
        }
        let (reach, mut size) = (self.reach(op, kernel)?, [0; N]);
        for i in 0..N {
            let steps = (grid[i].max(1) - 1).checked_mul(self.stride[i]);
            let whole = sum(&[steps, Some(reach[i]), Some(output_padding[i])]).ok_or_else(|| {
                let got = format!("stride {:?}, output padding {output_padding:?} for {grid:?}", self.stride);
                Error::range(op, got, "an output below 2^63 pixels")
            })?;
            size[i] = whole
                .checked_sub(self.padding[i].saturating_mul(2))
                .filter(|&n| n > 0 && grid[i] > 0)
                .ok_or_else(|| {
                    let got =
                        format!("an input of {grid:?}, of which padding {:?} leaves nothing", self.padding);
                    Error::shape(op, got, "an output of at least one pixel")
                })?;
        }
        Ok(size)
    }

    /// Pixels from a kernel's first element to its last, both included.
    fn reach(&self, op: &'static str, kernel: [usize; N]) -> Result<[usize; N]> {
        let mut reach = [0; N];
        for i in 0..N {
            reach[i] = sum(&[self.dilation[i].checked_mul(kernel[i] - 1), Some(1)]).ok_or_else(|| {
                let got = format!("dilation {:?} of a kernel of {kernel:?}", self.dilation);
                Error::range(op, got, "a reach below 2^63 pixels")
            })?;
        }
        Ok(reach)
    }

    fn check(&self, op: &'static str, kernel: [usize; N]) -> Result<()> {
        let parts = [("stride", self.stride), ("dilation", self.dilation), ("kernel", kernel)];
        for (name, part) in parts {
            if part.contains(&0) {
                return Err(Error::range(op, format!("{name} {part:?}"), "at least 1"));
            }
        }
        Ok(())
    }
}

/// The sum, if it and all its parts can be places.
fn sum(parts: &[Option<usize>]) -> Option<usize> {
    let sum = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add((*part)?))?;
    isize::try_from(sum).is_ok().then_some(sum)
}

/// [`ConvOptions`] along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv1dOptions {
    /// Elements from one point to the next.
    pub stride: usize,
    /// Zeros at both ends.
    pub padding: usize,
    /// Elements from one kernel element to the next.
    pub dilation: usize,
    /// Channels are cut into so many groups that see nothing of each other.
    pub groups: usize,
}

impl Default for Conv1dOptions {
    fn default() -> Conv1dOptions {
        Conv1dOptions { stride: 1, padding: 0, dilation: 1, groups: 1 }
    }
}

/// The same for images of height 1.
impl From<Conv1dOptions> for ConvOptions {
    fn from(options: Conv1dOptions) -> ConvOptions {
        let Conv1dOptions { stride, padding, dilation, groups } = options;
        ConvOptions { stride: [1, stride], padding: [0, padding], dilation: [1, dilation], groups }
    }
}
