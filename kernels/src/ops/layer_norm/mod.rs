//! Layer normalisation; [`rms_norm`], which is the same without the mean; and both of a sum ([`add_layer_norm`],
//! [`add_rms_norm`]), which is computed on the way.
//!
//! A residual stream may have another dtype than the branches that begin with its norm and end in a sum: `x`, the sum and the
//! parameters have the stream's, `residual`, `y` and their gradients the branch's ([`has_branch_kernel`]).

pub(in crate::ops) mod cpu;
mod cuda;

use phalanx_tensor::{DType, Dims, Error, Result, Tensor};

use super::cast;
use crate::block_reader::{elements, store, widened_if};
use crate::check;
use crate::dispatch::{Kernels, has_branch_kernel};
use crate::real::{Real, for_real, wide_dtype};
use crate::rows::{self, Outputs, RowSizes};

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
    layer_norm_to(x, normalized_shape, weight, bias, eps, x.dtype())
}

/// [`layer_norm`] in another floating-point dtype, rounded from the type that it is computed in.
///
/// # Errors
/// As [`layer_norm`], or if the dtype is no floating-point one.
pub fn layer_norm_to(
    x: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    forward::<true>("layer_norm", x, None, (normalized_shape, dtype), [weight, bias], eps)
}

/// The gradients of [`layer_norm`] with respect to `x`, `weight` and `bias`: those that `needs` names. `weight` and
/// `stats` are the forward pass's, `dy` has its dtype. The last two are sums over the rows, by blocks of rows whose size depends on the
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
    let ([dx, dw, db], of) = (needs, (normalized_shape, weight));
    let [dx, _, dw, db] =
        backward::<true>("layer_norm_backward", [x, dy], None, stats, of, [dx, false, dw, db])?;
    Ok([dx, dw, db])
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
    RowSizes,
    &Tensor,
    Option<Residual<'_>>,
    [Option<&Tensor>; 2],
    f64,
    [&mut Tensor; 2],
) -> Result<()>;
type Backward = fn(
    &'static str,
    RowSizes,
    [&Tensor; 2],
    Option<&Tensor>,
    &Tensor,
    Option<&Tensor>,
    [Option<&mut Tensor>; 4],
) -> Result<()>;

/// What is added to the input, and where the sum goes.
type Residual<'a> = (&'a Tensor, &'a mut Tensor);

/// The forward pass into a dtype; `CENTERED` subtracts the mean. With a residual, that of `x` and it added.
fn forward<const CENTERED: bool>(
    op: &'static str,
    x: &Tensor,
    residual: Option<Residual<'_>>,
    (normalized_shape, dtype): (&[usize], DType),
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    check::from_zero(op, "eps", eps)?;
    let mut shape = sizes(op, x, normalized_shape, &[weight, bias])?;
    if !dtype.is_float() {
        return Err(Error::dtype(op, dtype, "a floating-point dtype"));
    }
    if let Some((residual, _)) = &residual {
        check::same_device(op, &[x, residual])?;
        check::shape(op, "a residual", residual, x.shape())?;
    }
    if !has_branch_kernel(x.device(), x.dtype(), dtype) {
        let wide = residual.as_ref().map(|(residual, _)| cast(residual, x.dtype())).transpose()?;
        let residual = wide.as_ref().zip(residual).map(|(wide, (_, sum))| (wide, sum));
        let of = (normalized_shape, x.dtype());
        let (y, stats) = forward::<CENTERED>(op, x, residual, of, [weight, bias], eps)?;
        return Ok((cast(&y, dtype)?, stats));
    }
    shape.stats = cpu::stats_of::<CENTERED>();
    let mut y = Tensor::empty_for(op, x.shape(), dtype, x.device())?;
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
    shape: RowSizes,
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
/// added to `dx`. The gradients of x, of the residual in the dtype of `dy`, of weight and bias.
fn backward<const CENTERED: bool>(
    op: &'static str,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    (normalized_shape, weight): (&[usize], Option<&Tensor>),
    [dx, dresidual, dw, db]: [bool; 4],
) -> Result<[Option<Tensor>; 4]> {
    let mut shape = sizes(op, x, normalized_shape, &[weight])?;
    check::float(op, dy)?;
    check::same_device(op, &[x, dy])?;
    dsum.map_or(Ok(()), |dsum| check::same(op, &[x, dsum]))?;
    for gradient in [Some(dy), dsum].into_iter().flatten() {
        check::shape(op, "a gradient", gradient, x.shape())?;
    }
    if dresidual && dy.dtype() == x.dtype() {
        let needs = [true, false, dw, db];
        let [both, _, dw, db] =
            backward::<CENTERED>(op, [x, dy], dsum, stats, (normalized_shape, weight), needs)?;
        return Ok([both.clone().filter(|_| dx), both, dw, db]);
    }
    if !has_branch_kernel(x.device(), x.dtype(), dy.dtype()) {
        let (wide, needs) = (cast(dy, x.dtype())?, [dx || dresidual, false, dw, db]);
        let [both, _, dw, db] =
            backward::<CENTERED>(op, [x, &wide], dsum, stats, (normalized_shape, weight), needs)?;
        let narrow = both.as_ref().filter(|_| dresidual).map(|both| cast(both, dy.dtype())).transpose()?;
        return Ok([both.filter(|_| dx), narrow, dw, db]);
    }
    shape.sums = shape.width * (usize::from(dw) + usize::from(db));
    let dsum = dsum.filter(|_| dx || dresidual);
    let mut dx = dx.then(|| x.empty_like_for(op)).transpose()?;
    let mut dresidual = dresidual.then(|| dy.empty_like_for(op)).transpose()?;
    let sum = |wanted: bool| {
        wanted.then(|| Tensor::empty_for(op, normalized_shape, x.dtype(), x.device())).transpose()
    };
    let [mut dw_out, mut db_out] = [sum(dw)?, sum(db)?];
    let outputs = [dx.as_mut(), dresidual.as_mut(), dw_out.as_mut(), db_out.as_mut()];
    let backward = Norm::<CENTERED>::BACKWARD;
    backward.run(x.device(), |run| run(op, shape, [x, dy], dsum, stats, weight, outputs))?;
    Ok([dx, dresidual, dw_out, db_out])
}

fn backward_on_cpu<const CENTERED: bool>(
    op: &'static str,
    shape: RowSizes,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    weight: Option<&Tensor>,
    [dx, _, dw_out, db_out]: [Option<&mut Tensor>; 4],
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
) -> Result<RowSizes> {
    check::float(op, x)?;
    if normalized_shape.is_empty() || !x.shape().ends_with(normalized_shape) {
        let wanted = format!("a shape that ends in {normalized_shape:?}, of at least one dimension");
        return Err(Error::shape(op, format!("{:?}", x.shape()), wanted));
    }
    check::affine(op, x, affine, normalized_shape)?;
    let lead = x.rank() - normalized_shape.len();
    let rows = x.shape()[..lead].iter().product();
    Ok(RowSizes { rows, width: normalized_shape.iter().product(), stats: 0, sums: 0 })
}

/// `y = x / sqrt(mean(x²) + eps) * weight` over the last dimensions of `x`, which must be `normalized_shape`. Also
/// gives each row's inverse root, which the backward pass needs.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn rms_norm(
    x: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    rms_norm_to(x, normalized_shape, weight, eps, x.dtype())
}

