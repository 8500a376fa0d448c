//! Batch normalisation on a CPU: statistics of a channel, and the line `scale (x - mean) + shift` that each channel's elements are put through.
//!
//! ```text
//! Measure, Sums           rows that are channels, [C, N places]: mean and variance; sums of dy and of dy xhat
//! ItemSums                rows that are items, [N, C]: the same sums, for inputs without places
//! Forward, BackwardOf     rows that are a part of a channel of an item: y, dx
//! forward_lines, ..       the same with the pointwise frame: halves in long lines, many by one call, with the same bits
//! ```

use phalanx_tensor::{Result, Tensor};

use super::{Channels, KEPT};
use crate::ops::layer_norm::cpu::{Standard, measure};
use crate::pointwise::{LineFn, Lines, apply_to_lines, pointwise, run, update};
use crate::real::{Input, Real};
use crate::rows::{Row, RowKernel, lanes};
use crate::simd::{Float, Isa, Vector};

/// Stores a mean, in two parts, the inverse deviation and the variance.
pub(super) fn store_stats<T: Float>(mean: f64, var: f64, eps: f64, kept: &mut [T]) {
    let high = T::from_f64(mean);
    let rest = [mean - high.to_f64(), 1.0 / (var + eps).sqrt(), var];
    kept[0] = high;
    kept[1..].iter_mut().zip(rest).for_each(|(to, x)| *to = T::from_f64(x));
}

/// Mean and variance of a channel.
pub(super) struct Measure {
    pub(super) eps: f64,
}

impl<T: Float> RowKernel<T, 1> for Measure {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let [x] = row.x;
        row.stats[3] = measure::<T::Vec<S>, true>(x, self.eps, &mut row.stats[..3]);
    }
}

/// The sums of `dy` and `dy xhat` over a channel.
pub(super) struct Sums<'a, T>(pub(super) &'a [T]);

impl<T: Float> RowKernel<T, 2> for Sums<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let standard = Standard::<T::Vec<S>, true>::load(&self.0[row.index * KEPT..][..3]);
        let terms = |[x, dy]: [T::Vec<S>; 2]| [dy, dy * standard.of(x)];
        row.stats.copy_from_slice(&lanes::sums(row.x, [T::ZERO; 2], terms));
    }
}

/// For every channel the two parts of its mean and `N` coefficients, each as a vector over the channels.
pub(super) struct ChannelLines<T, const N: usize> {
    mean: [Vec<T>; 2],
    coefficients: [Vec<T>; N],
    /// How many rows a channel of an item is cut into; `None` if a row is an item's channels.
    parts: Option<usize>,
}

impl<T: Float, const N: usize> ChannelLines<T, N> {
    /// `line` gives a channel's coefficients from its number and its inverse deviation.
    pub(super) fn new(channels: &Channels, stats: &[T], line: impl Fn(usize, T) -> [T; N]) -> Self {
        let kept = |which: usize| stats.iter().skip(which).step_by(KEPT).copied().collect::<Vec<T>>();
        let lines: Vec<[T; N]> =
            kept(2).into_iter().enumerate().map(|(c, inverse)| line(c, inverse)).collect();
        ChannelLines {
            mean: [kept(0), kept(1)],
            coefficients: std::array::from_fn(|n| lines.iter().map(|line| line[n]).collect()),
            parts: (channels.places != 1).then(|| channels.parts()),
        }
    }

    /// All vectors: the mean's parts, then the coefficients.
    pub(super) fn all(&self) -> Vec<&[T]> {
        self.mean.iter().chain(&self.coefficients).map(Vec::as_slice).collect()
    }

    /// The channel of a row; `None` if a row is an item's channels.
    #[inline(always)]
    fn channel(&self, row: usize) -> Option<usize> {
        Some(row / self.parts? % self.mean[0].len())
    }
}

/// The sums of `dy` and `dy xhat` over the items of [N, C]: a row is an item's channels. The coefficient is the inverse
/// deviation.
pub(super) struct ItemSums<T>(pub(super) ChannelLines<T, 1>);

impl<T: Float> RowKernel<T, 2> for ItemSums<T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let ([x, dy], ChannelLines { mean: [high, low], coefficients: [inverse], .. }) = (row.x, &self.0);
        let (sums, products) = row.sums.split_at_mut(x.len());
        let inputs = [x, dy, high, low, inverse];
        lanes::update_both(
            [sums, products],
            inputs,
            |[sum, product]: [T::Vec<S>; 2], [x, dy, high, low, inverse]| {
                [sum + dy, dy.mul_add(((x - high) - low) * inverse, product)]
            },
        );
    }
}

/// `(x - mean) scale + shift`
#[inline(always)]
pub(super) fn line<V: Vector>(x: V, [high, low]: [V; 2], [scale, shift]: [V; 2]) -> V {
    ((x - high) - low).mul_add(scale, shift)
}

/// `y = (x - mean) scale + shift`
pub(super) struct Forward<T>(pub(super) ChannelLines<T, 2>);

