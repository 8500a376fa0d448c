//! Views that cut a tensor into parts, the one that puts them together again, and the one that joins dimensions.

use crate::{Dim, Dims, Error, Result, Tensor};

/// Parts.
impl Tensor {
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
        // Of other tensors, sizes or ranks, or turned.
        let other = Tensor::zeros(&[2, 3, 2], DType::I32, Device::CPU).unwrap();
        let flat = part(1, 3, 3).select(0, 0).unwrap();
        let short = part(1, 3, 3).narrow(0, 0, 1).unwrap();
        assert!([&other, &flat, &short].iter().all(|x| joined(&[&part(1, 0, 3), x], 1).is_none()));
        let turned = whole.transpose(0, 2).unwrap();
        let [x, y] = [0, 3].map(|start| turned.narrow(1, start, 3).unwrap());
        assert!(joined(&[&x, &y], 1).is_none());
        assert!(Tensor::joined(&[&a], 3).is_err());
    }
}
