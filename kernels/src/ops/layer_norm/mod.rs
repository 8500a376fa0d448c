//! Layer normalisation; [`rms_norm`], which is the same without the mean; and both of a sum ([`add_layer_norm`],
//! [`add_rms_norm`]), which is computed on the way.

pub(in crate::ops) mod cpu;

use phalanx_tensor::cuda::{Args, Grid, Scratch};
use phalanx_tensor::{DType, Dims, Error, Result, Tensor};

use crate::block_reader::{elements, store, widened_if};
use crate::check;
use crate::dispatch::Kernels;
use crate::real::{Real, for_real, wide_dtype};
use crate::rows::cuda::{Operand, RowProgram, STANDARD, Team, row_program};
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
        Kernels { cpu: forward_on_cpu::<CENTERED>, cuda: forward_on_gpu::<CENTERED> };
    const BACKWARD: Kernels<Backward> =
        Kernels { cpu: backward_on_cpu::<CENTERED>, cuda: backward_on_gpu::<CENTERED> };
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
    shape: RowSizes,
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

const PROGRAM: RowProgram = row_program!("layer_norm.cu", STANDARD);
/// Blocks that have sums of their own, at most: some for each of a large device's multiprocessors, whatever the device.
const BLOCKS_MAX: usize = 512;
/// Elements of a row that a thread may keep the sums of.
const SUMS_KEPT: usize = 32;

fn centered<const CENTERED: bool>() -> Option<(&'static str, &'static str)> {
    Some(("CENTERED", if CENTERED { "true" } else { "false" }))
}

fn forward_on_gpu<const CENTERED: bool>(
    op: &'static str,
    shape: RowSizes,
    x: &Tensor,
    residual: Option<Residual<'_>>,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (weight, bias) = (together(weight)?, together(bias)?);
    let (residual, sum) = residual.unzip();
    let operand = Operand::of(op, x, shape.width)?;
    let residual = residual.map(|residual| Operand::of(op, residual, shape.width)).transpose()?;
    let entry = if sum.is_some() { "add_forward" } else { "forward" };
    let args = operand.put(Args::new(op, gpu).write(y)?.write(stats)?)?;
    let args = match (&residual, sum) {
        (Some(residual), Some(sum)) => residual.put(args)?.write(sum)?,
        _ => args,
    };
    let args = args.read_if(weight.as_ref())?.read_if(bias.as_ref())?.value(eps);
    let args = args.value(1.0 / shape.width as f64).value(shape.rows as u64).value(shape.width as u64);
    team.kernel(op, gpu, PROGRAM, entry, centered::<CENTERED>())?.launch(team.grid(), args)
}

fn backward_on_gpu<const CENTERED: bool>(
    op: &'static str,
    shape: RowSizes,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    weight: Option<&Tensor>,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    let (gpu, RowSizes { rows, width, .. }) = (x.device().gpu()?, shape);
    let team = Team::keeping(x.dtype(), rows, width, SUMS_KEPT);
    let rows_a_block = rows.div_ceil(BLOCKS_MAX).max(1).next_multiple_of(team.rows_a_block());
    let blocks = rows.div_ceil(rows_a_block);
    let (weight, stats) = (together(weight)?, stats.contiguous()?);
    let operands = [Operand::of(op, x, width)?, Operand::of(op, dy, width)?];
    let dsum = dsum.map(|dsum| Operand::of(op, dsum, width)).transpose()?;
    let put = |args| operands[1].put(operands[0].put(args)?);
    let wide = if wide_dtype(x.dtype()) == DType::F64 { 8 } else { 4 };
    let summed = dw.is_some() || db.is_some();
    let parts = summed.then(|| gpu.scratch(op, blocks * 2 * width * wide)).transpose()?;
    let kept = team.packets > 0;
    let sizes = [rows_a_block as u64, rows as u64, width as u64];
    let kernel = |entry| team.kernel(op, gpu, PROGRAM, entry, centered::<CENTERED>());
    if dx.is_some() || kept {
        let args = put(scratch_if(Args::new(op, gpu).write_if(dx)?, parts.as_ref().filter(|_| kept)))?;
        let args = match &dsum {
            Some(dsum) => dsum.put(args)?,
            None => args.value([0u64; 2]),
        };
        let args = args.read_if(weight.as_ref())?.read(&stats)?.value(sizes);
        kernel("backward")?.launch(team.blocks(blocks), args)?;
    }
    let Some(parts) = parts else { return Ok(()) };
    if !kept {
        let args = put(Args::new(op, gpu).scratch(&parts))?.read(&stats)?.value(sizes);
        kernel("columns")?.launch(Grid::new(blocks, 256).by(width.div_ceil(256), 1), args)?;
    }
    let args = Args::new(op, gpu).write_if(dw)?.write_if(db)?.scratch(&parts);
    let args = args.value(blocks as u64).value(width as u64);
    kernel("sums")?.launch(Grid::new((2 * width).div_ceil(32), 256), args)
}

fn together(tensor: Option<&Tensor>) -> Result<Option<Tensor>> {
    tensor.map(Tensor::contiguous).transpose()
}

fn scratch_if<'a>(args: Args<'a>, scratch: Option<&Scratch>) -> Args<'a> {
    match scratch {
        Some(scratch) => args.scratch(scratch),
        None => args.value(0u64),
    }
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
    forward::<false>("rms_norm", x, None, normalized_shape, [weight, None], eps)
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
    let op = "rms_norm_backward";
    let [dx, dw, _] = backward::<false>(op, [x, dy], None, stats, normalized_shape, weight, [dx, dw, false])?;
    Ok([dx, dw])
}

/// `sum = x + residual`, of one shape, and [`layer_norm`](super::layer_norm()) of it, to the bit what the two give one after
/// the other: the sum (rounded before it is normalised), the normalised rows, and what the backward pass needs of each row.
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
    let added = Some((residual, &mut sum));
    let (y, stats) = forward::<true>("add_layer_norm", x, added, normalized_shape, [weight, bias], eps)?;
    Ok([sum, y, stats])
}

/// The gradients of [`add_layer_norm`] with respect to each of the summands (one and the same), `weight` and `bias`: those
/// that `needs` names. `dy` is the normalised rows' gradient, `dsum` the sum's, which is added before the result is rounded.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_layer_norm_backward(
    sum: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    [dy, dsum]: [&Tensor; 2],
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let op = "add_layer_norm_backward";
    backward::<true>(op, [sum, dy], Some(dsum), stats, normalized_shape, weight, needs)
}

/// `sum = x + residual`, of one shape, and [`rms_norm`](super::rms_norm()) of it, to the bit what the two give one after the
/// other: the sum (rounded before it is normalised), the normalised rows, and what the backward pass needs of each row.
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
    let added = Some((residual, &mut sum));
    let (y, stats) = forward::<false>("add_rms_norm", x, added, normalized_shape, [weight, None], eps)?;
    Ok([sum, y, stats])
}

/// The gradients of [`add_rms_norm`] with respect to each of the summands (one and the same) and `weight`: those that
/// `needs` names. `dy` is the normalised rows' gradient, `dsum` the sum's, which is added before the result is rounded.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_rms_norm_backward(
    sum: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    [dy, dsum]: [&Tensor; 2],
    [dx, dw]: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let (op, needs) = ("add_rms_norm_backward", [dx, dw, false]);
    let [dx, dw, _] = backward::<false>(op, [sum, dy], Some(dsum), stats, normalized_shape, weight, needs)?;
    Ok([dx, dw])
}

#[cfg(test)]
mod tests;
