//! Copies: to another device, or into row-major order.
//!
//! Derivative: `dy` copied back to the device it came from; `dy` itself.

use phalanx_tensor::Device;

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// A copy on `device`; itself if it is there already.
    ///
    /// # Errors
    /// If the copy cannot be allocated, or elements are wanted of a `meta` tensor.
    pub fn to_device(&self, device: Device) -> Result<Var> {
        let from = self.device();
        if device == from {
            return Ok(self.clone());
        }
        let y = self.tensor().to_device(device, false)?;
        record_view("to_device", self, y, move |dy| dy.to_device(from))
    }

    /// The elements in row-major order without gaps; itself if they lie so already.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn contiguous(&self) -> Result<Var> {
        if self.tensor().is_contiguous() {
            return Ok(self.clone());
        }
        record_view("contiguous", self, self.tensor().contiguous()?, |dy| Ok(dy.clone()))
    }
}
