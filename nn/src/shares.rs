//! Gradients of several shares of a batch, each a chain of its own, added in order.

use phalanx_kernels as kernels;
use phalanx_tensor::Tensor;

use crate::{Parameter, Result};

/// Sums whole gradients in the order in which shares are added: what a data-parallel group does, on one device.
///
/// For each share: run its micro-batches backward, then [`ShareSum::add`]. At the end [`ShareSum::finish`] gives every
/// parameter the sum.
#[derive(Default)]
pub struct ShareSum {
    sums: Vec<Option<Tensor>>,
}

impl ShareSum {
    /// Nothing added yet.
    pub fn new() -> ShareSum {
        ShareSum::default()
    }

    /// Takes the parameters' gradients away and adds them. The parameters are the same, in the same order, each time.
    ///
    /// # Errors
    /// If a gradient cannot be written.
    pub fn add(&mut self, parameters: &[Parameter]) -> Result<()> {
        self.sums.resize(parameters.len(), None);
        for (sum, parameter) in self.sums.iter_mut().zip(parameters) {
            let Some(grad) = parameter.take_grad()? else { continue };
            match sum {
                Some(sum) => kernels::accumulate_(sum, &grad)?,
                None => *sum = Some(grad),
            }
        }
        Ok(())
    }

    /// Gives the parameters the sums as their gradients.
    pub fn finish(self, parameters: &[Parameter]) {
        parameters.iter().zip(self.sums).for_each(|(parameter, sum)| parameter.set_grad(sum));
    }
}