/// [`rms_norm`] in another floating-point dtype, rounded from the type that it is computed in.
///
/// # Errors
/// As [`rms_norm`], or if the dtype is no floating-point one.
pub fn rms_norm_to(
    x: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    eps: f64,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    forward::<false>("rms_norm", x, None, (normalized_shape, dtype), [weight, None], eps)
}

/// The gradients of [`rms_norm`] with respect to `x` and `weight`: those that `needs` names.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn rms_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    dy: &Tensor,
    [dx, dw]: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let (op, needs) = ("rms_norm_backward", [dx, false, dw, false]);
    let [dx, _, dw, _] = backward::<false>(op, [x, dy], None, stats, (normalized_shape, weight), needs)?;
    Ok([dx, dw])
}

/// `sum = x + residual`, of one shape, and [`layer_norm`](super::layer_norm()) of it, to the bit what the two give one after
/// the other: the sum (rounded before it is normalised), the normalised rows, and what the backward pass needs of each row.
/// The sum has the dtype of `x`, the rows that of the residual.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_layer_norm(
    x: &Tensor,
    residual: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let mut sum = x.empty_like_for("add_layer_norm")?;
    let (added, of) = (Some((residual, &mut sum)), (normalized_shape, residual.dtype()));
    let (y, stats) = forward::<true>("add_layer_norm", x, added, of, [weight, bias], eps)?;
    Ok([sum, y, stats])
}

/// The gradients of [`add_layer_norm`] with respect to `x` and the residual (one and the same, but each in its dtype), `weight` and
/// `bias`: those that `needs` names. `dy` is the normalised rows' gradient, `dsum` the sum's if it has any, which is added before the result is rounded.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_layer_norm_backward(
    sum: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    (dy, dsum): (&Tensor, Option<&Tensor>),
    needs: [bool; 4],
) -> Result<[Option<Tensor>; 4]> {
    let op = "add_layer_norm_backward";
    backward::<true>(op, [sum, dy], dsum, stats, (normalized_shape, weight), needs)
}

/// `sum = x + residual`, of one shape, and [`rms_norm`](super::rms_norm()) of it, to the bit what the two give one after the
/// other: the sum (rounded before it is normalised), the normalised rows, and what the backward pass needs of each row.
/// The sum has the dtype of `x`, the rows that of the residual.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let mut sum = x.empty_like_for("add_rms_norm")?;
    let (added, of) = (Some((residual, &mut sum)), (normalized_shape, residual.dtype()));
    let (y, stats) = forward::<false>("add_rms_norm", x, added, of, [weight, None], eps)?;
    Ok([sum, y, stats])
}

/// The gradients of [`add_rms_norm`] with respect to `x` and the residual (one and the same, but each in its dtype) and `weight`: those
/// that `needs` names. `dy` is the normalised rows' gradient, `dsum` the sum's if it has any, which is added before the result is rounded.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_rms_norm_backward(
    sum: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    (dy, dsum): (&Tensor, Option<&Tensor>),
    [dx, dresidual, dw]: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let (op, needs) = ("add_rms_norm_backward", [dx, dresidual, dw, false]);
    let of = (normalized_shape, weight);
    let [dx, dresidual, dw, _] = backward::<false>(op, [sum, dy], dsum, stats, of, needs)?;
    Ok([dx, dresidual, dw])
}

#[cfg(test)]
mod tests;
