//! Pooling of sequences, images and volumes.

use phalanx_autograd::{Pool1dOptions, Pool3dOptions, Var};
use phalanx_kernels::PoolOptions;

use crate::{Entry, Module, Parameters, Result};

/// The largest element of each window: `[N, C, H, W]` to `[N, C, H', W']`, the sizes as [`PoolOptions`] say; of one image
/// `[C, H, W]` the result is one image too. Padding is
/// never the largest; NaN wins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxPool2d(pub PoolOptions);

/// The mean of each window: `[N, C, H, W]` to `[N, C, H', W']`, the sizes as [`PoolOptions`] say; of one image `[C, H, W]` the
/// result is one image too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AvgPool2d {
    /// The windows.
    pub options: PoolOptions,
    /// Whether padding counts as zeros.
    pub count_include_pad: bool,
}

/// The means of windows that make an image of this size, `[N, C, H, W]` to `[N, C, size[0], size[1]]`: window i of n
/// covers rows `i H / n` to `ceil((i + 1) H / n)`, as in PyTorch. Of one image `[C, H, W]` the result is one image too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveAvgPool2d(pub [usize; 2]);

impl MaxPool2d {
    /// Of windows side by side, without padding.
    pub fn new(kernel: [usize; 2]) -> MaxPool2d {
        MaxPool2d(PoolOptions::new(kernel))
    }
}

impl AvgPool2d {
    /// Of windows side by side, without padding.
    pub fn new(kernel: [usize; 2]) -> AvgPool2d {
        AvgPool2d { options: PoolOptions::new(kernel), count_include_pad: true }
    }
}

/// The largest pixels of windows that make an image of this size, those of [`AdaptiveAvgPool2d`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveMaxPool2d(pub [usize; 2]);

/// The largest element of each window: `[N, C, L]` to `[N, C, L']`. Padding is never the largest; NaN wins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxPool1d(pub Pool1dOptions);

/// The mean of each window: `[N, C, L]` to `[N, C, L']`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AvgPool1d {
    /// The windows.
    pub options: Pool1dOptions,
    /// Whether padding counts as zeros.
    pub count_include_pad: bool,
}

/// The means of windows that make a sequence of this length, `[N, C, L]` to `[N, C, length]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveAvgPool1d(pub usize);

/// The largest element of each window: `[N, C, D, H, W]` to `[N, C, D', H', W']`. Padding is never the largest; NaN wins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxPool3d(pub Pool3dOptions);

/// The mean of each window: `[N, C, D, H, W]` to `[N, C, D', H', W']`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AvgPool3d {
    /// The windows.
    pub options: Pool3dOptions,
    /// Whether padding counts as zeros.
    pub count_include_pad: bool,
}

macro_rules! pools {
    ($($pool:ident, |$self:ident, $x:ident| $forward:expr;)*) => {$(
        impl Parameters for $pool {
            fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
        }

        impl Module for $pool {
            fn forward(&$self, $x: &Var) -> Result<Var> {
                Ok($forward?)
            }
        }
    )*};
}

pools! {
    MaxPool2d, |self, x| x.max_pool2d(&self.0);
    AvgPool2d, |self, x| x.avg_pool2d(&self.options, self.count_include_pad);
    AdaptiveAvgPool2d, |self, x| x.adaptive_avg_pool2d(self.0);
    AdaptiveMaxPool2d, |self, x| x.adaptive_max_pool2d(self.0);
    MaxPool1d, |self, x| x.max_pool1d(&self.0);
    AvgPool1d, |self, x| x.avg_pool1d(&self.options, self.count_include_pad);
    AdaptiveAvgPool1d, |self, x| x.adaptive_avg_pool1d(self.0);
    MaxPool3d, |self, x| x.max_pool3d(&self.0);
    AvgPool3d, |self, x| x.avg_pool3d(&self.options, self.count_include_pad);
}
