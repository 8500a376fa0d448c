//! [`Averaged`]: the averages of the weights in the weights' place, for a while.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_tensor::Tensor;

use crate::Result;

/// While it lives, the model has the averages of its weights.
#[must_use = "the weights come back when it is dropped"]
pub struct Averaged {
    weights: Vec<(Parameter, Tensor)>,
    share: Arc<dyn DataParallel>,
}

impl Averaged {
    pub(crate) fn new(averages: Vec<(Parameter, Tensor)>, share: Arc<dyn DataParallel>) -> Result<Averaged> {
        let mut weights = Vec::new();
        for (parameter, average) in averages {
            weights.push((parameter.clone(), parameter.tensor().copy()?));
            kernels::copy_(&mut parameter.tensor(), &kernels::cast(&average, parameter.dtype())?)?;
        }
        share.updated()?;
        Ok(Averaged { weights, share })
    }

    fn put_back(&self) -> Result<()> {
        for (parameter, weights) in &self.weights {
            kernels::copy_(&mut parameter.tensor(), weights)?;
        }
        Ok(self.share.updated()?)
    }
}

impl Drop for Averaged {
    fn drop(&mut self) {
        // What a rank that is gone does not hear ends the run at the next step.
        let _ = self.put_back();
    }
}
