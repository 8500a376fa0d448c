//! Batch normalisation: each channel over the items and places of the batch, or by given statistics.

mod cpu;
pub(in crate::ops) mod cuda;

use phalanx_tensor::{Device, Error, Result, Tensor};

use crate::block_reader::{GROUP, elements, store, values_f64, widened_if};
use crate::check;
use crate::dispatch::Kernels;
use crate::ops::copy_;
use crate::real::{Real, for_real, wide_dtype};
use crate::reduce::{Deviation, Itself, ReduceView, Total, fold};
use crate::rows::{self, Outputs, RowSizes};
use crate::simd::Float;

/// Numbers kept of a channel: the mean's two parts, the inverse deviation, and the variance.
const KEPT: usize = 4;

/// Elements of a row at most, where a channel of an item can be cut into as many: they stay in the L1 cache.
const ROW_MAX: usize = 1024;

/// The options of batch normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// Whether to use the batch's own statistics, and to move the running ones towards them.
    pub training: bool,
    /// How far they move (0.1).
    pub momentum: f64,
    /// Added to the variance (1e-5).
    pub eps: f64,
}

impl Default for BatchNorm {
    fn default() -> BatchNorm {
        BatchNorm { training: true, momentum: 0.1, eps: 1e-5 }
    }
}

const FORWARD: Kernels<Forward> = Kernels { cpu: forward_on_cpu, cuda: cuda::forward };
const BACKWARD: Kernels<Backward> = Kernels { cpu: backward_on_cpu, cuda: cuda::backward };
const UPDATE: Kernels<Update> = Kernels { cpu: update_on_cpu, cuda: cuda::update };

