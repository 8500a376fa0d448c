//! [`mean_pool2d`]: the mean of each window; [`mean_unpool2d`]: its transpose, the gradient.

use phalanx_tensor::{Result, Tensor};

use super::{Windows, cuda, image, piece, resized};
use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch};

/// The sum of each window over its divisor, summed in f64 (a whole image in the type that it is computed in); 0 for a window
/// without pixels.
///
/// # Errors
/// If the windows are another image's, or the dtype is no floating-point one.
pub fn mean_pool2d(x: &Tensor, windows: &[Windows; 2]) -> Result<Tensor> {
    const OP: &str = "mean_pool2d";
    fits(OP, x, [windows[0].image, windows[1].image])?;
    let x = x.contiguous()?;
    let mut out = Tensor::empty_for(OP, &resized(x.shape(), counts(windows)), x.dtype(), x.device())?;
    if out.numel() > 0 {
        MEAN.run(out.device(), |mean| mean(OP, &x, windows, &mut out))?;
    }
    Ok(out)
}

const MEAN: Kernels<Pooled> = Kernels { cpu: mean_on_cpu, cuda: cuda::mean };
const SPREAD: Kernels<Pooled> = Kernels { cpu: spread_on_cpu, cuda: cuda::spread };

type Pooled = fn(&'static str, &Tensor, &[Windows; 2], &mut Tensor) -> Result<()>;

fn mean_on_cpu(op: &'static str, x: &Tensor, windows: &[Windows; 2], out: &mut Tensor) -> Result<()> {
    match divisor(windows) {
        Some(divisor) => for_real!(op, x.dtype(), T => pool_whole::<T>(op, x, divisor, out)),
        None => for_real!(op, x.dtype(), T => pool::<T>(op, x, windows, out)),
    }
}

fn spread_on_cpu(op: &'static str, dy: &Tensor, windows: &[Windows; 2], out: &mut Tensor) -> Result<()> {
    match divisor(windows) {
        Some(divisor) => for_real!(op, dy.dtype(), T => unpool_whole::<T>(op, dy, divisor, out)),
        None => for_real!(op, dy.dtype(), T => unpool::<T>(op, dy, windows, out)),
    }
}

/// The transpose: each pixel's sum of `dy` over its windows, each over its divisor.
///
/// # Errors
/// As [`mean_pool2d`].
pub fn mean_unpool2d(dy: &Tensor, windows: &[Windows; 2]) -> Result<Tensor> {
    const OP: &str = "mean_unpool2d";
    fits(OP, dy, counts(windows))?;
    let dy = dy.contiguous()?;
    let mut out = Tensor::empty_for(
        OP,
        &resized(dy.shape(), windows.each_ref().map(|w| w.image)),
        dy.dtype(),
        dy.device(),
    )?;
    if out.numel() > 0 {
        SPREAD.run(out.device(), |spread| spread(OP, &dy, windows, &mut out))?;
    }
    Ok(out)
}

fn counts(windows: &[Windows; 2]) -> [usize; 2] {
    windows.each_ref().map(|w| w.count)
}

fn fits(op: &'static str, x: &Tensor, wanted: [usize; 2]) -> Result<()> {
    check::float(op, x)?;
    image(op, x)?;
    check::shape(op, "an input", x, &resized(x.shape(), wanted))
}

fn pool<T: Real>(op: &'static str, x: &Tensor, [rows, cols]: &[Windows; 2], out: &mut Tensor) -> Result<()> {
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let source = x.read::<T>(op)?;
    let source = &source[x.offset()..][..x.numel()];
    let (width, count) = (cols.image, cols.count);
    let plane = rows.image * width;
    let (row_spans, col_spans) = (rows.spans(op)?, cols.spans(op)?);
    let chunk = piece(count);
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        let mut sums = vec![0.0; width];
        for (j, out) in out.chunks_exact_mut(count).enumerate() {
            let row = i * (chunk / count) + j;
            let (pixels, divisor) = &row_spans[row % rows.count];
            let image = &source[row / rows.count * plane..][..plane];
            sums.fill(0.0);
            for from in image[pixels.start * width..pixels.end * width].chunks_exact(width) {
                sums.iter_mut().zip(from).for_each(|(sum, x)| *sum += x.widen().to_f64());
            }
            for (to, (pixels, here)) in out.iter_mut().zip(&col_spans) {
                let sum: f64 = sums[pixels.clone()].iter().sum();
                *to = T::narrow(T::Wide::from_f64(sum / (*divisor as f64 * *here as f64).max(1.0)));
            }
        }
    });
    Ok(())
}

