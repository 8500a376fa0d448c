//! Convolutions of volumes `[n, channels, d, h, w]`, as convolutions of images.
//!
//! The frames that a kernel's planes touch are gathered side by side as channels, `[n d', channels kd, h, w]`, so that
//! one product adds over depth, height, width and channels, and rounds once. The transposed convolution takes the
//! output's frames in classes by their place modulo the stride: those of a class touch the same of the kernel's planes.

use phalanx_tensor::{Error, Result, Tensor};

use super::conv2d::{Conv3dOptions, conv_transpose2d, conv2d, conv2d_weight};
use super::creation::fill_;
use super::in_place::copy_;
use super::tap_range::TapRange;

/// The convolution of `volume` `[n, in, d, h, w]` with `weight` `[out, in / groups, kd, kh, kw]`, plus `bias` `[out]`, at
/// a grid of `size` points ([`Conv3dOptions::size`]): `[n, out, ..size]`.
///
/// # Errors
/// If the shapes do not fit, the dtype is no floating-point one, or dtypes or devices differ.
pub fn conv3d(
    volume: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &Conv3dOptions,
    size: [usize; 3],
) -> Result<Tensor> {
    let [outputs, inputs, kd, kh, kw] = five("conv3d", weight)?;
    let frames = gathered("conv3d", volume, &offsets(options, kd), options.stride[0], size[0])?;
    let weight = weight.with_shape(&[outputs, inputs * kd, kh, kw])?;
    let y = conv2d(&frames, &weight, bias, &options.plane(), [size[1], size[2]])?;
    by_channel(&y, volume.shape()[0], size[0])?.contiguous()
}

/// The gradient of [`conv3d`]'s weight, for the gradient `grid` of its result: `[out, in / groups, ..kernel]`.
///
/// # Errors
/// As [`conv3d`].
pub fn conv3d_weight(
    volume: &Tensor,
    grid: &Tensor,
    options: &Conv3dOptions,
    kernel: [usize; 3],
) -> Result<Tensor> {
    const OP: &str = "conv3d_weight";
    let [_, outputs, steps, _, _] = five(OP, grid)?;
    let frames = gathered(OP, volume, &offsets(options, kernel[0]), options.stride[0], steps)?;
    let weight = conv2d_weight(&frames, &by_frame(grid)?, &options.plane(), [kernel[1], kernel[2]])?;
    let inputs = volume.shape()[1] / options.groups.max(1);
    weight.with_shape(&[outputs, inputs, kernel[0], kernel[1], kernel[2]])
}

/// The transpose of [`conv3d`] in its volume: `grid` `[n, in, d, h, w]` with `weight` `[in, out / groups, kd, kh, kw]`,
/// plus `bias` `[out]`, spread over a volume of `size` ([`Conv3dOptions::transposed_size`]): `[n, out, ..size]`.
///
/// # Errors
/// As [`conv3d`].
pub fn conv_transpose3d(
    grid: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &Conv3dOptions,
    size: [usize; 3],
) -> Result<Tensor> {
    const OP: &str = "conv_transpose3d";
    let ([n, ..], [inputs, outputs, kd, kh, kw]) = (five(OP, grid)?, five(OP, weight)?);
    let channels = outputs.saturating_mul(options.groups);
    let stride = options.stride[0];
    let out = Tensor::empty(&[n, channels, size[0], size[1], size[2]], grid.dtype(), grid.device())?;
    // Plane by plane, its input channels and then its part of the outputs.
    let planes = weight.permute(&[0, 2, 1, 3, 4])?;
    for first in 0..stride.min(size[0]) {
        let steps = (size[0] - first).div_ceil(stride);
        let touching = |&plane: &usize| {
            (first + options.padding[0]).abs_diff(plane * options.dilation[0]).is_multiple_of(stride)
        };
        let touched: Vec<usize> = (0..kd).filter(touching).collect();
        let mut frames_of_class = out.slice(2, first, size[0], stride)?;
        if touched.is_empty() {
            spread_bias(bias, &mut frames_of_class)?;
            continue;
        }
        let source = |&plane: &usize| {
            ((first + options.padding[0]) as isize - (plane * options.dilation[0]) as isize) / stride as isize
        };
        let sources: Vec<isize> = touched.iter().map(source).collect();
        let frames = gathered(OP, grid, &sources, 1, steps)?;
        let weight =
            some_planes(&planes, &touched)?.with_shape(&[inputs * touched.len(), outputs, kh, kw])?;
        let y = conv_transpose2d(&frames, &weight, bias, &options.plane(), [size[1], size[2]])?;
        copy_(&mut frames_of_class, &by_channel(&y, n, steps)?)?;
    }
    Ok(out)
}

