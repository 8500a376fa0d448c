//! Layer normalisation, and what it shares with [`rms_norm`](super::rms_norm()), which is the same without the mean, and
//! with both of a sum, which is made in the same pass.

pub(in crate::ops) mod cpu;
mod cuda;

use phalanx_tensor::{Dims, Error, Result, Tensor};

use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::rows::{self, Outputs, Shape};
use crate::wide::{elements, store, wide_dtype, widened_if};

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` over the last dimensions of `x`, which must be
/// `normalized_shape`; mean and variance (divided by n) are each row's own. Also gives what the backward pass needs of
/// each row: the mean in two parts, for rows whose spread is small beside their mean, and the inverse deviation.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn layer_norm(
    x: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    forward::<true>("layer_norm", x, None, normalized_shape, [weight, bias], eps)
}

/// The gradients of [`layer_norm`] with respect to `x`, `weight` and `bias`: those that `needs` names. `weight` and
/// `stats` are the forward pass's. The last two are sums over the rows, by blocks of rows whose size depends on the
/// shape only.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn layer_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    dy: &Tensor,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    backward::<true>("layer_norm_backward", [x, dy], None, stats, normalized_shape, weight, needs)
}

/// The kernels, which subtract the mean if `CENTERED`.
struct Norm<const CENTERED: bool>;

impl<const CENTERED: bool> Norm<CENTERED> {
    const FORWARD: Kernels<Forward> =
        Kernels { cpu: forward_on_cpu::<CENTERED>, cuda: cuda::forward::<CENTERED> };
    const BACKWARD: Kernels<Backward> =
        Kernels { cpu: backward_on_cpu::<CENTERED>, cuda: cuda::backward::<CENTERED> };
}

type Forward = fn(
    &'static str,
    Shape,
    &Tensor,
    Option<Residual<'_>>,
    [Option<&Tensor>; 2],
    f64,
    [&mut Tensor; 2],
) -> Result<()>;
type Backward = fn(
    &'static str,
    Shape,
    [&Tensor; 2],
    Option<&Tensor>,
    &Tensor,
    Option<&Tensor>,
    [Option<&mut Tensor>; 3],
) -> Result<()>;

/// What is added to the input, and where the sum goes.
pub(in crate::ops) type Residual<'a> = (&'a Tensor, &'a mut Tensor);

/// The forward pass; `CENTERED` subtracts the mean. With a residual, that of `x` and it added.
pub(in crate::ops) fn forward<const CENTERED: bool>(
    op: &'static str,
    x: &Tensor,
    residual: Option<Residual<'_>>,
    normalized_shape: &[usize],
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    check::from_zero(op, "eps", eps)?;
    let mut shape = sizes(op, x, normalized_shape, &[weight, bias])?;
    if let Some((residual, _)) = &residual {
        check::same(op, &[x, residual])?;
        check::shape(op, "a residual", residual, x.shape())?;
    }
    shape.stats = cpu::stats_of::<CENTERED>();
    let mut y = x.empty_like_for(op)?;
    let mut stats_shape = Dims::from_slice(&x.shape()[..x.rank() - normalized_shape.len()]);
    stats_shape.push(shape.stats);
    let mut stats = Tensor::empty_for(op, &stats_shape, wide_dtype(x.dtype()), x.device())?;
    let outputs = [&mut y, &mut stats];
    let forward = Norm::<CENTERED>::FORWARD;
    forward.run(x.device(), |run| run(op, shape, x, residual, [weight, bias], eps, outputs))?;
    Ok((y, stats))
}

fn forward_on_cpu<const CENTERED: bool>(
    op: &'static str,
    shape: Shape,
    x: &Tensor,
    residual: Option<Residual<'_>>,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    for_real!(op, x.dtype(), T => {
        let (weight, bias) = (widened_if::<T>(op, weight)?, widened_if::<T>(op, bias)?);
        let kernel = cpu::Forward::<_, CENTERED> { weight: weight.as_deref(), bias: bias.as_deref(), eps };
        let outputs = Outputs { y: Some(y), stats: &mut stats.write(op)? };
        match residual {
            Some((residual, sum)) => {
                rows::run_added::<T, 2>(op, &kernel, shape, [x, residual], Some(sum), outputs)
            }
            None => rows::run::<T, 1>(op, &kernel, shape, [x], outputs),
        }
    })?;
    Ok(())
}

/// The backward pass of [`forward`], where `x` is what was normalised; `dsum`, the gradient that reaches it otherwise, is
/// added to `dx`.
pub(in crate::ops) fn backward<const CENTERED: bool>(
    op: &'static str,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    [dx, dw, db]: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let mut shape = sizes(op, x, normalized_shape, &[weight])?;
    for gradient in [Some(dy), dsum].into_iter().flatten() {
        check::same(op, &[x, gradient])?;
        check::shape(op, "a gradient", gradient, x.shape())?;
    }
    shape.sums = shape.width * (usize::from(dw) + usize::from(db));
    let dsum = dsum.filter(|_| dx);
    let mut dx = dx.then(|| x.empty_like_for(op)).transpose()?;
    let sum = |wanted: bool| {
        wanted.then(|| Tensor::empty_for(op, normalized_shape, x.dtype(), x.device())).transpose()
    };
    let [mut dw_out, mut db_out] = [sum(dw)?, sum(db)?];
    let outputs = [dx.as_mut(), dw_out.as_mut(), db_out.as_mut()];
    let backward = Norm::<CENTERED>::BACKWARD;
    backward.run(x.device(), |run| run(op, shape, [x, dy], dsum, stats, weight, outputs))?;
    Ok([dx, dw_out, db_out])
}

fn backward_on_cpu<const CENTERED: bool>(
    op: &'static str,
    shape: Shape,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    weight: Option<&Tensor>,
    [dx, dw_out, db_out]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    let (dw, db) = (dw_out.is_some(), db_out.is_some());
    for_real!(op, x.dtype(), T => {
        let (weight, stats) = (widened_if::<T>(op, weight)?, elements::<<T as Real>::Wide>(op, stats)?);
        let kernel = cpu::BackwardOf::<_, CENTERED> { weight: weight.as_deref(), stats: &stats, dw, db };
        let outputs = Outputs { y: dx, stats: &mut [] };
        let sums = match dsum {
            Some(dsum) => rows::run::<T, 3>(op, &kernel, shape, [x, dy, dsum], outputs)?,
            None => rows::run::<T, 2>(op, &kernel, shape, [x, dy], outputs)?,
        };
        let mut sums = sums.chunks(shape.width.max(1));
        let mut sum_into = |out: &mut Tensor| store::<T>(op, out, sums.next().unwrap_or_default());
        [dw_out, db_out].into_iter().flatten().try_for_each(&mut sum_into)
    })
}

/// Rows and their width, if everything fits.
fn sizes(
    op: &'static str,
    x: &Tensor,
    normalized_shape: &[usize],
    affine: &[Option<&Tensor>],
) -> Result<Shape> {
    check::float(op, x)?;
    if normalized_shape.is_empty() || !x.shape().ends_with(normalized_shape) {
        let wanted = format!("a shape that ends in {normalized_shape:?}, of at least one dimension");
        return Err(Error::shape(op, format!("{:?}", x.shape()), wanted));
    }
    for t in affine.iter().copied().flatten() {
        check::same(op, &[x, t])?;
        check::shape(op, "a weight or bias", t, normalized_shape)?;
    }
    let lead = x.rank() - normalized_shape.len();
    let rows = x.shape()[..lead].iter().product();
    Ok(Shape { rows, width: normalized_shape.iter().product(), stats: 0, sums: 0 })
}

#[cfg(test)]
mod tests;
