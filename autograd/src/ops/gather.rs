//! Elements and slices at indices along a dimension, and additions to them.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error, Tensor, broadcast_shapes};

use super::frame::named;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, record};

/// `y = x` at indices along a dimension (`gather`), and its transposed map, adding at indices (`scatter_add`).
///
/// Derivative: of `gather` `dx = scatter_add(0, index, dy)`; of `scatter_add` `dx = dy`, `dsource = gather(dy, index)`.
/// The index is saved.
impl Var {
    /// `y[.., i, ..] = x[.., index[.., i, ..], ..]`, the index standing in place `dim`. The index (i64 or i32) is no
    /// larger than this except along `dim`.
    ///
    /// # Errors
    /// If there is no such dimension, the index does not fit, or an index is out of range.
    pub fn gather(&self, dim: impl Dim, index: &Var) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "gather")?;
        let y = kernels::gather(self.tensor(), dim, index.tensor())?;
        record("gather", &[self, index], y, |s: &SaveContext<'_>| {
            Ok(Gather { dim, from: Dims::from_slice(self.shape()), index: s.input(1)? })
        })
    }

    /// [`Var::gather`], where this and the index broadcast in the other dimensions; without `dim` of both flattened. As
    /// PyTorch's and NumPy's `take_along_dim`, with what `argmax` or `argsort` gave.
    ///
    /// # Errors
    /// As [`Var::gather`]; if the ranks differ or the other dimensions do not broadcast.
    pub fn take_along_dim(&self, index: &Var, dim: Option<isize>) -> Result<Var> {
        const OP: &str = "take_along_dim";
        let Some(dim) = dim else {
            let flat = self.reshape_to(&[self.numel()])?;
            return flat.take_along_dim(&index.reshape_to(&[index.numel()])?, Some(0));
        };
        if self.rank() != index.rank() {
            let got = format!("an index of shape {:?} for {:?}", index.shape(), self.shape());
            return Err(Error::shape(OP, got, "as many dimensions").into());
        }
        let dim = dim.resolve(self.rank(), OP)?;
        let (mut from, mut at) = (Dims::from_slice(self.shape()), Dims::from_slice(index.shape()));
        let (size, count) = (std::mem::replace(&mut from[dim], 1), std::mem::replace(&mut at[dim], 1));
        let mut common = broadcast_shapes(OP, &from, &at)?;
        common[dim] = size;
        let all = self.broadcast_to(&common)?;
        common[dim] = count;
        named(OP, all.gather(dim, &index.broadcast_to(&common)?))
    }

    /// This, with `source[.., i, ..]` added at `[.., index[.., i, ..], ..]`, the index standing in place `dim`. Index
    /// and source have one shape, no larger than this one's except along `dim`; repeats add up.
    ///
    /// # Errors
    /// If there is no such dimension, shapes do not fit, or an index is out of range.
    pub fn scatter_add(&self, dim: impl Dim, index: &Var, source: &Var) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "scatter_add")?;
        let y = kernels::scatter_add(self.tensor(), dim, index.tensor(), source.tensor())?;
        record("scatter_add", &[self, index, source], y, |s: &SaveContext<'_>| {
            Ok(ScatterAdd { dim, index: s.needs(2).then(|| s.input(1)).transpose()? })
        })
    }
}

struct Gather {
    dim: usize,
    from: Dims,
    index: SavedVariable,
}

impl Backward for Gather {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(gathered_from(cx, cx.dy(), self.dim, &cx.get(&self.index)?, &self.from)?)
    }
}

struct ScatterAdd {
    dim: usize,
    index: Option<SavedVariable>,
}

impl Backward for ScatterAdd {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let source = |index: &SavedVariable| cx.dy().gather(self.dim, &cx.get(index)?);
        let source = self.index.as_ref().filter(|_| cx.needs(2)).map(source).transpose()?;
        Ok([Some(cx.dy().clone()), None, source].into_iter().collect())
    }
}

/// The gradient of what `dy` is the gradient of elements of, at the indices along `dim`.
pub(super) fn gathered_from(cx: &Cx<'_>, dy: &Var, dim: usize, index: &Var, shape: &[usize]) -> Result<Var> {
    if cx.create_graph() {
        return zeros(dy, shape)?.scatter_add(dim, index, dy);
    }
    Ok(Var::new(kernels::gather_backward(dy.tensor(), dim, index.tensor(), shape)?))
}

/// Zeros as a constant, of `like`'s dtype and device.
pub(super) fn zeros(like: &Var, shape: &[usize]) -> Result<Var> {
    Ok(Var::new(Tensor::zeros(shape, like.dtype(), like.device())?))
}

/// Parts at indices along a dimension (`index_select`), and its transposed map, adding to them (`index_add`).
///
/// Derivative: of `index_select` `dx = index_add(0, index, dy)`; of `index_add` `dx = dy`,
/// `dsource = alpha index_select(dy, index)`. The index is saved.
impl Var {
    /// The parts at the indices (i64 or i32) along `dim`, in their order; an index may come several times.
    ///
    /// # Errors
    /// If there is no such dimension, the index has more than one, or an index is out of range.
    pub fn index_select(&self, dim: impl Dim, index: &Var) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank(), "index_select")?;
        let y = kernels::index_select(self.tensor(), dim, index.tensor())?;
        record("index_select", &[self, index], y, |s: &SaveContext<'_>| {
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
        record("index_add", &[self, index, source], y, |s: &SaveContext<'_>| {
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
    fn gather_and_scatter_add_have_each_other_as_derivative() {
        let index = Var::from_slice(&[0i64, 2, 2, 1], &[2, 2], Device::CPU).unwrap();
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.take_along_dim(&index, Some(-1)));
        check_twice(&[&[1, 3]], |v| v[0].tanh()?.take_along_dim(&index, Some(1)));
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.take_along_dim(&index.narrow(0, 0, 1)?, Some(1)));
        check_twice(&[&[2, 3]], |v| v[0].tanh()?.take_along_dim(&index, None));
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].gather(1, &index)?;
            y.mul(&y)
        });
        check_twice(&[&[3, 2], &[2, 2]], |v| {
            let y = v[0].scatter_add(0, &index, &v[1])?;
            y.mul(&y)
        });
    }

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
