//! The largest pixel of each window: where it is, what it is, and the transpose.

use std::ops::Range;

use phalanx_tensor::{DType, Error, Result, Tensor};

use super::{PoolOptions, cuda, image, piece, resized};
use crate::check;
use crate::real::{Real, for_real};
use crate::simd::Float;

/// The largest pixel of each window, and its place in its image's plane (i32): the first of equal ones, the first NaN
/// if there is one. A window without pixels gives minus infinity and -1.
///
/// # Errors
/// If the windows do not fit the images, or the dtype is no floating-point one.
pub fn max_pool2d(x: &Tensor, options: &PoolOptions) -> Result<(Tensor, Tensor)> {
    const OP: &str = "max_pool2d";
    check::float(OP, x)?;
    let size = image(OP, x)?;
    if size.iter().product::<usize>() > i32::MAX as usize {
        return Err(Error::shape(OP, format!("images of {size:?}"), "less than 2^31 pixels"));
    }
    let x = x.contiguous()?;
    let shape = resized(x.shape(), options.size(OP, size)?);
    let mut places = Tensor::empty_for(OP, &shape, DType::I32, x.device())?;
    if x.device().is_cuda() && places.numel() > 0 {
        cuda::find(OP, &x, options, &mut places)?;
    } else if !x.device().is_meta() && places.numel() > 0 {
        for_real!(OP, x.dtype(), T => find::<T>(OP, &x, options, &mut places))?;
    }
    let values = max_pick2d(&x, &places)?;
    Ok((values, places))
}

/// The pixels at `places`, which are [`max_pool2d`]'s.
///
/// # Errors
/// If the shapes do not belong together, or a place is outside its plane.
pub fn max_pick2d(x: &Tensor, places: &Tensor) -> Result<Tensor> {
    const OP: &str = "max_pick2d";
    let size = paired(OP, x, places)?;
    let (x, places) = (x.contiguous()?, places.contiguous()?);
    let mut out = Tensor::empty_for(OP, places.shape(), x.dtype(), x.device())?;
    if out.device().is_meta() || out.numel() == 0 {
        return Ok(out);
    }
    if out.device().is_cuda() {
        cuda::pick(OP, &x, &places, size, &mut out)?;
        return Ok(out);
    }
    for_real!(OP, x.dtype(), T => pick::<T>(OP, &x, &places, size, &mut out))?;
    Ok(out)
}

/// The transpose of [`max_pick2d`]: for each pixel of images of `size` the sum of `dy` where its place is named.
///
/// # Errors
/// As [`max_pick2d`].
pub fn max_unpool2d(dy: &Tensor, places: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    const OP: &str = "max_unpool2d";
    paired(OP, dy, places)?;
    check::shape(OP, "places", places, dy.shape())?;
    let (dy, places) = (dy.contiguous()?, places.contiguous()?);
    let mut out = Tensor::empty_for(OP, &resized(dy.shape(), size), dy.dtype(), dy.device())?;
    if out.device().is_meta() || out.numel() == 0 {
        return Ok(out);
    }
    if out.device().is_cuda() {
        cuda::unpool(OP, &dy, &places, size, &mut out)?;
        return Ok(out);
    }
    for_real!(OP, dy.dtype(), T => unpool::<T>(OP, &dy, &places, size, &mut out))?;
    Ok(out)
}

/// The image size of `x`, whose planes are as many as those of `places`.
fn paired(op: &'static str, x: &Tensor, places: &Tensor) -> Result<[usize; 2]> {
    check::float(op, x)?;
    check::dtype(op, places, DType::I32)?;
    check::same_device(op, &[x, places])?;
    let size = image(op, x)?;
    check::shape(op, "places", places, &resized(x.shape(), image(op, places)?))?;
    Ok(size)
}