fn unpool<T: Real>(
    op: &'static str,
    dy: &Tensor,
    [rows, cols]: &[Windows; 2],
    out: &mut Tensor,
) -> Result<()> {
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let source = dy.read::<T>(op)?;
    let source = &source[dy.offset()..][..dy.numel()];
    let (width, count) = (cols.image, cols.count);
    let (plane, outputs) = (rows.image * width, rows.count * count);
    let (row_spans, col_spans) = (rows.spans(op)?, cols.spans(op)?);
    let chunk = piece(plane);
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        let (mut row_sums, mut sums) = (vec![0.0; width], vec![0.0; plane]);
        for (j, out) in out.chunks_exact_mut(plane).enumerate() {
            let dy = &source[(i * (chunk / plane) + j) * outputs..][..outputs];
            sums.fill(0.0);
            for (y, (pixels, divisor)) in row_spans.iter().enumerate() {
                row_sums.fill(0.0);
                for (dy, (pixels, here)) in dy[y * count..].iter().zip(&col_spans) {
                    let share = dy.widen().to_f64() / (*divisor as f64 * *here as f64).max(1.0);
                    row_sums[pixels.clone()].iter_mut().for_each(|sum| *sum += share);
                }
                for sums in sums[pixels.start * width..pixels.end * width].chunks_exact_mut(width) {
                    sums.iter_mut().zip(&row_sums).for_each(|(sum, x)| *sum += x);
                }
            }
            out.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = T::narrow(T::Wide::from_f64(sum)));
        }
    });
    Ok(())
}

/// Partial sums of a plane: pixel i goes to sum i % SUMS, whatever the instruction set.
const SUMS: usize = 4 * LANES_MAX;

/// The divisor, if there is a single window that holds all pixels.
fn divisor(windows: &[Windows; 2]) -> Option<f64> {
    let of_axis = |axis: &Windows| {
        let (pixels, divisor) = (axis.count == 1).then(|| axis.span(0))?;
        (pixels == (0..axis.image)).then_some(divisor as f64)
    };
    Some(of_axis(&windows[0])? * of_axis(&windows[1])?)
}

/// Each plane's sum over the divisor.
fn pool_whole<T: Real>(op: &'static str, x: &Tensor, divisor: f64, out: &mut Tensor) -> Result<()> {
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let plane = image(op, x)?.iter().product::<usize>();
    let source = x.read::<T>(op)?;
    let source = &source[x.offset()..][..x.numel()];
    let (planes, divisor) = (piece(plane) / plane, T::Wide::from_f64(divisor));
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], planes, |i, out| {
        let source = &source[i * planes * plane..][..out.len() * plane];
        match (T::as_wide(source), T::as_wide_mut(out)) {
            (Some(source), Some(out)) => dispatch(Means { source, divisor, out }),
            _ => with_scratch(source.len() + out.len(), |scratch| {
                let (wide, means) = scratch.split_at_mut(source.len());
                T::widen_all(source, wide);
                dispatch(Means { source: wide, divisor, out: &mut *means });
                T::narrow_all(means, out);
            }),
        }
    });
    Ok(())
}

/// Each pixel's share of its plane's `dy`.
fn unpool_whole<T: Real>(op: &'static str, dy: &Tensor, divisor: f64, out: &mut Tensor) -> Result<()> {
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let plane = image(op, out)?.iter().product::<usize>();
    let source = dy.read::<T>(op)?;
    let source = &source[dy.offset()..][..dy.numel()];
    let (chunk, divisor) = (piece(plane), T::Wide::from_f64(divisor));
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        for (out, dy) in out.chunks_exact_mut(plane).zip(&source[i * (chunk / plane)..]) {
            out.fill(T::narrow(dy.widen() / divisor));
        }
    });
    Ok(())
}

/// The sums of planes, one after the other, over a divisor.
struct Means<'a, V> {
    source: &'a [V],
    divisor: V,
    out: &'a mut [V],
}

