//! Elements moved along their channels' lines where they lie together in long runs of a channel, or in items of many channels:
//! many runs by one call, halves widened and rounded in registers. The bits are those of [`super::cpu`].

use phalanx_tensor::{Result, Tensor};

use super::Channels;
use super::cpu::{ChannelLines, line};
use crate::pointwise::{LineFn, Lines, apply_to_lines, pointwise, run, update};
use crate::real::Input;
use crate::real::Real;
use crate::simd::Float;

pointwise!(Forward, |x, high, low, scale, shift| line(x, [high, low], [scale, shift]));
pointwise!(Backward, |x, dy, high, low, scale, slope, shift| {
    dy.mul_add(scale, line(x, [high, low], [slope, shift]))
});

/// [`super::cpu::Forward`] of a batch that is [`Channels::are_whole`].
pub(super) fn forward<T: Real>(
    op: &'static str,
    x: &Tensor,
    numbers: &ChannelLines<T::Wide, 2>,
    channels: &Channels,
    y: &mut Tensor,
) -> Result<()> {
    map::<T, 5>(op, &|lines, out| run(Forward, lines, out), &[x], &numbers.all(), channels, y)
}

/// [`super::cpu::BackwardOf`] of such batches.
pub(super) fn backward<T: Real>(
    op: &'static str,
    inputs: [&Tensor; 2],
    numbers: &ChannelLines<T::Wide, 3>,
    channels: &Channels,
    dx: &mut Tensor,
) -> Result<()> {
    map::<T, 7>(op, &|lines, out| run(Backward, lines, out), &inputs, &numbers.all(), channels, dx)
}

/// Sets `y` to `f` of the inputs and of the numbers that each channel has.
fn map<T: Real, const N: usize>(
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
            // A line that is shared with the pieces beside this one is computed apart.
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
