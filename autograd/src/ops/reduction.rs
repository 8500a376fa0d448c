//! What a loss makes of its items' losses.

use phalanx_kernels::Reduction;

use crate::{Result, Var};

impl Var {
    /// All elements as they are, their mean or their sum.
    pub(crate) fn reduce(&self, reduction: Reduction) -> Result<Var> {
        match reduction {
            Reduction::None => Ok(self.clone()),
            Reduction::Mean => self.mean_all(),
            Reduction::Sum => self.sum_all(),
        }
    }
}
