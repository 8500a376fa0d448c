//! Rows and elements picked by index, and the reverse, adding to them.

mod add_rows;
mod cuda;
mod embedding;
mod gather;
mod index_add;
mod index_select;
mod one_hot;
mod scatter_add;
mod split;
mod summand;
#[cfg(test)]
mod tests;

use phalanx_tensor::{DType, Error, Result, Tensor};

use crate::check;
use crate::ops::cast::cast;

pub use embedding::{embedding, embedding_backward, embedding_backward_accumulate_};
pub use gather::gather;
pub use index_add::{index_add, index_select_backward};
pub use index_select::index_select;
pub use one_hot::one_hot;
pub use scatter_add::{gather_backward, scatter_add};
pub use split::split_indices;

pub(super) use cuda::add_to_planes;

/// The indices as contiguous i64, on the device of what they pick from.
fn indices(op: &'static str, index: &Tensor, from: &Tensor) -> Result<Tensor> {
    check::same_device(op, &[from, index])?;
    if !matches!(index.dtype(), DType::I64 | DType::I32) {
        return Err(Error::dtype(op, index.dtype(), "i64 or i32 for the indices"));
    }
    cast(index, DType::I64)?.contiguous()
}

/// Whether all indices are in `0..size`.
fn all_in_range(indices: &[i64], size: usize) -> bool {
    let last = size as i64 - 1;
    indices.iter().fold(0, |signs, &i| signs | i | last.wrapping_sub(i)) >= 0
}

/// The error of the first index outside `0..size`, if any.
fn check_range(op: &'static str, indices: &[i64], size: usize) -> Result<()> {
    if all_in_range(indices, size) {
        return Ok(());
    }
    match indices.iter().position(|&i| i < 0 || i as u64 >= size as u64) {
        Some(item) => {
            let got = format!("index {} (item {item})", indices[item]);
            Err(Error::range(op, got, format!("an index below {size}")))
        }
        None => Ok(()),
    }
}
