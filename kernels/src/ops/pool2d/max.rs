//! [`max_pool2d`]: the largest pixel of each window, and its place. On a CPU planes are searched in vectors (`max_kernels.rs`); windows without a
//! number above minus infinity are searched again pixel by pixel, for their place.

use std::ops::Range;

use phalanx_tensor::{DType, Error, Result, Tensor};

use super::max_kernels::{DISTANCES, OfChannels, OfPlane};
use super::{PoolOptions, cuda, image, piece, resized};
use crate::check;
use crate::dispatch::Kernels;
use crate::ops::space_to_depth::{PhaseLayout, ReceptiveField, SpaceToDepth};
use crate::ops::tap_range::TapRange;
use crate::real::{Real, for_real};
use crate::scratch::with_scratch;
use crate::simd::{Float, dispatch};

/// Places of a plane's phases at most, unless a row of windows needs more.
const PHASES_MAX: usize = 1 << 13;

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
    let shape = resized(x.shape(), options.size(OP, size)?);
    MAX.on(x.device())(OP, x, options, size, &shape)
}

const MAX: Kernels<Max> = Kernels { cpu: max_on_cpu, cuda: max_on_gpu };

/// For images, their size and the shape of the results, which are values and places.
type Max = fn(&'static str, &Tensor, &PoolOptions, [usize; 2], &[usize]) -> Result<(Tensor, Tensor)>;

fn max_on_cpu(
    op: &'static str,
    x: &Tensor,
    options: &PoolOptions,
    size: [usize; 2],
    shape: &[usize],
) -> Result<(Tensor, Tensor)> {
    if has_channels_last(x) && is_near(options, size) {
        return by_channels(op, x, options, shape);
    }
    let x = x.contiguous()?;
    let mut places = Tensor::empty_for(op, shape, DType::I32, x.device())?;
    let mut values = Tensor::empty_for(op, shape, x.dtype(), x.device())?;
    if !x.device().is_meta() && places.numel() > 0 {
        for_real!(op, x.dtype(), T => find::<T>(op, &x, options, &mut values, &mut places))?;
    }
    Ok((values, places))
}

fn max_on_gpu(
    op: &'static str,
    x: &Tensor,
    options: &PoolOptions,
    _: [usize; 2],
    shape: &[usize],
) -> Result<(Tensor, Tensor)> {
    let x = x.contiguous()?;
    let mut places = Tensor::empty_for(op, shape, DType::I32, x.device())?;
    if places.numel() > 0 {
        cuda::find(op, &x, options, &mut places)?;
    }
    let values = super::max_pick2d(&x, &places)?;
    Ok((values, places))
}

/// Whether a batch of images lies pixel by pixel, the channels of each side by side.
fn has_channels_last(x: &Tensor) -> bool {
    let transposed = x.rank() == 4 && !x.is_contiguous();
    transposed && x.permute(&[0, 2, 3, 1]).is_ok_and(|pixels| pixels.is_contiguous())
}

/// Whether floats hold the distances between a window's pixels, and the margin is no larger than the image.
fn is_near(options: &PoolOptions, size: [usize; 2]) -> bool {
    let PoolOptions { kernel, dilation, padding, .. } = *options;
    let far = [0, 1].map(|i| ((kernel[i] - 1) * dilation[i]) as f64);
    let padded = [0, 1].map(|i| (size[i] + 2 * padding[i]) as f64);
    far[0] * size[1] as f64 + far[1] < DISTANCES as f64
        && padded[0] * padded[1] < (4 * size[0] * size[1] + PHASES_MAX) as f64
}

/// Of images whose channels lie side by side; those of the results do, too.
fn by_channels(
    op: &'static str,
    x: &Tensor,
    options: &PoolOptions,
    shape: &[usize],
) -> Result<(Tensor, Tensor)> {
    let x = x.permute(&[0, 2, 3, 1])?;
    let shape = [shape[0], shape[2], shape[3], shape[1]];
    let mut places = Tensor::empty_for(op, &shape, DType::I32, x.device())?;
    let mut values = Tensor::empty_for(op, &shape, x.dtype(), x.device())?;
    if !x.device().is_meta() && places.numel() > 0 {
        for_real!(op, x.dtype(), T => find_by_channels::<T>(op, &x, options, &mut values, &mut places))?;
    }
    Ok((values.permute(&[0, 3, 1, 2])?, places.permute(&[0, 3, 1, 2])?))
}

/// For each window along an axis its first pixel's place before the margin was added, and which of its pixels are
/// inside the image.
fn taps(options: &PoolOptions, i: usize, image: usize, count: usize) -> Vec<(isize, Range<usize>)> {
    let tap = |at: usize| {
        let start = (at * options.stride[i]) as isize - options.padding[i] as isize;
        (start, TapRange::new(start, options.dilation[i], options.kernel[i], image).steps())
    };
    (0..count).map(tap).collect()
}

/// For each window its largest pixel and that one's place, `[n, channels, h, w]` both.
fn find<T: Real>(
    op: &'static str,
    x: &Tensor,
    options: &PoolOptions,
    values: &mut Tensor,
    places: &mut Tensor,
) -> Result<()> {
    let [size, counts] = [image(op, x)?, image(op, places)?];
    let windows_of_plane = MaxWindows::<T>::new(options, size, counts);
    let (numel, pool) = (places.numel(), places.device().pool()?);
    let source = x.read::<T>(op)?;
    let source = &source[x.offset()..][..x.numel()];
    let (plane, windows) = (size[0] * size[1], counts[0] * counts[1]);
    let (mut values, mut places) = (values.write::<T>(op)?, places.write::<i32>(op)?);
    let chunk = piece(plane) / plane * windows;
    let mut parts: Vec<_> =
        values[..numel].chunks_mut(chunk).zip(places[..numel].chunks_mut(chunk)).collect();
    pool.for_each_chunk(&mut parts, 1, |i, parts| {
        for (values, places) in parts {
            let source = &source[i * (chunk / windows) * plane..];
            let planes = values.chunks_exact_mut(windows).zip(places.chunks_exact_mut(windows));
            for ((values, places), source) in planes.zip(source.chunks_exact(plane)) {
                windows_of_plane.run(source, values, places);
            }
        }
    });
    Ok(())
}

/// The windows of a plane: how their largest pixels are found.
struct MaxWindows<T: Real> {
    size: [usize; 2],
    counts: [usize; 2],
    vectors: Option<Vectors<T::Wide>>,
    rows: Vec<(isize, Range<usize>)>,
    cols: Vec<(isize, Range<usize>)>,
    dilation: [usize; 2],
}

/// What the search in vectors needs; made if [`is_near`].
struct Vectors<V> {
    layout: PhaseLayout,
    /// Rows of windows at a time.
    band: usize,
    taps: Vec<(usize, V)>,
    /// Where the first window begins, and how far the next one is.
    starts: [isize; 2],
    strides: [usize; 2],
}

impl<V: Float> Vectors<V> {
    fn new(options: &PoolOptions, width: usize, counts: [usize; 2]) -> Vectors<V> {
        let PoolOptions { kernel, dilation, .. } = *options;
        let starts = options.padding.map(|padding| -(padding as isize));
        // A single window needs no stride, however large.
        let strides = [0, 1].map(|i| if counts[i] > 1 { options.stride[i] } else { 1 });
        let offset = |i: usize, k: usize| starts[i] + (k * dilation[i]) as isize;
        let reach = |i: usize, count: usize| {
            ReceptiveField::new(strides[i], count, [0, kernel[i] - 1].into_iter().map(move |k| offset(i, k)))
        };
        let layout = |band: usize| PhaseLayout::new([reach(0, band), reach(1, counts[1])]);
        let band = (PHASES_MAX / layout(1).len).clamp(1, counts[0]);
        let layout = layout(band);
        let tap = |y: usize, x: usize| {
            let distance = y * dilation[0] * width + x * dilation[1];
            (layout.place([offset(0, y), offset(1, x)]), V::from_f64(distance as f64))
        };
        let taps = (0..kernel[0]).flat_map(|y| (0..kernel[1]).map(move |x| tap(y, x))).collect();
        Vectors { layout, band, taps, starts, strides }
    }
}

impl<T: Real> MaxWindows<T> {
    fn new(options: &PoolOptions, size: [usize; 2], counts: [usize; 2]) -> MaxWindows<T> {
        let vectors = is_near(options, size).then(|| Vectors::new(options, size[1], counts));
        let [rows, cols] = [0, 1].map(|i| taps(options, i, size[i], counts[i]));
        MaxWindows { size, counts, vectors, rows, cols, dilation: options.dilation }
    }

    fn run(&self, source: &[T], values: &mut [T], places: &mut [i32]) {
        let (width, cols) = (self.size[1], self.counts[1]);
        let Some(Vectors { layout, band, taps, starts, strides }) = &self.vectors else {
            return self.find_each(source, 0, |_| true, values, places);
        };
        let (from, to) = match T::as_wide(&[]) {
            Some(_) => (0, 0),
            None => (layout.rows_max(self.size[0]) * width, band * cols),
        };
        let lens = [layout.len, OfPlane::<T::Wide>::run_len(layout, *band), from];
        with_scratch(lens.iter().sum::<usize>() + to, |scratch| {
            let (plane, scratch) = scratch.split_at_mut(lens[0]);
            let (run, scratch) = scratch.split_at_mut(lens[1]);
            let (from, to) = scratch.split_at_mut(lens[2]);
            let bands = values.chunks_mut(band * cols).zip(places.chunks_mut(band * cols));
            for (i, (values, places)) in bands.enumerate() {
                let first = i * band;
                let rows = layout.rows(first, self.size[0]);
                let here = &source[rows.start * width..rows.end * width];
                let here = match T::as_wide(here) {
                    Some(here) => here,
                    None => {
                        let from = &mut from[..here.len()];
                        T::widen_all(here, from);
                        from
                    }
                };
                let (top, size, margin) = (rows.start, [rows.len(), width], -T::Wide::INFINITY);
                dispatch(SpaceToDepth {
                    layout,
                    source: here,
                    apart: 0,
                    top,
                    size,
                    first,
                    margin,
                    to: &mut *plane,
                });
                let top = (first * strides[0]) as isize + starts[0];
                let origin = (top * width as isize + starts[1]) as i32;
                let steps = [strides[0] * width, strides[1]].map(|step| step as i32);
                let mut largest = |values: &mut [T::Wide]| {
                    let (plane, run, size) = (&*plane, &mut *run, [values.len() / cols, cols]);
                    let places = &mut *places;
                    dispatch(OfPlane { layout, plane, taps, size, origin, steps, run, values, places })
                };
                let is_unknown = match T::as_wide_mut(values) {
                    Some(values) => largest(values),
                    None => {
                        let to = &mut to[..values.len()];
                        let is_unknown = largest(to);
                        T::narrow_all(to, values);
                        is_unknown
                    }
                };
                if is_unknown {
                    let is_unknown = |value: T| value.widen() == -T::Wide::INFINITY;
                    self.find_each(source, first, is_unknown, values, places);
                }
            }
        });
    }

    /// Window by window, from row `first` on, those whose value is still unknown.
    fn find_each(
        &self,
        plane: &[T],
        first: usize,
        is_unknown: impl Fn(T) -> bool,
        values: &mut [T],
        places: &mut [i32],
    ) {
        let cols = self.counts[1];
        for (i, (value, place)) in
            values.iter_mut().zip(places).enumerate().filter(|(_, (v, _))| is_unknown(**v))
        {
            let ((top, inside), (left, across)) = (&self.rows[first + i / cols], &self.cols[i % cols]);
            let (mut best, mut found) = (-T::Wide::INFINITY, -1);
            for y in inside.clone() {
                let row = (top + (y * self.dilation[0]) as isize) as usize * self.size[1];
                for x in across.clone() {
                    let at = row + (left + (x * self.dilation[1]) as isize) as usize;
                    let pixel = plane[at].widen();
                    if found < 0 || pixel > best || (pixel.is_nan() && !best.is_nan()) {
                        (best, found) = (pixel, at as i32);
                    }
                }
            }
            (*value, *place) = (T::narrow(best), found);
        }
    }
}

/// [`find`] for `[n, h, w, channels]`.
fn find_by_channels<T: Real>(
    op: &'static str,
    x: &Tensor,
    options: &PoolOptions,
    values: &mut Tensor,
    places: &mut Tensor,
) -> Result<()> {
    let sizes = |x: &Tensor| [1, 2, 3].map(|d| x.shape()[d]);
    let ([height, width, channels], [down, across, _]) = (sizes(x), sizes(places));
    let places_of = |i: usize, size: usize, count: usize| -> Vec<Vec<usize>> {
        let place = |start: isize, nth: usize| (start + (nth * options.dilation[i]) as isize) as usize;
        let of_window =
            |(start, inside): (isize, Range<usize>)| inside.map(|nth| place(start, nth)).collect();
        taps(options, i, size, count).into_iter().map(of_window).collect()
    };
    let (rows, cols) = (places_of(0, height, down), places_of(1, width, across));
    let (row_len, out_len) = (width * channels, across * channels);
    let (numel, pool) = (places.numel(), places.device().pool()?);
    let source = x.read::<T>(op)?;
    let source = &source[x.offset()..][..x.numel()];
    let (mut values, mut places) = (values.write::<T>(op)?, places.write::<i32>(op)?);
    let chunk = piece(out_len);
    let mut parts: Vec<_> =
        values[..numel].chunks_mut(chunk).zip(places[..numel].chunks_mut(chunk)).collect();
    pool.for_each_chunk(&mut parts, 1, |i, parts| {
        let lines = parts.iter_mut().flat_map(|(values, places)| {
            values.chunks_exact_mut(out_len).zip(places.chunks_exact_mut(out_len))
        });
        for (j, (values, places)) in lines.enumerate() {
            let line = i * (chunk / out_len) + j;
            let met = &rows[line % down];
            let (top, end) = (met.first().copied().unwrap_or(0), met.last().map_or(0, |last| last + 1));
            let image = line / down * height;
            let source = &source[(image + top) * row_len..(image + end.max(top)) * row_len];
            let met: Vec<usize> = met.iter().map(|row| row - top).collect();
            let largest = |rows: &[T::Wide], values: &mut [T::Wide], places: &mut [i32]| {
                let origin = (top * width) as i32;
                dispatch(OfChannels {
                    rows,
                    width,
                    channels,
                    down: &met,
                    across: &cols,
                    origin,
                    values,
                    places,
                });
            };
            match (T::as_wide(source), T::as_wide_mut(values)) {
                (Some(rows), Some(values)) => largest(rows, values, places),
                _ => with_scratch(source.len() + out_len, |scratch| {
                    let (rows, wide) = scratch.split_at_mut(source.len());
                    T::widen_all(source, rows);
                    largest(rows, wide, places);
                    T::narrow_all(wide, values);
                }),
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
