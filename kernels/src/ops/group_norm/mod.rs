//! Group normalisation: the channels of an item in groups, each normalised over its channels and places.

mod cpu;
mod cuda;

use phalanx_tensor::{Error, Result, Tensor};

use crate::check;
use crate::dispatch::Kernels;
use crate::ops::batch_norm::Channels;
use crate::real::{Real, for_real};
use crate::rows::{self, Outputs, Shape};
use crate::simd::Float;
use crate::wide::{elements, store, wide_dtype, widened_if};

const FORWARD: Kernels<Forward> = Kernels { cpu: forward_on_cpu, cuda: cuda::forward };
const BACKWARD: Kernels<Backward> = Kernels { cpu: backward_on_cpu, cuda: cuda::backward };

type Forward = fn(&'static str, &Groups, &Tensor, [Option<&Tensor>; 2], f64, [&mut Tensor; 2]) -> Result<()>;
type Backward =
    fn(&'static str, &Groups, [&Tensor; 3], Option<&Tensor>, [Option<&mut Tensor>; 3]) -> Result<()>;

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for `x` [N, C, ...], with mean and variance of each item's
/// `num_groups` groups of neighbouring channels; `weight` and `bias` are `[C]`. Also gives what the backward pass needs
/// of each group: the mean in two parts and the inverse deviation.
///
/// # Errors
/// If the groups do not divide the channels, or shapes, dtypes or devices do not fit.
pub fn group_norm(
    x: &Tensor,
    num_groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "group_norm";
    check::from_zero(OP, "eps", eps)?;
    let groups = Groups::new(OP, x, num_groups, &[weight, bias])?;
    let mut y = x.empty_like_for(OP)?;
    let mut stats = Tensor::empty_for(OP, &[groups.shape.rows, 3], wide_dtype(x.dtype()), x.device())?;
    FORWARD.run(x.device(), |run| run(OP, &groups, x, [weight, bias], eps, [&mut y, &mut stats]))?;
    Ok((y, stats))
}

fn forward_on_cpu(
    op: &'static str,
    groups: &Groups,
    x: &Tensor,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    for_real!(op, x.dtype(), T => {
        let [weight, bias] = groups.affine::<T>(op, [weight, bias])?;
        let kernel = cpu::Forward { weight: &weight, bias: &bias, places: groups.places, eps };
        let shape = Shape { stats: 3, ..groups.shape };
        rows::run::<T, 1>(op, &kernel, shape, [x], Outputs { y: Some(y), stats: &mut stats.write(op)? })
    })?;
    Ok(())
}

/// The gradients of [`group_norm`] with respect to `x`, `weight` and `bias`: those that `needs` names.
///
/// # Errors
/// As [`group_norm`].
pub fn group_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    num_groups: usize,
    weight: Option<&Tensor>,
    dy: &Tensor,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    const OP: &str = "group_norm_backward";
    let groups = Groups::new(OP, x, num_groups, &[weight])?;
    check::same(OP, &[x, dy])?;
    check::shape(OP, "a gradient", dy, x.shape())?;
    let mut dx = needs[0].then(|| x.empty_like_for(OP)).transpose()?;
    let sum = |wanted: bool| {
        wanted.then(|| Tensor::empty_for(OP, &x.shape()[1..2], x.dtype(), x.device())).transpose()
    };
    let [mut dw, mut db] = [sum(needs[1])?, sum(needs[2])?];
    let outputs = [dx.as_mut(), dw.as_mut(), db.as_mut()];
    BACKWARD.run(x.device(), |run| run(OP, &groups, [x, dy, stats], weight, outputs))?;
    Ok([dx, dw, db])
}

fn backward_on_cpu(
    op: &'static str,
    groups: &Groups,
    [x, dy, stats]: [&Tensor; 3],
    weight: Option<&Tensor>,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    for_real!(op, x.dtype(), T => {
        let stats = elements::<<T as Real>::Wide>(op, stats)?;
        let [weight, _] = groups.affine::<T>(op, [weight, None])?;
        let kernel = cpu::BackwardOf { weight: &weight, stats: &stats, places: groups.places };
        let shape = Shape { sums: 2 * groups.channels, ..groups.shape };
        let sums = rows::run::<T, 2>(op, &kernel, shape, [x, dy], Outputs { y: dx, stats: &mut [] })?;
        let (dw_sums, db_sums) = sums.split_at(groups.channels);
        dw.map_or(Ok(()), |dw| store::<T>(op, dw, dw_sums))?;
        db.map_or(Ok(()), |db| store::<T>(op, db, db_sums))
    })
}

/// The sizes: a row is a group of one item.
struct Groups {
    shape: Shape,
    groups: usize,
    channels: usize,
    /// Elements of a channel of one item.
    places: usize,
}

impl Groups {
    fn new(op: &'static str, x: &Tensor, num_groups: usize, affine: &[Option<&Tensor>]) -> Result<Groups> {
        check::float(op, x)?;
        let [items, channels, ref places @ ..] = *x.shape() else {
            return Err(Error::shape(op, format!("{:?}", x.shape()), "[N, C, ...]"));
        };
        if num_groups == 0 || channels % num_groups != 0 {
            let got = format!("{num_groups} groups for {channels} channels");
            return Err(Error::shape(op, got, "groups that divide the channels"));
        }
        for t in affine.iter().copied().flatten() {
            check::same(op, &[x, t])?;
            check::shape(op, "a weight or bias", t, &[channels])?;
        }
        let places = places.iter().product();
        let width = channels / num_groups * places;
        let shape = Shape { rows: items * num_groups, width, stats: 0, sums: 0 };
        Ok(Groups { shape, groups: num_groups, channels, places })
    }

    /// The sizes of `x` by channels.
    fn as_channels(&self, x: &Tensor) -> Channels {
        let (items, channels, places) = (x.shape()[0], self.channels, self.places);
        Channels { device: x.device(), items, channels, places, count: items * places }
    }

    /// Weight and bias of every channel, 1 and 0 where they are absent.
    fn affine<T: Real>(&self, op: &'static str, [w, b]: [Option<&Tensor>; 2]) -> Result<[Vec<T::Wide>; 2]> {
        let all = |x: T::Wide| vec![x; self.channels];
        let (w, b) = (widened_if::<T>(op, w)?, widened_if::<T>(op, b)?);
        Ok([w.unwrap_or_else(|| all(T::Wide::ONE)), b.unwrap_or_else(|| all(T::Wide::ZERO))])
    }
}

#[cfg(test)]
mod tests {
    use super::{group_norm, group_norm_backward};
    use crate::ops::{layer_norm, layer_norm_backward};
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    #[test]
    fn equals_layer_norm_over_groups_with_a_weight_a_channel() {
        for dtype in FLOATS {
            for (channels, groups, places) in [(6, 2, 5), (6, 3, 1), (4, 4, 33), (4, 1, 20)] {
                let shape = [3, channels, places];
                let x = make(&shape, dtype, &floats(-2.0, 3.0));
                let dy = make(&shape, dtype, &floats(-1.0, 1.5));
                let w = make(&[channels], dtype, &floats(0.5, 2.0));
                let b = make(&[channels], dtype, &floats(-1.0, 1.0));
                let (y, stats) = group_norm(&x, groups, Some(&w), Some(&b), 1e-3).unwrap();
                let [dx, dw, db] = group_norm_backward(&x, &stats, groups, Some(&w), &dy, [true; 3])
                    .unwrap()
                    .map(Option::unwrap);
                // The same by layer normalisation of groups, weighing by hand.
                let rows = [3, groups, channels / groups * places];
                let grouped = |t: &phalanx_tensor::Tensor| t.with_shape(&rows).unwrap();
                let (hat, stats) = layer_norm(&grouped(&x), &rows[2..], None, None, 1e-3).unwrap();
                let channel = |i: usize| i / places % channels;
                let (ws, bs, hats, gs) = (values(&w), values(&b), values(&hat), values(&dy));
                let near = |got: f64, want: f64| assert_close(got, want, 8.0 * tolerance(dtype));
                let (mut dw_want, mut db_want) = (vec![0.0; channels], vec![0.0; channels]);
                for (i, got) in values(&y).into_iter().enumerate() {
                    near(got, hats[i] * ws[channel(i)] + bs[channel(i)]);
                    dw_want[channel(i)] += gs[i] * hats[i];
                    db_want[channel(i)] += gs[i];
                }
                let g = make(&shape, dtype, &|i| gs[i] * ws[channel(i)]);
                let needs = [true, false, false];
                let [want, ..] =
                    layer_norm_backward(&grouped(&x), &stats, &rows[2..], None, &grouped(&g), needs).unwrap();
                for (got, want) in [(dx, values(&want.unwrap())), (dw, dw_want), (db, db_want)] {
                    values(&got).into_iter().zip(want).for_each(|(got, want)| near(got, want));
                }
            }
        }
    }
}
