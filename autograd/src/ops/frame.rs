//! Helpers (*frames*: the part of an operation that many share) for operations composed of others ([`composed`]), and
//! for linear operations of one input: views, copies, sums ([`record_view`], [`record_linear`]).

use phalanx_tensor::{DType, Dims, Error as TensorError, Tensor, broadcast_shapes};
use smallvec::SmallVec;

use crate::{Backward, Cx, Error, Grads, Result, SaveContext, Var, grads1, record};

// The frame of operations that are made of others: the halves are computed in f32 and rounded once, and an error names the
// operation that was called.

/// A composition of differentiable operations, of floating-point inputs of one dtype: computed in f32 where that is bf16 or
/// f16, and rounded once at the end. Errors name the composition.
pub(super) fn composed(
    name: &'static str,
    inputs: &[&Var],
    f: impl FnOnce(&[Var]) -> Result<Var>,
) -> Result<Var> {
    if inputs.is_empty() {
        return named(name, f(&[]));
    }
    let dtype = floats(name, inputs)?;
    let inputs: SmallVec<[Var; 4]> = inputs.iter().map(|x| wide(x)).collect::<Result<_>>()?;
    named(name, f(&inputs).and_then(|y| y.to(dtype)))
}

/// bf16 and f16 in f32, the others as they are.
pub(super) fn wide(x: &Var) -> Result<Var> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.to(DType::F32),
        _ => Ok(x.clone()),
    }
}

/// The inputs' dtype: one floating-point dtype. They are on one device.
pub(super) fn floats(name: &'static str, inputs: &[&Var]) -> Result<DType> {
    let dtype = inputs[0].dtype();
    if !dtype.is_float() {
        return Err(TensorError::dtype(name, dtype, "a floating-point dtype").into());
    }
    same(name, inputs)?;
    Ok(dtype)
}

/// All of one dtype and on one device.
pub(super) fn same(name: &'static str, inputs: &[&Var]) -> Result<()> {
    let first = inputs[0];
    for other in &inputs[1..] {
        if other.device() != first.device() {
            return Err(TensorError::Device { op: name, left: first.device(), right: other.device() }.into());
        }
        if other.dtype() != first.dtype() {
            let wanted = format!("{}, as the first operand", first.dtype());
            return Err(TensorError::dtype(name, other.dtype(), wanted).into());
        }
    }
    Ok(())
}

/// All broadcast to one shape.
pub(super) fn broadcasts(name: &'static str, inputs: &[&Var]) -> Result<()> {
    let first = Dims::from_slice(inputs[0].shape());
    inputs[1..].iter().try_fold(first, |shape, x| broadcast_shapes(name, &shape, x.shape()))?;
    Ok(())
}

/// The result, an error of an operation inside it as one of `op`.
pub(super) fn named<T>(op: &'static str, result: Result<T>) -> Result<T> {
    let rename = |mut error: TensorError| {
        match &mut error {
            TensorError::Shape { op: name, .. }
            | TensorError::Range { op: name, .. }
            | TensorError::DType { op: name, .. }
            | TensorError::Device { op: name, .. }
            | TensorError::Unsupported { op: name, .. }
            | TensorError::OutOfMemory { op: name, .. }
            | TensorError::Invalid { op: name, .. } => *name = op,
            _ => {}
        }
        error
    };
    result.map_err(|error| match error {
        Error::Tensor(error) => Error::Tensor(rename(error)),
        other => other,
    })
}

/// A target as the input's dtype, if it is an integer or a bool.
pub(super) fn as_number(target: &Var, like: &Var) -> Result<Var> {
    if target.dtype().is_float() { Ok(target.clone()) } else { target.to(like.dtype()) }
}

/// `f` of the input as a batch: of `rank - 1` dimensions it is one item, and so is the result.
pub(super) fn batched(
    op: &'static str,
    x: &Var,
    rank: usize,
    f: impl FnOnce(&Var) -> Result<Var>,
) -> Result<Var> {
    match rank.checked_sub(x.rank()) {
        Some(0) => named(op, f(x)),
        Some(1) => named(op, f(&x.unsqueeze(0)?)?.squeeze(&[0])),
        _ => {
            let wanted = format!("a batch of {rank} dimensions, or one item of {}", rank - 1);
            Err(TensorError::shape(op, format!("{:?}", x.shape()), wanted).into())
        }
    }
}

/// The product of sizes, where it is below 2^63.
pub(super) fn product(op: &'static str, sizes: &[usize]) -> Result<usize> {
    let product = sizes.iter().try_fold(1_usize, |product, &n| product.checked_mul(n));
    let fits = product.filter(|&n| isize::try_from(n).is_ok());
    fits.ok_or_else(|| TensorError::shape(op, format!("{sizes:?}"), "a product below 2^63").into())
}

// Linear maps of one input: views, copies, sums.
//
// Derivative: the transposed map, applied to `dy`. It depends on sizes and arguments only, so no values are saved.

/// Records `y`, a linear map of `x` that moves elements about, given the transposed map.
pub(super) fn record_view(
    name: &'static str,
    x: &Var,
    y: Tensor,
    transposed: impl Fn(&Var) -> Result<Var> + Send + Sync + 'static,
) -> Result<Var> {
    record(name, &[x], y, |_: &SaveContext<'_>| Ok(LinearMap { transposed, is_view: true }))
}

/// Records `y`, any linear map of `x`, given the transposed map.
pub(super) fn record_linear(
    name: &'static str,
    x: &Var,
    y: Tensor,
    transposed: impl Fn(&Var) -> Result<Var> + Send + Sync + 'static,
) -> Result<Var> {
    record(name, &[x], y, |_: &SaveContext<'_>| Ok(LinearMap { transposed, is_view: false }))
}

struct LinearMap<F> {
    transposed: F,
    is_view: bool,
}

impl<F: Fn(&Var) -> Result<Var> + Send + Sync> Backward for LinearMap<F> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1((self.transposed)(cx.dy())?)
    }

    fn is_view(&self) -> bool {
        self.is_view
    }
}
