//! `y = x` in another dtype.
//!
//! Derivative: between floating-point dtypes `dx = dy` in `x`'s dtype; integers and bools have none. Nothing is
//! saved.

use phalanx_kernels as kernels;
use phalanx_tensor::DType;

use crate::{Backward, Cx, Grads, Result, Saver, Var, grads1, record, record_none};

impl Var {
    /// The values in another dtype: floats round to nearest even, float to integer truncates (saturating, NaN to
    /// 0), anything to bool is `x != 0`.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn to(&self, dtype: DType) -> Result<Var> {
        let from = self.dtype();
        if from == dtype {
            return Ok(self.clone());
        }
        let y = kernels::cast(self.tensor(), dtype)?;
        if !dtype.is_float() {
            return record_none("to", &[self], y);
        }
        record("to", &[self], y, |_: &Saver<'_>| Ok(To { from }))
    }
}

struct To {
    from: DType,
}

impl Backward for To {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().to(self.from)?)
    }

    fn is_view(&self) -> bool {
        true
    }
}
