//! Convolutions on a GPU: im2col (`columns.cu`), then matrix products with the weight.
//!
//! As many images at a time as their columns fit into [`COLUMNS_MAX`] elements. A kernel of one element that reads every pixel
//! needs no im2col: the columns are the image.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program};
use phalanx_tensor::{DType, Error, Result, Tensor};

use super::ConvOptions;
use crate::cuda::{File, PRELUDE, type_name};
use crate::gemm::Write;
use crate::ops::cast::cast;
use crate::ops::matmul::{Finish, multiply_on_gpu};
use crate::real::wide_dtype;

const FILES: &[File] = &[PRELUDE, ("columns.cu", include_str!("columns.cu"))];

/// Elements of columns at a time, unless a single image has more.
const COLUMNS_MAX: usize = 1 << 26;

/// `columns.cu`'s structure of this name.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Axis {
    image: i64,
    grid: i64,
    kernel: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
}

/// The options of a convolution, and the sizes of its image, grid and kernel.
pub(super) struct ConvSizes<'a> {
    pub(super) op: &'static str,
    pub(super) options: &'a ConvOptions,
    pub(super) image: [usize; 2],
    pub(super) grid: [usize; 2],
    pub(super) kernel: [usize; 2],
}

impl ConvSizes<'_> {
    /// `out = weight * image + bias`; the image is contiguous, `out` contiguous and has elements.
    pub(super) fn direct(
        &self,
        image: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result<()> {
        let (groups, channels) = (self.options.groups, image.shape()[1]);
        let rows = channels / groups * self.elements();
        let outputs = out.shape()[1] / groups;
        let weight = weight.contiguous()?.view_into(0, &[1, groups, outputs, rows])?;
        if let Some(bias) = bias {
            let bias = bias.view_into(0, &[1, bias.numel(), 1, 1])?;
            *out = bias.broadcast_to(out.shape())?.copy()?;
        }
        let write = if bias.is_some() { Write::Accumulate } else { Write::Store };
        self.for_each_part(image.shape()[0], channels, |first, count| {
            let part = image.narrow(0, first, count)?;
            let columns = if self.is_pointwise() { part } else { self.unfold(&part, false)? };
            let columns = columns.view_into(0, &[count, groups, rows, self.points()])?;
            let weight = weight.broadcast_to(&[count, groups, outputs, rows])?;
            let shape = [count, groups, outputs, self.points()];
            let mut part = out.narrow(0, first, count)?.view_into(0, &shape)?;
            multiply_on_gpu(self.op, &weight, &columns, &mut part, Finish { write, ..Finish::default() })
        })
    }

    /// The transpose of [`ConvSizes::direct`] in the image: `image` is contiguous and has elements.
    pub(super) fn transposed(
        &self,
        grid: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        image: &mut Tensor,
    ) -> Result<()> {
        let (groups, channels) = (self.options.groups, image.shape()[1]);
        let (inputs, rows) = (grid.shape()[1] / groups, channels / groups * self.elements());
        let weight = weight.contiguous()?.view_into(0, &[1, groups, inputs, rows])?.transpose(2, 3)?;
        self.for_each_part(grid.shape()[0], channels, |first, count| {
            let part = grid.narrow(0, first, count)?.view_into(0, &[count, groups, inputs, self.points()])?;
            let weight = weight.broadcast_to(&[count, groups, rows, inputs])?;
            let shape = [count, groups, rows, self.points()];
            let mut columns = Tensor::empty_for("conv2d", &shape, wide_dtype(grid.dtype()), grid.device())?;
            multiply_on_gpu(self.op, &weight, &part, &mut columns, Finish::default())?;
            self.fold(&columns, bias, &mut image.narrow(0, first, count)?)
        })
    }

    /// The gradient of [`ConvSizes::direct`]'s weight; `out` is contiguous and has elements.
    pub(super) fn weight(&self, image: &Tensor, grid: &Tensor, out: &mut Tensor) -> Result<()> {
        let (groups, channels) = (self.options.groups, image.shape()[1]);
        let (rows, outputs) = (channels / groups * self.elements(), grid.shape()[1] / groups);
        let shape = [groups, outputs, rows];
        let mut sums = Tensor::zeros_for("conv2d", &shape, wide_dtype(out.dtype()), out.device())?;
        self.for_each_part(image.shape()[0], channels, |first, count| {
            let points = count * self.points();
            let columns = self.unfold(&image.narrow(0, first, count)?, true)?;
            let columns = columns.view_into(0, &[groups, rows, points])?.transpose(1, 2)?;
            let part = grid.narrow(0, first, count)?;
            let part = part.view_into(0, &[count, groups, outputs, self.points()])?;
            let part = part.permute(&[1, 2, 0, 3])?.contiguous()?.view_into(0, &[groups, outputs, points])?;
            let finish = Finish { write: Write::Accumulate, ..Finish::default() };
            multiply_on_gpu(self.op, &part, &columns, &mut sums, finish)
        })?;
        *out = cast(&sums, out.dtype())?.view_into(0, out.shape())?;
        Ok(())
    }

    /// Kernel elements of a channel.
    fn elements(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Points of the grid.
    fn points(&self) -> usize {
        self.grid.iter().product()
    }

    /// Whether the columns are the image itself.
    fn is_pointwise(&self) -> bool {
        let ConvOptions { stride, padding, .. } = self.options;
        self.kernel == [1, 1] && *stride == [1, 1] && *padding == [0, 0] && self.grid == self.image
    }

    /// Calls `run` for each group of images that are computed together, with the first image and their number.
    fn for_each_part(
        &self,
        images: usize,
        channels: usize,
        mut run: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        let each = channels.saturating_mul(self.elements()).saturating_mul(self.points());
        let count = (COLUMNS_MAX / each.max(1)).max(1);
        (0..images).step_by(count).try_for_each(|first| run(first, count.min(images - first)))
    }

    /// Columns of images, `[image, row, point]`, or `[row, image, point]`.
    fn unfold(&self, image: &Tensor, rows_first: bool) -> Result<Tensor> {
        let (images, rows) = (image.shape()[0], image.shape()[1] * self.elements());
        let shape = if rows_first { [rows, images, self.points()] } else { [images, rows, self.points()] };
        let mut columns = Tensor::empty_for("conv2d", &shape, image.dtype(), image.device())?;
        if columns.numel() == 0 {
            return Ok(columns);
        }
        if self.points() > i32::MAX as usize {
            return Err(Error::shape(self.op, format!("a grid of {:?}", self.grid), "less than 2^31 points"));
        }
        let [outer, inner] = [columns.strides()[0], columns.strides()[1]];
        let (image_step, row_step) = if rows_first { (inner, outer) } else { (outer, inner) };
        let gpu = image.device().gpu()?;
        let args = Args::new(self.op, gpu).write(&mut columns)?.read(image)?;
        let args = args.value(self.axis(0)).value(self.axis(1)).value(images as u64).value(rows as u64);
        let args = args.value(image_step as u64).value(row_step as u64);
        let grid = grid(self.points(), images * rows);
        self.kernel(gpu, image.dtype(), "unfold")?.launch(grid, args)?;
        Ok(columns)
    }

    /// Images of columns `[image, .., point]`.
    fn fold(&self, columns: &Tensor, bias: Option<&Tensor>, image: &mut Tensor) -> Result<()> {
        let (channels, dtype) = (image.shape()[1], image.dtype());
        let (planes, pixels) = (image.shape()[0] * channels, self.image.iter().product());
        let gpu = image.device().gpu()?;
        let args = Args::new(self.op, gpu).write(image)?.read(columns)?.read_if(bias)?;
        let args = args.value(self.axis(0)).value(self.axis(1)).value(channels as u64).value(planes as u64);
        self.kernel(gpu, dtype, "fold")?.launch(grid(pixels, planes), args)
    }

    fn kernel(&self, gpu: &'static Gpu, dtype: DType, entry: &str) -> Result<Kernel> {
        let defines = [("ELEMENT", type_name(dtype))];
        gpu.kernel(self.op, &Program { name: "columns.cu", files: FILES, defines: &defines }, entry)
    }

    fn axis(&self, i: usize) -> Axis {
        let ConvOptions { stride, padding, dilation, .. } = self.options;
        Axis {
            image: self.image[i] as i64,
            grid: self.grid[i] as i64,
            kernel: self.kernel[i] as i64,
            // A single point needs no step, however large.
            stride: if self.grid[i] > 1 { stride[i] as i64 } else { 1 },
            padding: padding[i] as i64,
            dilation: if self.kernel[i] > 1 { dilation[i] as i64 } else { 1 },
        }
    }
}

/// Blocks for rows of `length` elements.
fn grid(length: usize, rows: usize) -> Grid {
    let threads = length.next_power_of_two().clamp(32, 256);
    Grid::new(length.div_ceil(threads), threads as u32).by(rows.min(usize::from(u16::MAX)), 1)
}
