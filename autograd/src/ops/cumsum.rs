//! `y[i] = x[0] + .. + x[i]` along a dimension.
//!
//! Derivative: `dx[i] = dy[i] + .. + dy[n - 1]`, the running sum from the end.

use phalanx_kernels as kernels;
use phalanx_tensor::Dim;

use super::linear_map::record_linear;
use crate::{Result, Var, begins};

impl Var {
    /// The running sum along `dim`. Integers and bools are summed in i64.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cumsum(&self, dim: impl Dim) -> Result<Var> {
        begins();
        let dim = dim.resolve(self.rank().max(1), "cumsum")?;
        let y = kernels::cumsum(self.tensor(), dim)?;
        record_linear("cumsum", self, y, move |dy| dy.cumsum_reversed(dim))
    }

    fn cumsum_reversed(&self, dim: usize) -> Result<Var> {
        begins();
        let y = kernels::cumsum_reversed(self.tensor(), dim)?;
        record_linear("cumsum_reversed", self, y, move |dy| dy.cumsum(dim))
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn running_sums_have_their_derivatives() {
        for dim in [0, 1, -1] {
            check_twice(&[&[3, 4, 2]], |v| v[0].cumsum(dim)?.tanh());
        }
    }
}
