//! `y[.., :] = weight[index[..], :]`: rows of a table.
//!
//! Derivative: row `r` of `dweight` is the sum of `dy` where the index is `r`, positions ascending; the padding row's
//! is zero. Shapes: weight `[rows, ..]`, index any, result `[index's shape, ..]`. The index is saved. Where the
//! weight's gradient is kept in a buffer, it is added there row by row and never exists apart.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Error};

use super::gather::zeros;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads2, record};

impl Var {
    /// The rows of this table at the indices (i64 or i32, of any shape). The row `padding` gets no gradient; it may
    /// be counted from the end.
    ///
    /// # Errors
    /// If this has no dimension, or an index or `padding` is out of range.
    pub fn embedding(&self, index: &Var, padding: Option<isize>) -> Result<Var> {
        begins();
        let y = kernels::embedding(self.tensor(), index.tensor())?;
        let rows = self.shape()[0];
        let place = |row: isize| {
            let place = if row < 0 { rows.checked_sub(row.unsigned_abs()) } else { Some(row.unsigned_abs()) };
            let wrong =
                || Error::range("embedding", format!("padding row {row}"), format!("one of {rows} rows"));
            place.filter(|&place| place < rows).ok_or_else(wrong)
        };
        let padding = padding.map(place).transpose()?;
        record("embedding", &[self, index], y, |s: &Saver<'_>| {
            Ok(Embedding { from: Dims::from_slice(self.shape()), padding, index: s.input(1)? })
        })
    }
}

struct Embedding {
    from: Dims,
    padding: Option<usize>,
    index: SavedVariable,
}

impl Backward for Embedding {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (index, dy, rows) = (cx.get(&self.index)?, cx.dy(), self.from[0]);
        if cx.create_graph() {
            let flat = index.reshape_to(&[index.numel()])?;
            let mut shape = self.from.clone();
            shape[0] = flat.numel();
            let sums = zeros(dy, &self.from)?.index_add(0, &flat, &dy.reshape_to(&shape)?, 1.0)?;
            return grads2(Some(self.without_padding(&sums)?), None);
        }
        let (dy, index) = (dy.tensor(), index.tensor());
        if cx.accumulate_into(0, |to| {
            Ok(kernels::embedding_backward_accumulate_(to, dy, index, self.padding)?)
        })? {
            return grads2(None, None);
        }
        grads2(Some(Var::new(kernels::embedding_backward(dy, index, rows, self.padding)?)), None)
    }
}

impl Embedding {
    /// The padding row replaced by zeros.
    fn without_padding(&self, sums: &Var) -> Result<Var> {
        let Some(row) = self.padding else { return Ok(sums.clone()) };
        let mut shape = self.from.clone();
        shape[0] = 1;
        let after = sums.narrow(0, row + 1, self.from[0] - row - 1)?;
        Var::cat(&[sums.narrow(0, 0, row)?, zeros(sums, &shape)?, after], 0)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{Options, Var, grad};

    #[test]
    fn rows_have_their_derivatives_and_the_padding_row_has_none() {
        let index = Var::from_slice(&[2i64, 0, 2, 1], &[2, 2], Device::CPU).unwrap();
        check_twice(&[&[3, 2]], |v| {
            let y = v[0].embedding(&index, None)?;
            y.mul(&y)
        });
        let w = Var::leaf(Tensor::from_slice(&[1.0; 6], &[3, 2], Device::CPU).unwrap()).unwrap();
        for create_graph in [false, true] {
            let y = w.embedding(&index, Some(-1)).unwrap();
            let options = Options { create_graph, ..Options::default() };
            let dw = grad(&[(y.sum_all().unwrap(), None)], &[&w], options).unwrap().remove(0).unwrap();
            assert_eq!(dw.to_vec::<f64>().unwrap(), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
        }
    }
}