impl<T: Float> RowKernel<T, 1> for Forward<T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let ([x], ChannelLines { mean: [high, low], coefficients: [scale, shift], .. }) = (row.x, &self.0);
        if let Some(c) = self.0.channel(row.index) {
            let splat = T::Vec::<S>::splat;
            let (high, low) = (splat(high[c]), splat(low[c]));
            let (scale, shift) = (splat(scale[c]), splat(shift[c]));
            lanes::map([x], row.y, |[x]| line(x, [high, low], [scale, shift]));
        } else {
            lanes::map(
                [x, high, low, scale, shift],
                row.y,
                |[x, high, low, scale, shift]: [T::Vec<S>; 5]| line(x, [high, low], [scale, shift]),
            );
        }
    }
}

/// `dx = dy scale + (x - mean) slope + shift`
pub(super) struct BackwardOf<T>(pub(super) ChannelLines<T, 3>);

impl<T: Float> RowKernel<T, 2> for BackwardOf<T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let [x, dy] = row.x;
        let ChannelLines { mean: [high, low], coefficients: [scale, slope, shift], .. } = &self.0;
        if let Some(c) = self.0.channel(row.index) {
            let splat = T::Vec::<S>::splat;
            let (high, low) = (splat(high[c]), splat(low[c]));
            let (scale, slope, shift) = (splat(scale[c]), splat(slope[c]), splat(shift[c]));
            lanes::map([x, dy], row.y, |[x, dy]: [T::Vec<S>; 2]| {
                dy.mul_add(scale, line(x, [high, low], [slope, shift]))
            });
        } else {
            let inputs = [x, dy, high, low, scale, slope, shift];
            lanes::map(inputs, row.y, |[x, dy, high, low, scale, slope, shift]: [T::Vec<S>; 7]| {
                dy.mul_add(scale, line(x, [high, low], [slope, shift]))
            });
        }
    }
}

pointwise!(ForwardLine, |x, high, low, scale, shift| line(x, [high, low], [scale, shift]));
pointwise!(BackwardLine, |x, dy, high, low, scale, slope, shift| {
    dy.mul_add(scale, line(x, [high, low], [slope, shift]))
});

/// `y` of [`Forward`], many lines by one call; for a batch for which [`Channels::has_long_lines`].
pub(super) fn forward_lines<T: Real>(
    op: &'static str,
    x: &Tensor,
    numbers: &ChannelLines<T::Wide, 2>,
    channels: &Channels,
    y: &mut Tensor,
) -> Result<()> {
    map_lines::<T, 5>(op, &|lines, out| run(ForwardLine, lines, out), &[x], &numbers.all(), channels, y)
}

/// `dx` of [`BackwardOf`], as [`forward_lines`].
pub(super) fn backward_lines<T: Real>(
    op: &'static str,
    inputs: [&Tensor; 2],
    numbers: &ChannelLines<T::Wide, 3>,
    channels: &Channels,
    dx: &mut Tensor,
) -> Result<()> {
    map_lines::<T, 7>(op, &|lines, out| run(BackwardLine, lines, out), &inputs, &numbers.all(), channels, dx)
}

/// Sets `y` to `f` of the inputs `[N, C, places]` and of `numbers`, `[C]` each. A line is a channel of an item, `places` elements; if `places`
/// is 1 it is an item, `C` elements. Halves are widened and rounded in registers.
fn map_lines<T: Real, const N: usize>(
    op: &'static str,
    f: LineFn<'_, T::Wide, N>,
    inputs: &[&Tensor],
    numbers: &[&[T::Wide]],
    channels: &Channels,
    y: &mut Tensor,
) -> Result<()> {
    let reads = inputs.iter().map(|x| Ok((x.offset(), x.read::<T>(op)?))).collect::<Result<Vec<_>>>()?;
    let (width, by_item) = (channels.width(), channels.places == 1);
    update(op, y, |mut start, mut target: &mut [T]| {
        while !target.is_empty() {
            let (skip, channel) = (start % width, start / width % channels.channels);
            // A line that this piece shares with its neighbours is computed by itself.
            let left = (width - skip).min(target.len());
            let most = if by_item { usize::MAX } else { channels.channels - channel };
            let count = if left == width { (target.len() / width).min(most) } else { 1 };
            let (here, after) = target.split_at_mut(count * left);
            let mut lines = Lines { x: [Input::Same(T::Wide::ZERO); N], steps: [0; N], width: left };
            let (of_inputs, of_numbers) = lines.x.split_at_mut(reads.len());
            for ((x, step), (offset, read)) in of_inputs.iter_mut().zip(&mut lines.steps).zip(&reads) {
                (*x, *step) = (T::input(&read[offset + start..][..here.len()]), left);
            }
            for (x, numbers) in of_numbers.iter_mut().zip(numbers) {
                *x = match by_item {
                    true => Input::Wide(&numbers[skip..][..left]),
                    false if count == 1 => Input::Same(numbers[channel]),
                    false => Input::Each(&numbers[channel..][..count]),
                };
            }
            apply_to_lines(f, lines, T::output(here));
            (start, target) = (start + count * left, after);
        }
    })
}
