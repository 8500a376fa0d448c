//! Views that cut a tensor into parts, and the one that joins dimensions.

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
