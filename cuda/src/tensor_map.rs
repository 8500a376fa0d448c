//! [`Boxes`]: how bulk copies of compute capability 9.0 take a tensor apart. [`TensorMap`]: the same in the GPU's own form.

use crate::context::Context;
use crate::{Result, driver};

/// A tensor of 16-bit elements in four dimensions, innermost first, and the boxes of it that kernels copy to shared memory. A box's
/// rows are permuted there as a swizzle of 128 bytes does; what a box has outside of the tensor are zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boxes {
    /// The number of elements along each dimension: 1 to 2^32.
    pub sizes: [u64; 4],
    /// Bytes between neighbours along each dimension but the first: multiples of 16 below 2^40.
    pub strides: [u64; 3],
    /// Columns (at most 64) and rows (at most 256) of a box, which is one element wide in the other dimensions.
    pub window: [u32; 2],
}

/// A `CUtensorMap`.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(pub(crate) [u64; 16]);

impl Context {
    /// The map of a tensor at an address (a multiple of 16) of this device.
    ///
    /// # Errors
    /// If the driver refuses it, or has none.
    pub fn tensor_map(&self, op: &'static str, address: u64, boxes: &Boxes) -> Result<TensorMap> {
        let made = driver::tensor_map(address, boxes.sizes, boxes.strides, boxes.window);
        made.map(TensorMap).map_err(|why| self.failed(op, &why))
    }
}
