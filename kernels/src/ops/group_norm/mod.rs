//! Group normalisation: the channels of an item are in groups, and each group is normalised over its channels and places, as a row of layer norm.

use phalanx_tensor::cuda::Args;
use phalanx_tensor::{Error, Result, Tensor};

use super::batch_norm::cuda::{Sums, together};
use super::batch_norm::{Channels, affine};
use super::layer_norm::cpu::{Standard, measure};
use crate::block_reader::{elements, store};
use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real, wide_dtype};
use crate::rows::cuda::{Operand, RowProgram, STANDARD, Team, row_program};
use crate::rows::{self, Outputs, Row, RowKernel, RowSizes, lanes};
use crate::simd::{Float, Isa, Vector};

const FORWARD: Kernels<Forward> = Kernels { cpu: forward_on_cpu, cuda: forward_on_gpu };
const BACKWARD: Kernels<Backward> = Kernels { cpu: backward_on_cpu, cuda: backward_on_gpu };

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
        let [weight, bias] = affine::<T>(op, groups.channels, [weight, bias])?;
        let kernel = ForwardRow { weight: &weight, bias: &bias, places: groups.places, eps };
        let shape = RowSizes { stats: 3, ..groups.shape };
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
        let [weight, _] = affine::<T>(op, groups.channels, [weight, None])?;
        let kernel = BackwardRow { weight: &weight, stats: &stats, places: groups.places };
        let shape = RowSizes { sums: 2 * groups.channels, ..groups.shape };
        let sums = rows::run::<T, 2>(op, &kernel, shape, [x, dy], Outputs { y: dx, stats: &mut [] })?;
        let (dw_sums, db_sums) = sums.split_at(groups.channels);
        dw.map_or(Ok(()), |dw| store::<T>(op, dw, dw_sums))?;
        db.map_or(Ok(()), |db| store::<T>(op, db, db_sums))
    })
}

/// The sizes: a row is a group of one item.
struct Groups {
    shape: RowSizes,
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
        check::affine(op, x, affine, &[channels])?;
        let places = places.iter().product();
        let width = channels / num_groups * places;
        let shape = RowSizes { rows: items * num_groups, width, stats: 0, sums: 0 };
        Ok(Groups { shape, groups: num_groups, channels, places })
    }

    /// The sizes of `x` by channels.
    fn as_channels(&self, x: &Tensor) -> Channels {
        let (items, channels, places) = (x.shape()[0], self.channels, self.places);
        Channels { device: x.device(), items, channels, places, count: items * places }
    }
}

/// The forward pass of a row, which is a group of an item: standardises it, and applies each channel's weight and bias.
struct ForwardRow<'a, T> {
    weight: &'a [T],
    bias: &'a [T],
    places: usize,
    eps: f64,
}

impl<T: Float> RowKernel<T, 1> for ForwardRow<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let [x] = row.x;
        measure::<T::Vec<S>, true>(x, self.eps, row.stats);
        let standard = Standard::<T::Vec<S>, true>::load(row.stats);
        let first = first_channel(row.index, x.len() / self.places.max(1), self.weight.len());
        if self.places == 1 {
            let (w, b) = (&self.weight[first..][..x.len()], &self.bias[first..][..x.len()]);
            return lanes::map([x, w, b], row.y, |[x, w, b]: [T::Vec<S>; 3]| standard.of(x).mul_add(w, b));
        }
        let channels = x.chunks(self.places.max(1)).zip(row.y.chunks_mut(self.places.max(1)));
        for (i, (x, y)) in channels.enumerate() {
            let w = T::Vec::<S>::splat(self.weight[first + i]);
            let b = T::Vec::<S>::splat(self.bias[first + i]);
            lanes::map([x], y, |[x]| standard.of(x).mul_add(w, b));
        }
    }
}

/// The backward pass of a row: `dx`, and the parts of `dw` and `db` of its channels.
struct BackwardRow<'a, T> {
    weight: &'a [T],
    stats: &'a [T],
    places: usize,
}

