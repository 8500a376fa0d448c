//! Convolutions of images `[n, channels, h, w]`: plain, transposed, and the gradient of their weight.
//!
//! The three contract the same tensors: `image`, `weight` and `grid`. The *grid* has a *point* for each position of
//! the kernel on the image: it is the output of [`conv2d`] and the input of [`conv_transpose2d`]. The contraction is
//! `sum over grid points and kernel elements of image[point * stride - padding + element * dilation] *
//! weight[element] * grid[point]`; each function is its derivative by one of the three tensors.
//!
//! ```text
//! mod ── as_linear                      a kernel as large as the image: a linear layer
//!  │
//!  ├── cuda                             on a GPU: im2col and matrix products
//!  │
//!  ├── cpu                              plain and transposed: chooses among
//!  │    ├── implicit_gemm               weights times pixels: packed_weights, gather
//!  │    ├── batch_last                  small planes: a tile's columns are images
//!  │    ├── thin                        few output channels: direct sums from a space-to-depth layout
//!  │    └── depthwise                   depthwise, small planes or strides: a SIMD lane is a channel
//!  │
//!  └── weight_gradient                  the gradient of the weight: chooses among
//!       ├── itself, batch_last          products of images and gradients
//!       ├── thin_weight_gradient        few output channels
//!       └── depthwise                   depthwise, small planes
//! problem, window                       what is computed, and the index arithmetic that all use
//! ```
//!
//! As implicit GEMM, C = A B has a row for each output channel, a column for each point of the output, and a step of k for each input channel
//! and kernel element:
//!
//! ```text
//!                points                      A  weights, packed once
//!            +-----------+                   B  pixel under kernel element (ky, kx) of channel c at a point: read in the image
//!   c,ky,kx  |     B     |                      itself where rows allow, else in a window (a padded copy of some rows)
//!            +-----------+
//!  +-------+ +-----------+
//!  |   A   | |     C     | output channels
//!  +-------+ +-----------+
//! ```

mod as_linear;
mod batch_last;
mod cpu;
mod cuda;
mod depthwise;
mod gather;
mod implicit_gemm;
mod options;
mod packed_weights;
mod problem;
#[cfg(test)]
mod tests;
mod thin;
mod thin_weight_gradient;
mod weight_gradient;
mod window;

pub use options::{Conv1dOptions, Conv3dOptions, ConvOptions};

use phalanx_tensor::{Error, Result, Tensor};

use crate::dispatch::{Kernels, by_device};
use crate::real::for_real;
use crate::{check, flops};

/// The convolution of `image` `[n, in, h, w]` with `weight` `[out, in / groups, kh, kw]`, plus `bias` `[out]`, at a grid
/// of `size` points ([`ConvOptions::size`]): `[n, out, ..size]`.
///
/// # Errors
/// If the shapes do not fit, the dtype is no floating-point one, or dtypes or devices differ.
pub fn conv2d(
    image: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvOptions,
    size: [usize; 2],
) -> Result<Tensor> {
    const OP: &str = "conv2d";
    let args = ConvArgs::new(OP, image, weight, options)?;
    let [outputs, inputs, kh, kw] = dims(OP, "a weight", weight)?;
    args.channels("in / groups", args.channels_source, inputs)?;
    args.divides("output channels", outputs)?;
    let axis = |i: usize, kernel| {
        window::direct(size[i], kernel, options.stride[i], options.padding[i], options.dilation[i])
    };
    if as_linear::covers_image(options, args.size(), size, [kh, kw]) {
        return as_linear::direct(&args, weight, bias);
    }
    flops::count_multiply_adds([image.shape()[0], outputs, size[0], size[1], inputs, kh, kw]);
    let strides = weight.strides();
    let sizes = args.sizes(args.size(), size, [kh, kw]);
    let on_gpu = |bias: Option<&Tensor>, out: &mut Tensor| sizes.direct(&args.source, weight, bias, out);
    args.run(bias, outputs, size, on_gpu, || {
        let group_stride = outputs / options.groups * strides[0];
        let weight_strides = [group_stride, strides[0], strides[1], strides[2], strides[3]];
        (vec![[axis(0, kh), axis(1, kw)]], weight_strides)
    })
}

