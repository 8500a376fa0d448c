//! Views: other layouts of the same storage, parts of a tensor, and the tensor that parts make up.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Dim, Tensor, resolve_shape};
use crate::layout::checked_numel;
use crate::{Dims, Error, Layout, Result};

/// Views: other layouts of the same bytes.
impl Tensor {
    pub(super) fn view(&self, layout: Layout) -> Tensor {
        Tensor { storage: self.storage.clone(), view: Some(Arc::new(layout)), dtype: self.dtype }
    }

    /// Elements `start .. start + length` along `dim`.
    ///
    /// # Errors
    /// If the range is not inside the dimension.
    pub fn narrow(&self, dim: impl Dim, start: usize, length: usize) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "narrow")?;
        let size = self.shape()[dim];
        if start.checked_add(length).is_none_or(|end| end > size) {
            let got = format!("{length} elements from {start}");
            return Err(Error::range(
                "narrow",
                got,
                format!("a range inside dimension {dim} of size {size}"),
            ));
        }
        Ok(self.view(self.layout().narrow(dim, start, length)))
    }

    /// Every `step`-th element from `start` up to `end` along `dim`. As in Python, what lies beyond the dimension is left
    /// out, and a range that ends before it starts is empty.
    ///
    /// # Errors
    /// If there is no such dimension or `step` is 0.
    pub fn slice(&self, dim: impl Dim, start: usize, end: usize, step: usize) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "slice")?;
        if step == 0 {
            return Err(Error::range(
                "slice",
                format!("{start}..{end} by a step of 0"),
                "a step of at least 1",
            ));
        }
        let end = end.min(self.shape()[dim]);
        let start = start.min(end);
        let cut = self.narrow(dim, start, end - start)?;
        Ok(cut.view(cut.layout().step(dim, step)))
    }

    /// The sub-tensor at `index` along `dim`, which goes away.
    ///
    /// # Errors
    /// If there is no such index.
    pub fn select(&self, dim: impl Dim, index: usize) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "select")?;
        let size = self.shape()[dim];
        if index >= size {
            let wanted = format!("an index below {size}, the size of dimension {dim}");
            return Err(Error::range("select", index, wanted));
        }
        Ok(self.view(self.layout().narrow(dim, index, 1).squeeze(dim)))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn transpose(&self, a: impl Dim, b: impl Dim) -> Result<Tensor> {
        let (a, b) = (a.resolve(self.rank(), "transpose")?, b.resolve(self.rank(), "transpose")?);
        let mut dims: Dims = (0..self.rank()).collect();
        dims.swap(a, b);
        Ok(self.view(self.layout().permute(&dims)))
    }

    /// Dimension `i` of the result is dimension `dims[i]` of this.
    ///
    /// # Errors
    /// If `dims` is not a permutation of the dimensions.
    pub fn permute(&self, dims: &[usize]) -> Result<Tensor> {
        let mut seen: SmallVec<[bool; 8]> = SmallVec::from_elem(false, self.rank());
        let fresh = |&d: &usize| seen.get_mut(d).is_some_and(|s| !std::mem::replace(s, true));
        if dims.len() != self.rank() || !dims.iter().all(fresh) {
            let wanted =
                format!("a permutation of the {} dimensions of shape {:?}", self.rank(), self.shape());
            return Err(Error::invalid("permute", format!("got {dims:?}, wanted {wanted}")));
        }
        Ok(self.view(self.layout().permute(dims)))
    }

    /// Dimensions of size 1 repeated, and dimensions added in front, by strides of 0.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Tensor> {
        self.broadcast_for("broadcast_to", shape)
    }

    /// [`Tensor::broadcast_to`] for an operation, which errors name.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_for(&self, op: &'static str, shape: &[usize]) -> Result<Tensor> {
        let layout = self.layout().broadcast(shape).ok_or_else(|| {
            let got = format!("a tensor of shape {:?}", self.shape());
            Error::shape(op, got, format!("a shape that broadcasts to {shape:?}"))
        })?;
        Ok(self.view(layout))
    }

    /// A dimension of size 1 put in before `dim` (up to the rank, which puts it last).
    ///
    /// # Errors
    /// If there is no such place.
    pub fn unsqueeze(&self, dim: impl Dim) -> Result<Tensor> {
        let dim = dim.resolve(self.rank() + 1, "unsqueeze")?;
        Ok(self.view(self.layout().unsqueeze(dim)))
    }

    /// Dimension `dim` taken out if its size is 1, else no change.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn squeeze(&self, dim: impl Dim) -> Result<Tensor> {
        let dim = dim.resolve(self.rank(), "squeeze")?;
        Ok(if self.shape()[dim] == 1 { self.view(self.layout().squeeze(dim)) } else { self.clone() })
    }

    /// The same elements in row-major order in another shape: a view where strides can express it, else a copy.
    /// One size may be -1 and is then inferred.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[isize]) -> Result<Tensor> {
        let shape = resolve_shape("reshape", self.shape(), shape)?;
        self.with_shape(&shape)
    }

    /// [`Tensor::reshape`] to a shape without -1.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn with_shape(&self, shape: &[usize]) -> Result<Tensor> {
        if checked_numel(shape) != Some(self.numel()) {
            let got = format!("{:?} with {} elements", self.shape(), self.numel());
            return Err(Error::shape("reshape", got, format!("as many elements as {shape:?} has")));
        }
        match self.layout().reshape(shape) {
            Some(layout) => Ok(self.view(layout)),
            None => self.copy_for("reshape", self.device())?.with_shape(shape),
        }
    }

    /// Any layout inside the storage, offset included.
    ///
    /// # Errors
    /// If it reaches beyond the storage.
    pub fn as_strided(&self, shape: &[usize], strides: &[usize], offset: usize) -> Result<Tensor> {
        let held = self.storage.bytes() / self.dtype.size();
        let reach = shape
            .iter()
            .zip(strides)
            .try_fold(0usize, |sum, (&n, &s)| sum.checked_add(n.saturating_sub(1).checked_mul(s)?));
        // Without elements nothing is reached, whatever the strides.
        let end = match shape.contains(&0) {
            true => Some(offset),
            false => reach.and_then(|r| r.checked_add(offset)?.checked_add(1)),
        };
        let numel = checked_numel(shape);
        if shape.len() != strides.len() || numel.is_none() || end.is_none_or(|end| end > held) {
            let got = format!("shape {shape:?}, strides {strides:?}, offset {offset}");
            return Err(Error::range("as_strided", got, format!("a layout inside {held} elements")));
        }
        Ok(self.view(Layout::strided(Dims::from_slice(shape), Dims::from_slice(strides), offset)))
    }

    /// `shape` elements of a flat buffer from `offset` on (in elements): how buckets and shards hold tensors.
    ///
    /// # Errors
    /// If this is not contiguous or too short.
    pub fn view_into(&self, offset: usize, shape: &[usize]) -> Result<Tensor> {
        if !self.is_contiguous() {
            let got = format!("strides {:?}", self.strides());
            return Err(Error::shape("view_into", got, "a contiguous buffer"));
        }
        let flat = self.with_shape(&[self.numel()])?;
        let numel = checked_numel(shape)
            .ok_or_else(|| Error::shape("view_into", format!("{shape:?}"), "a size that fits in memory"))?;
        flat.narrow(0, offset, numel)?.with_shape(shape)
    }

    /// What lies before `at` along `dim`, and what from there on.
    ///
    /// # Errors
    /// If `at` is larger than the dimension.
    pub fn split_at(&self, dim: impl Dim, at: usize) -> Result<(Tensor, Tensor)> {
        let dim = dim.resolve(self.rank(), "split_at")?;
        let size = self.shape()[dim];
        let rest = size.checked_sub(at).ok_or_else(|| {
            Error::range("split_at", at, format!("at most {size}, the size of dimension {dim}"))
        })?;
        Ok((self.narrow(dim, 0, at)?, self.narrow(dim, at, rest)?))
    }

    /// The sub-tensors at each index along `dim`, which goes away.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn unbind(&self, dim: impl Dim) -> Result<Vec<Tensor>> {
        let dim = dim.resolve(self.rank(), "unbind")?;
        (0..self.shape()[dim]).map(|i| self.select(dim, i)).collect()
    }

    /// Up to `chunks` parts along `dim`, of equal size but for the last one, which may be smaller: fewer parts where
    /// that size covers the dimension sooner, as in PyTorch. An empty dimension makes one empty part.
    ///
    /// # Errors
    /// If there is no such dimension or `chunks` is 0.
    pub fn chunk(&self, dim: impl Dim, chunks: usize) -> Result<Vec<Tensor>> {
        let dim = dim.resolve(self.rank(), "chunk")?;
        if chunks == 0 {
            return Err(Error::range("chunk", "0 chunks", "at least 1"));
        }
        let size = self.shape()[dim];
        let length = size.div_ceil(chunks).max(1);
        let starts = (0..size.max(1)).step_by(length);
        starts.map(|start| self.narrow(dim, start, length.min(size - start))).collect()
    }

    /// The contiguous tensor that these are all parts of along `dim`, in this order, where nothing else lies in its storage:
    /// a view. `None` if there is no such.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn joined(parts: &[&Tensor], dim: impl Dim) -> Result<Option<Tensor>> {
        let Some(first) = parts.first() else { return Ok(None) };
        let dim = dim.resolve(first.rank(), "joined")?;
        let (mut shape, strides) = (Dims::from_slice(first.shape()), first.strides());
        shape[dim] = 0;
        for part in parts {
            let beside = |d: usize| d == dim || part.shape()[d] == shape[d];
            let follows = part.shares_storage(first)
                && part.dtype() == first.dtype()
                && part.strides() == strides
                && part.offset() == shape[dim] * strides[dim]
                && (0..shape.len()).all(beside);
            if !follows {
                return Ok(None);
            }
            shape[dim] += part.shape()[dim];
        }
        let whole = first.as_strided(&shape, strides, 0)?;
        let covers = whole.numel() * whole.dtype().size() == whole.storage().bytes();
        Ok((covers && whole.is_contiguous()).then_some(whole))
    }

    /// Dimensions `start` to `end`, both included, as one: a view where strides can express it, else a copy. A tensor
    /// without dimensions becomes one of a single dimension of 1.
    ///
    /// # Errors
    /// If there are no such dimensions or `end` comes before `start`.
    pub fn flatten(&self, start: impl Dim, end: impl Dim) -> Result<Tensor> {
        let rank = self.rank().max(1);
        let (start, end) = (start.resolve(rank, "flatten")?, end.resolve(rank, "flatten")?);
        if end < start {
            return Err(Error::range("flatten", format!("dimensions {start} to {end}"), "ascending ones"));
        }
        if self.rank() == 0 {
            return self.with_shape(&[1]);
        }
        let shape = self.shape();
        let mut flat = Dims::from_slice(&shape[..start]);
        flat.push(shape[start..=end].iter().product());
        flat.extend_from_slice(&shape[end + 1..]);
        self.with_shape(&flat)
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Device, Tensor};

    #[test]
    fn parts_are_joined_where_nothing_is_missing_and_nothing_else_there() {
        let values: Vec<i32> = (0..24).collect();
        let whole = Tensor::from_slice(&values, &[2, 6, 2], Device::CPU).unwrap();
        let part = |dim: usize, start, length| whole.narrow(dim, start, length).unwrap();
        let joined = |parts: &[&Tensor], dim: usize| Tensor::joined(parts, dim).unwrap();
        let (a, b, c) = (part(1, 0, 1), part(1, 1, 3), part(1, 4, 2));
        let again = joined(&[&a, &b, &c], 1).unwrap();
        assert!(again.shares_storage(&whole) && again.is_contiguous() && again.shape() == whole.shape());
        assert!(joined(&[&part(0, 0, 1), &part(0, 1, 1)], 0).is_some() && joined(&[&whole], 2).is_some());
        // In another order, with a gap, short of the end, one twice, along another dimension, none.
        for parts in [&[&b, &a, &c][..], &[&a, &c], &[&a, &b], &[&a, &a, &b, &c], &[&b, &c], &[]] {
            assert!(joined(parts, 1).is_none());
        }
        assert!(joined(&[&part(1, 0, 3), &part(1, 3, 3)], 0).is_none());
        // Of other tensors, sizes or ranks, or transposed.
        let other = Tensor::zeros(&[2, 3, 2], DType::I32, Device::CPU).unwrap();
        let flat = part(1, 3, 3).select(0, 0).unwrap();
        let short = part(1, 3, 3).narrow(0, 0, 1).unwrap();
        assert!([&other, &flat, &short].iter().all(|x| joined(&[&part(1, 0, 3), x], 1).is_none()));
        let transposed = whole.transpose(0, 2).unwrap();
        let [x, y] = [0, 3].map(|start| transposed.narrow(1, start, 3).unwrap());
        assert!(joined(&[&x, &y], 1).is_none());
        assert!(Tensor::joined(&[&a], 3).is_err());
    }
}