/// Where the kernel's planes lie at the first grid point.
fn offsets(options: &Conv3dOptions, kernel: usize) -> Vec<isize> {
    (0..kernel).map(|nth| (nth * options.dilation[0]) as isize - options.padding[0] as isize).collect()
}

/// Of `[n, channels, d, h, w]` the frames at `offset + step * stride`, zeros outside, for each step an image whose channels
/// are each channel at all offsets: `[n steps, channels offsets, h, w]`.
fn gathered(op: &'static str, x: &Tensor, offsets: &[isize], stride: usize, steps: usize) -> Result<Tensor> {
    let [n, channels, depth, height, width] = five(op, x)?;
    let taps: Vec<TapRange> =
        offsets.iter().map(|&offset| TapRange::new(offset, stride, steps, depth)).collect();
    let shape = [n, steps, channels, offsets.len(), height, width];
    let out = match taps.iter().all(|tap| tap.count == steps) {
        true => Tensor::empty(&shape, x.dtype(), x.device())?,
        false => Tensor::zeros(&shape, x.dtype(), x.device())?,
    };
    let frames = x.permute(&[0, 2, 1, 3, 4])?;
    for (nth, tap) in taps.iter().enumerate().filter(|(_, tap)| tap.count > 0) {
        let mut to = out.select(3, nth)?.narrow(1, tap.first, tap.count)?;
        copy_(&mut to, &frames.slice(1, tap.start, tap.end(stride), stride)?)?;
    }
    out.with_shape(&[n * steps, channels * offsets.len(), height, width])
}

/// `[n, channels, d, h, w]` as images `[n d, channels, h, w]`.
fn by_frame(x: &Tensor) -> Result<Tensor> {
    let [n, channels, depth, height, width] = five("conv3d", x)?;
    x.permute(&[0, 2, 1, 3, 4])?.with_shape(&[n * depth, channels, height, width])
}

/// Images `[n d, channels, h, w]` as `[n, channels, d, h, w]`, a view.
fn by_channel(y: &Tensor, n: usize, depth: usize) -> Result<Tensor> {
    let [channels, height, width] = [y.shape()[1], y.shape()[2], y.shape()[3]];
    y.with_shape(&[n, depth, channels, height, width])?.permute(&[0, 2, 1, 3, 4])
}

/// Planes of `[in, kd, out, kh, kw]`, in order; a step between them.
fn some_planes(planes: &Tensor, which: &[usize]) -> Result<Tensor> {
    let (first, step) = match which {
        [first, second, ..] => (*first, second - first),
        [first] => (*first, 1),
        [] => (0, 1),
    };
    let end = which.last().map_or(first, |last| last + 1);
    planes.slice(1, first, end, step)
}

/// What lies out of the kernel's reach: the bias, or zeros.
fn spread_bias(bias: Option<&Tensor>, out: &mut Tensor) -> Result<()> {
    match bias {
        Some(bias) => {
            let bias = bias.with_shape(&[1, bias.numel(), 1, 1, 1])?.broadcast_to(out.shape())?;
            copy_(out, &bias)
        }
        None => fill_(out, 0),
    }
}

