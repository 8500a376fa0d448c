//! `y = x` in another dtype.
//!
//! Derivative: between floating-point dtypes `dx = dy` in `x`'s dtype; integers and bools have none. Nothing is saved; of an
//! `x` that is made again `y` is so too ([`Rematerialized`]).

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::DType;

use crate::{Backward, Cx, Grads, Rematerialized, Result, Saver, Var, begins, grads1, record, record_none};

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
        record("to", &[self], y, |s: &Saver<'_>| {
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