type Forward = fn(
    &'static str,
    &Channels,
    &Tensor,
    Option<[&Tensor; 2]>,
    [Option<&Tensor>; 2],
    f64,
    [&mut Tensor; 2],
) -> Result<()>;
type Backward =
    fn(&'static str, &Channels, [&Tensor; 3], Option<&Tensor>, bool, [Option<&mut Tensor>; 3]) -> Result<()>;
type Update = fn(&'static str, (&Tensor, &mut Tensor), &Tensor, usize, [f64; 2]) -> Result<()>;

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for `x` [N, C, ...] with each channel's mean and variance: the
/// batch's own in training, else the `running` ones, `[C]` each. Also gives what the backward pass and
/// [`batch_norm_update_`] need of each channel.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, there are no running statistics outside training, or fewer than two
/// elements a channel in it.
pub fn batch_norm(
    x: &Tensor,
    running: Option<[&Tensor; 2]>,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    config: &BatchNorm,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "batch_norm";
    check::from_zero(OP, "eps", config.eps)?;
    let channels = Channels::new(OP, x, &[weight, bias])?;
    if config.training && channels.count < 2 {
        let got = format!("an input of shape {:?}", x.shape());
        return Err(Error::shape(OP, got, "more than one element a channel in training"));
    }
    if !config.training && running.is_none() {
        return Err(Error::invalid(OP, "got no running mean and variance, wanted them outside training"));
    }
    for t in running.into_iter().flatten() {
        check::same_device(OP, &[x, t])?;
        check::float(OP, t)?;
        check::shape(OP, "a running mean or variance", t, &[channels.channels])?;
    }
    let mut y = x.empty_like_for(OP)?;
    let mut stats = Tensor::empty_for(OP, &[channels.channels, KEPT], wide_dtype(x.dtype()), x.device())?;
    let running = running.filter(|_| !config.training);
    let (affine, outputs) = ([weight, bias], [&mut y, &mut stats]);
    FORWARD.run(x.device(), |run| run(OP, &channels, x, running, affine, config.eps, outputs))?;
    Ok((y, stats))
}

fn forward_on_cpu(
    op: &'static str,
    channels: &Channels,
    x: &Tensor,
    running: Option<[&Tensor; 2]>,
    weight_and_bias: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    for_real!(op, x.dtype(), T => {
        match running {
            Some(running) => running_stats::<T>(op, running, eps, stats)?,
            None if channels.places == 1 => measure_columns::<T>(op, x, eps, stats)?,
            None => {
                let kernel = cpu::Measure { eps };
                let transposed = channels.transposed(x)?;
                let outputs = Outputs { y: None, stats: &mut stats.write(op)? };
                rows::run::<T, 1>(op, &kernel, channels.by_channel(KEPT), [&transposed], outputs)?;
            }
        }
        let numbers = elements::<<T as Real>::Wide>(op, stats)?;
        let [weight, bias] = affine::<T>(op, channels.channels, weight_and_bias)?;
        let lines = cpu::ChannelLines::new(channels, &numbers, |c, inverse| [weight[c] * inverse, bias[c]]);
        if channels.has_long_lines::<T>(&[x]) {
            return cpu::forward_lines::<T>(op, x, &lines, channels, y);
        }
        let kernel = cpu::Forward(lines);
        rows::run::<T, 1>(op, &kernel, channels.by_place(), [x], Outputs { y: Some(y), stats: &mut [] })?;
        Ok(())
    })
}

/// Statistics of [N, C]: the sums over columns, which are not transposed.
fn measure_columns<T: Real>(op: &'static str, x: &Tensor, eps: f64, stats: &mut Tensor) -> Result<()> {
    let view = ReduceView::new(op, x, &[0usize], false)?;
    let n = view.n as f64;
    let mut means = vec![T::Wide::ZERO; view.outputs()];
    let mut rests = vec![[0.0; 2]; view.outputs()];
    let mean = |_: usize, [sum]: [f64; 1]| T::Wide::from_f64(sum / n);
    fold::<T, _, _, _, 1>(op, &view, (Total, Itself { neutral: 0.0 }), &[], &mut means, mean)?;
    fold::<T, _, _, _, 2>(op, &view, (Total, Deviation), &means, &mut rests, |_, rest| rest)?;
    let mut stats = stats.write::<T::Wide>(op)?;
    for ((kept, high), [rest, squares]) in stats.chunks_exact_mut(KEPT).zip(means).zip(rests) {
        let low = rest / n;
        let var = squares / n - low * low;
        let numbers = [low, 1.0 / (var + eps).sqrt(), var].map(T::Wide::from_f64);
        kept[0] = high;
        kept[1..].copy_from_slice(&numbers);
    }
    Ok(())
}

/// Keeps given statistics as the batch's own are.
fn running_stats<T: Real>(
    op: &'static str,
    running: [&Tensor; 2],
    eps: f64,
    stats: &mut Tensor,
) -> Result<()> {
    let [mean, var] = [values_f64(op, running[0])?, values_f64(op, running[1])?];
    let mut stats = stats.write::<T::Wide>(op)?;
    for ((kept, mean), var) in stats.chunks_exact_mut(KEPT).zip(mean).zip(var) {
        cpu::store_stats(mean, var, eps, kept);
    }
    Ok(())
}

/// Moves running statistics towards the batch's: `(1 - momentum) old + momentum new`, with the unbiased variance.
/// `x` and `stats` are those of [`batch_norm`] in training.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn batch_norm_update_(
    running: [&mut Tensor; 2],
    x: &Tensor,
    stats: &Tensor,
    momentum: f64,
) -> Result<()> {
    const OP: &str = "batch_norm_update";
    let channels = Channels::new(OP, x, &[])?;
    let count = channels.count as f64;
    for (which, running) in running.into_iter().enumerate() {
        check::shape(OP, "a running mean or variance", running, &[channels.channels])?;
        let mut moved = Tensor::empty_for(OP, running.shape(), running.dtype(), running.device())?;
        let numbers = [momentum, count / (count - 1.0)];
        UPDATE.run(running.device(), |run| run(OP, (running, &mut moved), stats, which, numbers))?;
        copy_(running, &moved)?;
    }
    Ok(())
}

fn update_on_cpu(
    op: &'static str,
    (running, moved): (&Tensor, &mut Tensor),
    stats: &Tensor,
    which: usize,
    [momentum, unbiased]: [f64; 2],
) -> Result<()> {
    let new = values_f64(op, stats)?;
    let new = new.chunks_exact(KEPT).map(|s| [s[0] + s[1], s[3] * unbiased][which]);
    let old = values_f64(op, running)?;
    let values: Vec<f64> =
        old.iter().zip(new).map(|(old, new)| (1.0 - momentum) * old + momentum * new).collect();
    for_real!(op, running.dtype(), T => store::<T>(op, moved, &values))
}

/// The gradients of [`batch_norm`] with respect to `x`, `weight` and `bias`: those that `needs` names.
///
/// # Errors
/// As [`batch_norm`].
pub fn batch_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    weight: Option<&Tensor>,
    dy: &Tensor,
    config: &BatchNorm,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    const OP: &str = "batch_norm_backward";
    let channels = Channels::new(OP, x, &[weight])?;
    check::same(OP, &[x, dy])?;
    check::shape(OP, "a gradient", dy, x.shape())?;
    let mut dx = needs[0].then(|| x.empty_like_for(OP)).transpose()?;
    let sum = |wanted: bool| {
        wanted.then(|| Tensor::empty_for(OP, &x.shape()[1..2], x.dtype(), x.device())).transpose()
    };
    let [mut dw, mut db] = [sum(needs[1])?, sum(needs[2])?];
    let outputs = [dx.as_mut(), dw.as_mut(), db.as_mut()];
    BACKWARD.run(x.device(), |run| run(OP, &channels, [x, dy, stats], weight, config.training, outputs))?;
    Ok([dx, dw, db])
}