/// A tensor's five sizes.
fn five(op: &'static str, x: &Tensor) -> Result<[usize; 5]> {
    <[usize; 5]>::try_from(x.shape())
        .map_err(|_| Error::shape(op, format!("{:?}", x.shape()), "a tensor of 5 dimensions"))
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Tensor};

    use super::{conv_transpose3d, conv3d, conv3d_weight};
    use crate::ops::{Conv3dOptions, mul};
    use crate::testing::{assert_close, make, values};

    fn wave(shape: &[usize], step: f64) -> Tensor {
        make(shape, DType::F64, &|i| (i as f64 * step).sin())
    }

    /// The formula, element by element.
    fn plain(x: &Tensor, w: &Tensor, o: &Conv3dOptions, size: [usize; 3]) -> Vec<f64> {
        let (xs, ws) = (x.shape().to_vec(), w.shape().to_vec());
        let (xv, wv) = (values(x), values(w));
        let mut out = Vec::new();
        for (n, k) in (0..xs[0]).flat_map(|n| (0..ws[0]).map(move |k| (n, k))) {
            let group = k / (ws[0] / o.groups);
            for at in 0..size.iter().product::<usize>() {
                let point = [at / (size[1] * size[2]), at / size[2] % size[1], at % size[2]];
                let mut sum = 0.0;
                for e in 0..ws[1] * ws[2] * ws[3] * ws[4] {
                    let kernel = [e / (ws[3] * ws[4]) % ws[2], e / ws[4] % ws[3], e % ws[4]];
                    let channel = group * ws[1] + e / (ws[2] * ws[3] * ws[4]);
                    let place: Vec<isize> = (0..3)
                        .map(|i| {
                            (point[i] * o.stride[i] + kernel[i] * o.dilation[i]) as isize
                                - o.padding[i] as isize
                        })
                        .collect();
                    if (0..3).all(|i| (0..xs[2 + i] as isize).contains(&place[i])) {
                        let [a, b, c] = [0, 1, 2].map(|i| place[i] as usize);
                        let at = (((n * xs[1] + channel) * xs[2] + a) * xs[3] + b) * xs[4] + c;
                        sum += xv[at] * wv[k * ws[1] * ws[2] * ws[3] * ws[4] + e];
                    }
                }
                out.push(sum);
            }
        }
        out
    }

    #[test]
    fn equals_the_formula_and_its_transposes() {
        let options = [
            Conv3dOptions::default(),
            Conv3dOptions { padding: [2, 0, 1], groups: 2, ..Conv3dOptions::default() },
            Conv3dOptions { stride: [3, 1, 2], padding: [1, 1, 0], dilation: [1, 2, 1], groups: 1 },
            Conv3dOptions { stride: [2, 2, 1], padding: [0, 1, 1], dilation: [3, 1, 1], groups: 2 },
            Conv3dOptions { stride: [4, 1, 1], ..Conv3dOptions::default() },
        ];
        for o in options {
            let (volume, kernel) = ([9, 5, 4], [3, 2, 2]);
            let x = wave(&[2, 4, 9, 5, 4], 0.7);
            let w = wave(&[6, 4 / o.groups, 3, 2, 2], 0.3);
            let size = o.size("test", volume, kernel).unwrap();
            let y = conv3d(&x, &w, None, &o, size).unwrap();
            for (&got, want) in values(&y).iter().zip(plain(&x, &w, &o, size)) {
                assert_close(got, want, 1e-12);
            }
            let dy = wave(y.shape(), 1.3);
            let inner = |a: &Tensor, b: &Tensor| values(&mul(a, b).unwrap()).iter().sum::<f64>();
            let dx = conv_transpose3d(&dy, &w, None, &o, volume).unwrap();
            assert_close(inner(&x, &dx), inner(&y, &dy), 1e-12);
            let dw = conv3d_weight(&x, &dy, &o, kernel).unwrap();
            assert_close(inner(&w, &dw), inner(&y, &dy), 1e-12);
            let bias = wave(&[6], 2.0);
            let shifted = values(&conv3d(&x, &w, Some(&bias), &o, size).unwrap());
            let points = size.iter().product::<usize>();
            for (at, (got, y)) in shifted.into_iter().zip(values(&y)).enumerate() {
                assert_close(got, y + values(&bias)[at / points % 6], 1e-12);
            }
            let back = wave(&[4], 2.0);
            let spread = values(&conv_transpose3d(&dy, &w, Some(&back), &o, volume).unwrap());
            for (at, (got, dx)) in spread.into_iter().zip(values(&dx)).enumerate() {
                assert_close(got, dx + values(&back)[at / (9 * 5 * 4) % 4], 1e-12);
            }
        }
    }
}