impl<V: Float> Kernel for Means<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (plane, lanes) = (self.source.len() / self.out.len(), V::Vec::<S>::LANES);
        for (out, plane) in self.out.iter_mut().zip(self.source.chunks_exact(plane)) {
            let mut sums = [V::Vec::<S>::zero(); SUMS];
            let mut blocks = plane.chunks_exact(SUMS);
            for block in &mut blocks {
                for j in 0..SUMS / lanes {
                    sums[j] = sums[j] + Vector::load(&block[j * lanes..]);
                }
            }
            let rest = blocks.remainder();
            for j in 0..SUMS / lanes {
                let rest = &rest[(j * lanes).min(rest.len())..];
                sums[j] = sums[j]
                    + match rest.len() >= lanes {
                        true => Vector::load(rest),
                        false => Vector::load_partial(rest, V::ZERO),
                    };
            }
            let mut half = SUMS / lanes / 2;
            while half > 0 {
                for j in 0..half {
                    sums[j] = sums[j] + sums[j + half];
                }
                half /= 2;
            }
            *out = sums[0].reduce_sum() / self.divisor;
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::super::PoolOptions;
    use super::*;
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    /// Windows of every kind on images of 7 x 9.
    fn kinds() -> Vec<[Windows; 2]> {
        let mut kinds = Vec::new();
        for (kernel, stride, padding) in
            [([2, 2], [2, 2], [0, 0]), ([3, 4], [2, 1], [1, 2]), ([2, 5], [3, 3], [1, 0])]
        {
            for ceil_mode in [false, true] {
                let options = PoolOptions { stride, padding, ceil_mode, ..PoolOptions::new(kernel) };
                for count_padding in [false, true] {
                    kinds.push(Windows::fixed("avg_pool2d", [7, 9], &options, count_padding).unwrap());
                }
            }
        }
        kinds.extend(
            [[1, 1], [3, 2], [7, 9], [10, 4]]
                .map(|size| Windows::adaptive("adaptive", [7, 9], size).unwrap()),
        );
        kinds
    }

    #[test]
    fn each_output_is_its_windows_mean_and_unpooling_is_the_transpose() {
        for windows in kinds() {
            for dtype in FLOATS {
                let x = make(&[2, 3, 7, 9], dtype, &floats(-1.0, 2.0));
                let y = mean_pool2d(&x, &windows).unwrap();
                let (xs, ys) = (values(&x), values(&y));
                let [h, w] = counts(&windows);
                let dy = make(y.shape(), dtype, &floats(-2.0, 1.0));
                let (dys, mut dx) = (values(&dy), vec![0.0; xs.len()]);
                for (i, &y) in ys.iter().enumerate() {
                    let (plane, row, col) = (i / (h * w), i / w % h, i % w);
                    let ((rows, m), (cols, n)) = (windows[0].span(row), windows[1].span(col));
                    let mut sum = 0.0;
                    for at in rows.clone().flat_map(|r| cols.clone().map(move |c| plane * 63 + r * 9 + c)) {
                        sum += xs[at];
                        dx[at] += dys[i] / (m * n) as f64;
                    }
                    assert_close(y, sum / (m * n) as f64, tolerance(dtype));
                }
                for (got, want) in values(&mean_unpool2d(&dy, &windows).unwrap()).into_iter().zip(dx) {
                    assert_close(got, want, tolerance(dtype));
                }
            }
        }
    }

    #[test]
    fn the_mean_of_a_whole_image_and_its_transpose() {
        for (dtype, size) in
            FLOATS.into_iter().flat_map(|d| [[1, 1], [7, 7], [33, 129], [8, 8]].map(|s| (d, s)))
        {
            let x = make(&[2, 65, size[0], size[1]], dtype, &floats(-1.0, 2.0));
            let windows = Windows::adaptive("adaptive", size, [1, 1]).unwrap();
            let (y, n) = (mean_pool2d(&x, &windows).unwrap(), size[0] * size[1]);
            for (got, plane) in values(&y).into_iter().zip(values(&x).chunks(n)) {
                assert_close(got, plane.iter().sum::<f64>() / n as f64, tolerance(dtype));
            }
            let dx = values(&mean_unpool2d(&y, &windows).unwrap());
            for (plane, dy) in dx.chunks(n).zip(values(&y)) {
                plane.iter().for_each(|&got| assert_close(got, dy / n as f64, tolerance(dtype)));
            }
        }
    }

    #[test]
    fn windows_without_memory_for_their_means_are_refused() {
        let image = make(&[1, 4, 5], DType::F32, &floats(-1.0, 1.0));
        let windows = Windows::adaptive("adaptive_avg_pool2d", [4, 5], [1 << 44, 1]).unwrap();
        assert!(mean_pool2d(&image, &windows).is_err());
    }

    #[test]
    fn a_last_window_beyond_the_image_divides_by_what_lies_inside_the_margin() {
        let options = PoolOptions { stride: [1, 3], ceil_mode: true, ..PoolOptions::new([1, 3]) };
        let windows = Windows::fixed("avg_pool2d", [1, 5], &options, true).unwrap();
        assert_eq!(windows[1].spans("avg_pool2d").unwrap(), [(0..3, 3), (3..5, 2)]);
        let one = make(&[1, 1, 5], DType::F32, &|_| 1.0);
        assert_eq!(values(&mean_pool2d(&one, &windows).unwrap()), [1.0, 1.0]);
        assert!(mean_pool2d(&make(&[1, 1, 4], DType::F32, &|_| 1.0), &windows).is_err());
    }
}
