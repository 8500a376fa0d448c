//! [`Buffer`]: a tensor that belongs to a module and is saved with it, but is not trained.

use std::sync::{Arc, PoisonError, RwLock};

use phalanx_kernels as kernels;
use phalanx_tensor::{Category, Tensor};

use crate::Result;

/// A running statistic or another persistent tensor. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<RwLock<Tensor>>);

impl Buffer {
    /// A buffer that holds `tensor`.
    pub fn new(tensor: Tensor) -> Buffer {
        Buffer(Arc::new(RwLock::new(tensor.tagged(Category::Buffers))))
    }

    /// The tensor it holds.
    pub fn tensor(&self) -> Tensor {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets it hold another tensor.
    pub fn set(&self, tensor: Tensor) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = tensor.tagged(Category::Buffers);
    }

    /// Copies values into the tensor it holds, converted to its dtype and moved to its device.
    ///
    /// # Errors
    /// If the shape differs.
    pub fn load(&self, values: &Tensor) -> Result<()> {
        let mut held = self.tensor();
        let values = kernels::cast(&values.to_device(held.device(), false)?, held.dtype())?;
        Ok(kernels::copy_(&mut held, &values)?)
    }
}
