//! Differences of neighbours along a dimension, composed of views and subtraction.

use phalanx_tensor::{DType, Dim, Error};

use super::composed::composed;
use crate::{Result, Var};

impl Var {
    /// `y[i] = x[i + 1] - x[i]` along `dim`, `n` times over: each time the dimension has one element less, until there is
    /// none. Of bools, whether neighbours differ. To put something before or behind, use [`Var::cat`] first.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn diff(&self, n: usize, dim: impl Dim) -> Result<Var> {
        const NAME: &str = "diff";
        if self.rank() == 0 {
            let wanted = "at least one dimension";
            return Err(Error::shape(NAME, "a tensor without dimensions", wanted).into());
        }
        let dim = dim.resolve(self.rank(), NAME)?;
        let times = n.min(self.shape()[dim]);
        let repeated = |x: &Var| (0..times).try_fold(x.clone(), |x, _| once(&x, dim));
        if self.dtype().is_float() { composed(NAME, &[self], |v| repeated(&v[0])) } else { repeated(self) }
    }
}

fn once(x: &Var, dim: usize) -> Result<Var> {
    let len = x.shape()[dim].saturating_sub(1);
    let (here, next) = (x.narrow(dim, 0, len)?, x.narrow(dim, x.shape()[dim] - len, len)?);
    if x.dtype() == DType::Bool { next.ne(&here) } else { next.sub(&here) }
}