/// For each window along an axis its first pixel's place before the margin was added, and which of its pixels are
/// inside the image.
fn taps(options: &PoolOptions, i: usize, image: usize, count: usize) -> Vec<(isize, Range<usize>)> {
    let dilation = options.dilation[i];
    let tap = |at: usize| {
        let start = (at * options.stride[i]) as isize - options.padding[i] as isize;
        let first = start.min(0).unsigned_abs().div_ceil(dilation);
        let end = ((image as isize - start).max(0) as usize).div_ceil(dilation).min(options.kernel[i]);
        (start, first.min(end)..end)
    };
    (0..count).map(tap).collect()
}

fn find<T: Real>(op: &'static str, x: &Tensor, options: &PoolOptions, places: &mut Tensor) -> Result<()> {
    let [height, width] = image(op, x)?;
    let [out_height, out_width] = image(op, places)?;
    let (rows, cols) = (taps(options, 0, height, out_height), taps(options, 1, width, out_width));
    let [row_step, col_step] = options.dilation;
    let (numel, pool) = (places.numel(), places.device().pool()?);
    let source = x.read::<T>(op)?;
    let source = &source[x.offset()..][..x.numel()];
    let chunk = piece(out_width);
    pool.for_each_chunk(&mut places.write::<i32>(op)?[..numel], chunk, |i, places| {
        for (j, places) in places.chunks_exact_mut(out_width).enumerate() {
            let row = i * (chunk / out_width) + j;
            let plane = &source[row / out_height * height * width..][..height * width];
            let (top, inside) = &rows[row % out_height];
            for (place, (left, across)) in places.iter_mut().zip(&cols) {
                let (mut best, mut found) = (-T::Wide::INFINITY, -1);
                for y in inside.clone() {
                    let row = (top + (y * row_step) as isize) as usize * width;
                    for x in across.clone() {
                        let at = row + (left + (x * col_step) as isize) as usize;
                        let value = plane[at].widen();
                        if found < 0 || value > best || (value.is_nan() && !best.is_nan()) {
                            (best, found) = (value, at as i32);
                        }
                    }
                }
                *place = found;
            }
        }
    });
    Ok(())
}

fn pick<T: Real>(
    op: &'static str,
    x: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    let [height, width] = image(op, places)?;
    let (plane, outputs) = (size[0] * size[1], height * width);
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let (source, from) = (x.read::<T>(op)?, places.read::<i32>(op)?);
    let (source, from) = (&source[x.offset()..][..x.numel()], &from[places.offset()..][..numel]);
    let chunk = piece(outputs);
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        for (j, out) in out.chunks_exact_mut(outputs).enumerate() {
            let image = i * (chunk / outputs) + j;
            let source = &source[image * plane..][..plane];
            for (to, &place) in out.iter_mut().zip(&from[image * outputs..]) {
                let pixel = usize::try_from(place).ok().and_then(|place| source.get(place).copied());
                *to = pixel.unwrap_or_else(|| T::narrow(-T::Wide::INFINITY));
            }
        }
    });
    Ok(())
}

