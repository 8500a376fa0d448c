//! Parts at indices along a dimension (`index_select`), and its transposed map, adding to them (`index_add`).
//!
//! Derivative: of `index_select` `dx = index_add(0, index, dy)`; of `index_add` `dx = dy`,
//! `dsource = alpha index_select(dy, index)`. The index is saved.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims};

use super::gather::zeros;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

impl Var {
    /// The parts at the indices (i64 or i32) along `dim`, in their order; an index may come several times.
    ///
    /// # Errors
    /// If there is no such dimension, the index has more than one, or an index is out of range.
    pub fn index_select(&self, dim: impl Dim, index: &Var) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank(), "index_select")?;
        let y = kernels::index_select(self.tensor(), dim, index.tensor())?;
        record("index_select", &[self, index], y, |s: &Saver<'_>| {
            Ok(IndexSelect { dim, from: Dims::from_slice(self.shape()), index: s.input(1)? })
        })
    }

    /// This, with `alpha` times part `i` of `source` added to part `index[i]` along `dim`, for each `i`.
    ///
    /// # Errors
    /// If there is no such dimension, shapes do not fit, or an index is out of range.
    pub fn index_add(&self, dim: impl Dim, index: &Var, source: &Var, alpha: f64) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank(), "index_add")?;
        let y = kernels::index_add(self.tensor(), dim, index.tensor(), source.tensor(), alpha)?;
        record("index_add", &[self, index, source], y, |s: &Saver<'_>| {
            Ok(IndexAdd { dim, alpha, index: s.needs(2).then(|| s.input(1)).transpose()? })
        })
    }
}

struct IndexSelect {
    dim: usize,
    from: Dims,
    index: SavedVariable,
}

impl Backward for IndexSelect {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (index, dy) = (cx.get(&self.index)?, cx.dy());
        if cx.create_graph() {
            return grads1(zeros(dy, &self.from)?.index_add(self.dim, &index, dy, 1.0)?);
        }
        let dx = kernels::index_select_backward(dy.tensor(), self.dim, index.tensor(), &self.from)?;
        grads1(Var::new(dx))
    }
}

struct IndexAdd {
    dim: usize,
    alpha: f64,
    index: Option<SavedVariable>,
}

impl Backward for IndexAdd {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let source = |index: &SavedVariable| -> Result<Var> {
            let rows = cx.dy().index_select(self.dim, &cx.get(index)?)?;
            if self.alpha == 1.0 { Ok(rows) } else { rows.mul_scalar(self.alpha) }
        };
        let source = self.index.as_ref().filter(|_| cx.needs(2)).map(source).transpose()?;
        Ok([Some(cx.dy().clone()), None, source].into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn index_select_and_index_add_have_each_other_as_derivative() {
        let index = Var::from_slice(&[2i32, 0, 2], &[3], Device::CPU).unwrap();
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].index_select(1, &index)?;
            y.mul(&y)
        });
        check_twice(&[&[3, 2], &[3, 2]], |v| {
            let y = v[0].index_add(0, &index, &v[1], -0.5)?;
            y.mul(&y)
        });
    }
}