/// The transpose of [`conv2d`] in its image: `grid` `[n, in, h, w]` with `weight` `[in, out / groups, kh, kw]`, plus
/// `bias` `[out]`, spread over an image of `size` pixels ([`ConvOptions::transposed_size`]): `[n, out, ..size]`.
///
/// # Errors
/// As [`conv2d`].
pub fn conv_transpose2d(
    grid: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvOptions,
    size: [usize; 2],
) -> Result<Tensor> {
    const OP: &str = "conv_transpose2d";
    let args = ConvArgs::new(OP, grid, weight, options)?;
    let [inputs, outputs, kh, kw] = dims(OP, "a weight", weight)?;
    args.channels("in", args.channels_source * options.groups, inputs)?;
    let axes = |i: usize, kernel| {
        window::transposed(size[i], kernel, options.stride[i], options.padding[i], options.dilation[i])
    };
    if as_linear::covers_image(options, size, args.size(), [kh, kw]) {
        return as_linear::transposed(&args, weight, bias);
    }
    flops::count_multiply_adds([grid.numel(), outputs, kh, kw]);
    let strides = weight.strides();
    let sizes = args.sizes(size, args.size(), [kh, kw]);
    let on_gpu = |bias: Option<&Tensor>, out: &mut Tensor| sizes.transposed(&args.source, weight, bias, out);
    args.run(bias, outputs.saturating_mul(options.groups), size, on_gpu, || {
        let group_stride = inputs / options.groups * strides[0];
        let weight_strides = [group_stride, strides[1], strides[0], strides[2], strides[3]];
        let pairs = |rows: window::Axis| axes(1, kw).into_iter().map(move |cols| [rows.clone(), cols]);
        (axes(0, kh).into_iter().flat_map(pairs).collect(), weight_strides)
    })
}

/// The gradient of [`conv2d`]'s weight, for the gradient `grid` of its result: `[out, in / groups, ..kernel]`.
///
/// # Errors
/// As [`conv2d`].
pub fn conv2d_weight(
    image: &Tensor,
    grid: &Tensor,
    options: &ConvOptions,
    kernel: [usize; 2],
) -> Result<Tensor> {
    const OP: &str = "conv2d_weight";
    let args = ConvArgs::new(OP, image, grid, options)?;
    let [images, outputs, gh, gw] = dims(OP, "a grid", grid)?;
    if images != image.shape()[0] {
        let got = format!("{} images and {images} grids", image.shape()[0]);
        return Err(Error::shape(OP, got, "as many of both"));
    }
    args.divides("output channels", outputs)?;
    let shape = [outputs, args.channels_source, kernel[0], kernel[1]];
    if as_linear::covers_image(options, args.size(), [gh, gw], kernel) {
        return as_linear::weight(&args, grid);
    }
    flops::count_multiply_adds([grid.numel(), args.channels_source, kernel[0], kernel[1]]);
    let grid = grid.contiguous()?;
    let mut out = Tensor::empty_for(OP, &shape, image.dtype(), image.device())?;
    WEIGHT.run(out.device(), |weight| weight(&args, &grid, kernel, &mut out))?;
    Ok(out)
}

const WEIGHT: Kernels<Weight> = Kernels { cpu: weight_on_cpu, cuda: weight_on_gpu };

type Weight = fn(&ConvArgs<'_>, &Tensor, [usize; 2], &mut Tensor) -> Result<()>;

/// The sizes of a tensor of four dimensions.
fn dims(op: &'static str, what: &str, tensor: &Tensor) -> Result<[usize; 4]> {
    <[usize; 4]>::try_from(tensor.shape())
        .map_err(|_| Error::shape(op, format!("{what} of shape {:?}", tensor.shape()), "one of 4 dimensions"))
}

/// The checked arguments that the three functions have in common. `source` is the tensor of images or the grid that comes first.
struct ConvArgs<'a> {
    op: &'static str,
    /// The first argument, contiguous.
    source: Tensor,
    other: &'a Tensor,
    options: &'a ConvOptions,
    /// Channels of a group of the source.
    channels_source: usize,
}

