//! Values in another dtype, on another device, or in row-major order.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device};

use super::frame::record_view;
use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SaveContext, Var, begins, grads1, record, record_none,
};

/// `y = x` in another dtype.
///
/// Derivative: between floating-point dtypes `dx = dy` in `x`'s dtype; integers and bools have none. Nothing is saved. If
/// `x` is rematerialized, so is `y` ([`Rematerialized`]).
impl Var {
    /// The values in another dtype: floats round to nearest even, float to integer truncates (saturating, NaN to
    /// 0), anything to bool is `x != 0`.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn to(&self, dtype: DType) -> Result<Var> {
        begins();
        let from = self.dtype();
        if from == dtype {
            return Ok(self.clone());
        }
        let y = kernels::cast(self.tensor(), dtype)?;
        if !dtype.is_float() {
            return record_none("to", &[self], y);
        }
        record("to", &[self], y, |s: &SaveContext<'_>| {
            Ok(To {
                from,
                rematerialized: s.rematerialized_of_rematerialized([0], move |x| kernels::cast(&x[0], dtype)),
            })
        })
    }
}

struct To {
    from: DType,
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for To {
    const REMATERIALIZES: bool = true;

    fn rematerialized(&self, _: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref()
    }

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().to(self.from)?)
    }

    fn is_view(&self) -> bool {
        true
    }
}

/// Copies: to another device, or into row-major order.
///
/// Derivative: `dy` copied back to the device it came from; `dy` itself.
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