fn backward_on_cpu(
    op: &'static str,
    channels: &Channels,
    [x, dy, stats]: [&Tensor; 3],
    weight: Option<&Tensor>,
    training: bool,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    for_real!(op, x.dtype(), T => {
        let wide = <<T as Real>::Wide as Float>::from_f64;
        let stats = elements::<<T as Real>::Wide>(op, stats)?;
        let [weight, _] = affine::<T>(op, channels.channels, [weight, None])?;
        let mut sums = vec![wide(0.0); channels.channels * 2];
        if channels.places == 1 {
            let kernel = cpu::ItemSums(cpu::ChannelLines::new(channels, &stats, |_, inverse| [inverse]));
            let shape = RowSizes { sums: 2 * channels.channels, ..channels.by_place() };
            let all = rows::run::<T, 2>(op, &kernel, shape, [x, dy], Outputs { y: None, stats: &mut [] })?;
            let (of_dy, of_product) = all.split_at(channels.channels);
            for (sums, (&dy, &product)) in sums.chunks_exact_mut(2).zip(of_dy.iter().zip(of_product)) {
                sums.copy_from_slice(&[wide(dy), wide(product)]);
            }
        } else {
            let (turned_x, turned_dy) = (channels.transposed(x)?, channels.transposed(dy)?);
            let outputs = Outputs { y: None, stats: &mut sums };
            rows::run::<T, 2>(op, &cpu::Sums(&stats), channels.by_channel(2), [&turned_x, &turned_dy], outputs)?;
        }
        let part = |which: usize| sums.chunks_exact(2).map(|s| s[which].to_f64()).collect::<Vec<f64>>();
        db.map_or(Ok(()), |db| store::<T>(op, db, &part(0)))?;
        dw.map_or(Ok(()), |dw| store::<T>(op, dw, &part(1)))?;
        let Some(dx) = dx else { return Ok(()) };
        // dx = dy scale + (x - mean) slope + shift
        let n = wide(channels.count as f64);
        let line = |c: usize, inverse: <T as Real>::Wide| {
            let scale = weight[c] * inverse;
            let own = if training { scale / n } else { wide(0.0) };
            [scale, -(own * inverse * sums[2 * c + 1]), -(own * sums[2 * c])]
        };
        let lines = cpu::ChannelLines::new(channels, &stats, line);
        if channels.has_long_lines::<T>(&[x, dy]) {
            return cpu::backward_lines::<T>(op, [x, dy], &lines, channels, dx);
        }
        let kernel = cpu::BackwardOf(lines);
        let outputs = Outputs { y: Some(dx), stats: &mut [] };
        rows::run::<T, 2>(op, &kernel, channels.by_place(), [x, dy], outputs)?;
        Ok(())
    })
}