fn unpool<T: Real>(
    op: &'static str,
    dy: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    let [height, width] = image(op, dy)?;
    let (plane, outputs) = (size[0] * size[1], height * width);
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let (source, to) = (dy.read::<T>(op)?, places.read::<i32>(op)?);
    let (source, to) = (&source[dy.offset()..][..dy.numel()], &to[places.offset()..][..dy.numel()]);
    let chunk = piece(plane);
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        let mut sums = vec![T::Wide::ZERO; plane];
        for (j, out) in out.chunks_exact_mut(plane).enumerate() {
            let start = (i * (chunk / plane) + j) * outputs;
            sums.fill(T::Wide::ZERO);
            for (dy, &place) in source[start..start + outputs].iter().zip(&to[start..]) {
                if let Some(sum) = usize::try_from(place).ok().and_then(|place| sums.get_mut(place)) {
                    *sum += dy.widen();
                }
            }
            out.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = T::narrow(sum));
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FLOATS, floats, make, values};

    #[test]
    fn finds_the_first_largest_pixel_and_sends_gradients_there() {
        for (kernel, stride, padding, dilation) in [
            ([2, 2], [2, 2], [0, 0], [1, 1]),
            ([3, 3], [2, 1], [1, 1], [1, 1]),
            ([2, 3], [1, 2], [1, 1], [2, 2]),
        ] {
            for (ceil_mode, dtype) in [false, true].into_iter().flat_map(|c| FLOATS.map(|d| (c, d))) {
                let options = PoolOptions { kernel, stride, padding, dilation, ceil_mode };
                let x = make(&[2, 3, 7, 9], dtype, &|i| (floats(-9.0, 9.0)(i)).round());
                let (y, places) = max_pool2d(&x, &options).unwrap();
                let [h, w] = options.size("max_pool2d", [7, 9]).unwrap();
                let (xs, ys, places_found) = (values(&x), values(&y), places.to_vec::<i32>().unwrap());
                for i in 0..ys.len() {
                    let (plane, row, col) = (i / (h * w), i / w % h, i % w);
                    let mut best = (f64::NEG_INFINITY, -1);
                    for (a, b) in (0..kernel[0]).flat_map(|a| (0..kernel[1]).map(move |b| (a, b))) {
                        let r =
                            (row * stride[0] + a * dilation[0]).checked_sub(padding[0]).filter(|&r| r < 7);
                        let c =
                            (col * stride[1] + b * dilation[1]).checked_sub(padding[1]).filter(|&c| c < 9);
                        if let (Some(r), Some(c)) = (r, c)
                            && xs[plane * 63 + r * 9 + c] > best.0
                        {
                            best = (xs[plane * 63 + r * 9 + c], (r * 9 + c) as i32);
                        }
                    }
                    assert_eq!((ys[i], places_found[i]), best, "{options:?}");
                }
                let ones = make(y.shape(), dtype, &|_| 1.0);
                let dx = values(&max_unpool2d(&ones, &places, [7, 9]).unwrap());
                assert_eq!(dx.iter().sum::<f64>(), places_found.iter().filter(|&&p| p >= 0).count() as f64);
            }
        }
    }

    #[test]
    fn nan_wins_and_minus_infinity_has_a_place() {
        let x = make(&[1, 1, 4], DType::F32, &|i| [1.0, f64::NAN, f64::NEG_INFINITY, f64::NEG_INFINITY][i]);
        let (y, places) = max_pool2d(&x, &PoolOptions::new([1, 2])).unwrap();
        let y = values(&y);
        assert!(y[0].is_nan() && y[1] == f64::NEG_INFINITY);
        assert_eq!(places.to_vec::<i32>().unwrap(), [1, 2]);
    }

    #[test]
    fn a_stride_beyond_the_image_makes_one_window() {
        for ceil_mode in [false, true] {
            let options = PoolOptions { stride: [usize::MAX; 2], ceil_mode, ..PoolOptions::new([2, 2]) };
            assert_eq!(options.size("max_pool2d", [3, 3]).unwrap(), [1, 1]);
        }
    }

    #[test]
    fn windows_that_do_not_fit_are_refused_by_name() {
        let x = make(&[1, 3, 3], DType::F32, &|i| i as f64);
        for options in [
            PoolOptions::new([4, 1]),
            PoolOptions { padding: [2, 0], ..PoolOptions::new([2, 2]) },
            PoolOptions { stride: [0, 1], ..PoolOptions::new([2, 2]) },
            PoolOptions { dilation: [1 << 63, 1], ..PoolOptions::new([3, 1]) },
            PoolOptions { dilation: [2, 1], ..PoolOptions::new([(1 << 63) + 1, 1]) },
            PoolOptions::new([(1 << 63) + 1, 1]),
        ] {
            let message = max_pool2d(&x, &options).unwrap_err().to_string();
            assert!(message.contains("max_pool2d"), "{message}");
        }
        assert!(max_pool2d(&make(&[3, 3], DType::F32, &|i| i as f64), &PoolOptions::new([1, 1])).is_err());
    }
}
