//! Pooling of images.

use phalanx_autograd::Var;
use phalanx_kernels::PoolOptions;

use crate::{Entry, Module, Parameters, Result};

/// The largest element of each window: `[N, C, H, W]` to `[N, C, H', W']`, the sizes as [`PoolOptions`] say. Padding is
/// never the largest; NaN wins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxPool2d(pub PoolOptions);

/// The mean of each window: `[N, C, H, W]` to `[N, C, H', W']`, the sizes as [`PoolOptions`] say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AvgPool2d {
    /// The windows.
    pub options: PoolOptions,
    /// Whether padding counts as zeros.
    pub count_include_pad: bool,
}

/// The means of windows that make an image of this size, `[N, C, H, W]` to `[N, C, size[0], size[1]]`: window i of n
/// covers rows `i H / n` to `ceil((i + 1) H / n)`, as in PyTorch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveAvgPool2d(pub [usize; 2]);

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
}
