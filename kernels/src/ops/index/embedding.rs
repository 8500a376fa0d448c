//! Rows of a table by index, and the table's gradient.

use phalanx_tensor::{Dims, Error, Result, Tensor};

use super::add_rows::ADD_FLOATS;
use super::cuda::Rows;
use super::index_select::select;
use super::indices;
use crate::check;

/// The rows of `weight [rows, ..]` at the indices, of any shape: `[index's shape, ..]`.
///
/// # Errors
/// If `weight` has no dimension, the indices are not i64 or i32, or one is out of range.
pub fn embedding(weight: &Tensor, index: &Tensor) -> Result<Tensor> {
    const OP: &str = "embedding";
    let [_, row @ ..] = weight.shape() else {
        return Err(Error::shape(OP, "a weight without dimensions", "at least one dimension"));
    };
    let shape: Dims = index.shape().iter().chain(row).copied().collect();
    select(OP, weight, 0, index, &shape)
}

/// The gradient of a table of `rows` rows, given that of [`embedding`]'s result: for each row the sum of `dy` where
/// the index names it, positions ascending; the row `padding` stays zero.
///
/// # Errors
/// If shapes do not fit, dtypes are wrong, or an index is out of range.
pub fn embedding_backward(
    dy: &Tensor,
    index: &Tensor,
    rows: usize,
    padding: Option<usize>,
) -> Result<Tensor> {
    const OP: &str = "embedding_backward";
    let row = row_shape(OP, dy, index)?;
    let shape: Dims = std::iter::once(&rows).chain(row).copied().collect();
    let inner = row.iter().product();
    let index = indices(OP, index, dy)?;
    let mut out = Tensor::empty_for(OP, &shape, dy.dtype(), dy.device())?;
    let end = Rows::Store { padding };
    ADD_FLOATS.run(out.device(), |add_rows| add_rows(OP, &index, dy, [rows, inner], &mut out, end))?;
    Ok(out)
}

/// Adds [`embedding_backward`]'s result to `to [rows, ..]`, with the bits of adding it at the end. False if `to` has
/// a form that this is not made for, and nothing was done.
///
/// # Errors
/// As [`embedding_backward`].
pub fn embedding_backward_accumulate_(
    to: &mut Tensor,
    dy: &Tensor,
    index: &Tensor,
    padding: Option<usize>,
) -> Result<bool> {
    const OP: &str = "embedding_backward";
    let row = row_shape(OP, dy, index)?;
    if padding.is_some() || to.dtype() != dy.dtype() || !to.is_contiguous() || to.shares_storage(dy) {
        return Ok(false);
    }
    let [rows, to_row @ ..] = to.shape() else { return Ok(false) };
    if to_row != row {
        return Err(Error::shape(OP, format!("rows of shape {row:?}"), format!("{to_row:?}")));
    }
    let (rows, inner, index) = (*rows, row.iter().product(), indices(OP, index, dy)?);
    if to.device().is_meta() {
        to.bump_version();
        return Ok(true);
    }
    ADD_FLOATS.run(to.device(), |add_rows| add_rows(OP, &index, dy, [rows, inner], to, Rows::Add))?;
    Ok(true)
}

/// The shape of one row of `dy [index's shape, row]`.
fn row_shape<'a>(op: &'static str, dy: &'a Tensor, index: &Tensor) -> Result<&'a [usize]> {
    check::float(op, dy)?;
    let wrong = || {
        let got = format!("a gradient of shape {:?}", dy.shape());
        Error::shape(op, got, format!("{:?} and a row's shape", index.shape()))
    };
    dy.shape().strip_prefix(index.shape()).ok_or_else(wrong)
}