/// The sizes of [N, C, ...].
pub(in crate::ops) struct Channels {
    pub(in crate::ops) device: Device,
    pub(in crate::ops) items: usize,
    pub(in crate::ops) channels: usize,
    /// Elements of a channel of one item, and of a channel.
    pub(in crate::ops) places: usize,
    pub(in crate::ops) count: usize,
}

impl Channels {
    fn new(op: &'static str, x: &Tensor, affine: &[Option<&Tensor>]) -> Result<Channels> {
        check::float(op, x)?;
        let [items, channels, ref places @ ..] = *x.shape() else {
            return Err(Error::shape(op, format!("{:?}", x.shape()), "[N, C] or [N, C, ...]"));
        };
        check::affine(op, x, affine, &[channels])?;
        let places = places.iter().product();
        Ok(Channels { device: x.device(), items, channels, places, count: items * places })
    }

    /// `x` with the channels first.
    fn transposed(&self, x: &Tensor) -> Result<Tensor> {
        x.transpose(0, 1)
    }

    /// Rows that are the channels of [`Channels::transposed`].
    fn by_channel(&self, stats: usize) -> RowSizes {
        RowSizes { rows: self.channels, width: self.count, stats, sums: 0 }
    }

    /// Rows that are a part of a channel of an item; where that is a single element, an item's channels.
    fn by_place(&self) -> RowSizes {
        let (rows, width) = match self.places {
            1 => (self.items, self.channels),
            _ => (self.items * self.channels * self.parts(), self.places / self.parts()),
        };
        RowSizes { rows, width, stats: 0, sums: 0 }
    }

    /// The rows that a channel of an item is: equal parts, if there is a number for which they are neither large nor small.
    fn parts(&self) -> usize {
        let least = self.places.div_ceil(ROW_MAX).max(1);
        (least..=2 * least).find(|&parts| self.places.is_multiple_of(parts)).unwrap_or(1)
    }

    /// Elements of a line that [`cpu::forward_lines`] computes with: a channel's of an item, or an item's channels where that is one.
    fn width(&self) -> usize {
        if self.places == 1 { self.channels } else { self.places }
    }

    /// Whether these inputs are to be computed by [`cpu::forward_lines`]: halves in long lines. Others have nothing to widen.
    fn has_long_lines<T: Real>(&self, inputs: &[&Tensor]) -> bool {
        T::as_wide(&[]).is_none() && self.width() >= GROUP && inputs.iter().all(|x| x.is_contiguous())
    }
}

/// Weight and bias of each of so many channels, 1 and 0 where they are absent.
pub(in crate::ops) fn affine<T: Real>(
    op: &'static str,
    channels: usize,
    [weight, bias]: [Option<&Tensor>; 2],
) -> Result<[Vec<T::Wide>; 2]> {
    let all = |x: T::Wide| vec![x; channels];
    let (weight, bias) = (widened_if::<T>(op, weight)?, widened_if::<T>(op, bias)?);
    Ok([weight.unwrap_or_else(|| all(T::Wide::ONE)), bias.unwrap_or_else(|| all(T::Wide::ZERO))])
}

#[cfg(test)]
mod tests;