impl<'a> ConvArgs<'a> {
    fn new(
        op: &'static str,
        source: &Tensor,
        other: &'a Tensor,
        options: &'a ConvOptions,
    ) -> Result<ConvArgs<'a>> {
        check::float(op, source)?;
        check::same(op, &[source, other])?;
        let [_, channels, _, _] = dims(op, "an input", source)?;
        let numbers = [options.stride, options.dilation, [options.groups; 2]];
        if numbers.iter().any(|n| n.contains(&0)) {
            return Err(Error::range(
                op,
                format!("{options:?}"),
                "a stride, dilation and groups of at least 1",
            ));
        }
        let source = source.contiguous()?;
        let args = ConvArgs { op, source, other, options, channels_source: channels / options.groups };
        args.divides("input channels", channels)?;
        Ok(args)
    }

    fn divides(&self, what: &str, channels: usize) -> Result<()> {
        if channels.is_multiple_of(self.options.groups) {
            return Ok(());
        }
        let got = format!("{channels} {what}");
        Err(Error::shape(self.op, got, format!("a multiple of the {} groups", self.options.groups)))
    }

    fn channels(&self, what: &str, source: usize, weight: usize) -> Result<()> {
        if source == weight {
            return Ok(());
        }
        let got = format!(
            "an input of shape {:?} and a weight of shape {:?}",
            self.source.shape(),
            self.other.shape()
        );
        let wanted = format!("a weight with {what} = {source} for {} groups", self.options.groups);
        Err(Error::shape(self.op, got, wanted))
    }

    /// The bias, checked and contiguous.
    fn bias(&self, bias: Option<&Tensor>, channels: usize) -> Result<Option<Tensor>> {
        let Some(bias) = bias else { return Ok(None) };
        check::same(self.op, &[&self.source, bias])?;
        check::shape(self.op, "a bias", bias, &[channels])?;
        bias.contiguous().map(Some)
    }

    /// Rows and columns of the source.
    fn size(&self) -> [usize; 2] {
        [self.source.shape()[2], self.source.shape()[3]]
    }

    fn sizes(&self, image: [usize; 2], grid: [usize; 2], kernel: [usize; 2]) -> cuda::ConvSizes<'a> {
        cuda::ConvSizes { op: self.op, options: self.options, image, grid, kernel }
    }

    /// A result of `channels` channels and `size` pixels: computed by `on_gpu`, or on a CPU by the passes and the strides of the weight that
    /// `plan` gives.
    fn run(
        &self,
        bias: Option<&Tensor>,
        channels: usize,
        size: [usize; 2],
        on_gpu: impl FnOnce(Option<&Tensor>, &mut Tensor) -> Result<()>,
        plan: impl FnOnce() -> (Vec<[window::Axis; 2]>, [usize; 5]),
    ) -> Result<Tensor> {
        let bias = self.bias(bias, channels)?;
        let shape = [self.source.shape()[0], channels, size[0], size[1]];
        let mut out = Tensor::empty_for(self.op, &shape, self.source.dtype(), self.source.device())?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let on_cpu = |out: &mut Tensor| {
            let (passes, weight_strides) = plan();
            let problem = problem::Correlation {
                op: self.op,
                source: &self.source,
                weight: self.other,
                weight_strides,
                bias: bias.as_ref(),
                passes,
                groups: self.options.groups,
                channels_in: self.channels_source,
                channels_out: channels / self.options.groups,
            };
            for_real!(self.op, out.dtype(), T => problem.run::<T>(out))
        };
        by_device(&mut out, on_cpu, |out| on_gpu(bias.as_ref(), out))?;
        Ok(out)
    }
}

fn weight_on_cpu(args: &ConvArgs<'_>, grid: &Tensor, kernel: [usize; 2], out: &mut Tensor) -> Result<()> {
    let (options, [_, outputs, height, width]) = (args.options, dims(args.op, "a grid", grid)?);
    let axis = |i: usize, count| {
        window::direct(count, kernel[i], options.stride[i], options.padding[i], options.dilation[i])
    };
    let problem = problem::WeightGrad {
        op: args.op,
        image: &args.source,
        grid,
        axes: [axis(0, height), axis(1, width)],
        groups: options.groups,
        channels_in: args.channels_source,
        channels_out: outputs / options.groups,
    };
    for_real!(args.op, out.dtype(), T => problem.run::<T>(out))
}

fn weight_on_gpu(args: &ConvArgs<'_>, grid: &Tensor, kernel: [usize; 2], out: &mut Tensor) -> Result<()> {
    if out.numel() == 0 {
        return Ok(());
    }
    let [_, _, height, width] = dims(args.op, "a grid", grid)?;
    args.sizes(args.size(), [height, width], kernel).weight(&args.source, grid, out)
}
