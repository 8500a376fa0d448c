//! Tensors made of indices and numbers; constants, without derivative.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Scalar};

use crate::{Result, Var};

impl Var {
    /// `[this shape, classes]` of i64: 1 where the last dimension's place is the index, else 0.
    ///
    /// # Errors
    /// If this is not i64 or i32, or an index is out of range.
    pub fn one_hot(&self, classes: usize) -> Result<Var> {
        Ok(Var::new(kernels::one_hot(self.tensor(), classes)?))
    }

    /// `start, start + step, ..` up to but not including `end`.
    ///
    /// # Errors
    /// If `step` is 0 or leads away from `end`, a bound is not finite, or an integer dtype cannot hold a number.
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        dtype: DType,
        device: Device,
    ) -> Result<Var> {
        Ok(Var::new(kernels::arange(start, end, step, dtype, device)?))
    }
}