impl<T: Float> RowKernel<T, 2> for BackwardRow<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let ([x, dy], places) = (row.x, self.places.max(1));
        let standard = Standard::<T::Vec<S>, true>::load(&self.stats[row.index * 3..][..3]);
        let first = first_channel(row.index, x.len() / places, self.weight.len());
        let (dw, db) = row.sums.split_at_mut(self.weight.len());
        let n = T::from_f64(x.len() as f64);
        let splat = T::Vec::<S>::splat;
        if places == 1 {
            let w = &self.weight[first..][..x.len()];
            let [sum, product] = lanes::sums([x, dy, w], [T::ZERO; 3], |[x, dy, w]: [T::Vec<S>; 3]| {
                [dy * w, dy * w * standard.of(x)]
            });
            let own = [&mut dw[first..][..x.len()], &mut db[first..][..x.len()]];
            lanes::update_both(own, [x, dy], |[dw, db]: [T::Vec<S>; 2], [x, dy]| {
                [dy.mul_add(standard.of(x), dw), db + dy]
            });
            let (mean, product) = (splat(sum / n), splat(product / n));
            return lanes::map([x, dy, w], row.y, |[x, dy, w]| {
                (dy * w - mean - standard.of(x) * product) * standard.inverse
            });
        }
        let (mut sum, mut product) = (T::ZERO, T::ZERO);
        for (i, (x, dy)) in x.chunks(places).zip(dy.chunks(places)).enumerate() {
            // A partial vector is filled up with gradients of 0, so that its values of x do not matter.
            let [of_dy, of_product] =
                lanes::sums([x, dy], [T::ZERO; 2], |[x, dy]: [T::Vec<S>; 2]| [dy, dy * standard.of(x)]);
            dw[first + i] += of_product;
            db[first + i] += of_dy;
            sum += of_dy * self.weight[first + i];
            product += of_product * self.weight[first + i];
        }
        let (mean, product) = (splat(sum / n), splat(product / n));
        let channels = x.chunks(places).zip(dy.chunks(places)).zip(row.y.chunks_mut(places));
        for (i, ((x, dy), dx)) in channels.enumerate() {
            let w = splat(self.weight[first + i]);
            lanes::map([x, dy], dx, |[x, dy]| (dy * w - mean - standard.of(x) * product) * standard.inverse);
        }
    }
}

/// The first channel of a row that has `own` of all channels.
#[inline(always)]
fn first_channel(row: usize, own: usize, all: usize) -> usize {
    row * own % all.max(1)
}

const PROGRAM: RowProgram = row_program!("group_norm.cu", STANDARD);

impl Groups {
    fn sizes(&self) -> [u64; 4] {
        [self.groups, self.channels, self.places, self.shape.rows].map(|x| x as u64)
    }
}

fn forward_on_gpu(
    op: &'static str,
    groups: &Groups,
    x: &Tensor,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let (gpu, shape) = (x.device().gpu()?, groups.shape);
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (weight, bias) = (contiguous(weight)?, contiguous(bias)?);
    let operand = Operand::of(op, x, shape.width)?;
    let args = operand.put(Args::new(op, gpu).write(y)?.write(stats)?)?;
    let args = args.read_if(weight.as_ref())?.read_if(bias.as_ref())?;
    let args = args.value([eps, 1.0 / shape.width as f64]).value(groups.sizes());
    team.kernel(op, gpu, PROGRAM, "forward", &[])?.launch(team.grid(), args)
}

fn backward_on_gpu(
    op: &'static str,
    groups: &Groups,
    [x, dy, stats]: [&Tensor; 3],
    weight: Option<&Tensor>,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    let (gpu, shape) = (x.device().gpu()?, groups.shape);
    let (stats, weight, channels) = (stats.contiguous()?, contiguous(weight)?, groups.as_channels(x));
    let own = Sums { op, kept: 3, groups: groups.groups, part_len: groups.places, parts: channels.items };
    let parts = own.parts(&channels, x.dtype(), [&together(op, x)?, &together(op, dy)?], &stats)?;
    if dw.is_some() || db.is_some() {
        own.join(&channels, x.dtype(), &parts, [dw, db])?;
    }
    let Some(dx) = dx else { return Ok(()) };
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let operands = [Operand::of(op, x, shape.width)?, Operand::of(op, dy, shape.width)?];
    let args = operands[1].put(operands[0].put(Args::new(op, gpu).write(dx)?)?)?;
    let args = args.read(&stats)?.scratch(&parts).read_if(weight.as_ref())?.value(groups.sizes());
    team.kernel(op, gpu, PROGRAM, "backward", &[])?.launch(team.grid(), args)
}

fn contiguous(x: Option<&Tensor>) -> Result<Option<Tensor>> {
    x.map(Tensor::contiguous).transpose()
}

#[cfg(test)]
mod tests {
    use super::super::{layer_norm, layer_norm_backward};
    use super::{group_norm, group_norm_backward};
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
