//! Linear maps of one input: views, copies, sums.
//!
//! Derivative: the transposed map, applied to `dy`. It depends on sizes and arguments only, so no values are saved.

use phalanx_tensor::Tensor;

use crate::{Backward, Cx, Grads, Result, Saver, Var, grads1, record};

/// Records `y`, a linear map of `x` that moves elements about, given the transposed map.
pub(super) fn record_view(
    name: &'static str,
    x: &Var,
    y: Tensor,
    transposed: impl Fn(&Var) -> Result<Var> + Send + Sync + 'static,
) -> Result<Var> {
    record(name, &[x], y, |_: &Saver<'_>| Ok(LinearMap { transposed, is_view: true }))
}

/// Records `y`, any linear map of `x`, given the transposed map.
pub(super) fn record_linear(
    name: &'static str,
    x: &Var,
    y: Tensor,
    transposed: impl Fn(&Var) -> Result<Var> + Send + Sync + 'static,
) -> Result<Var> {
    record(name, &[x], y, |_: &Saver<'_>| Ok(LinearMap { transposed, is_view: false }))
}

struct LinearMap<F> {
    transposed: F,
    is_view: bool,
}

impl<F: Fn(&Var) -> Result<Var> + Send + Sync> Backward for LinearMap<F> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1((self.transposed)(cx.dy())?)
    }

    fn is_view(&self) -> bool {
        self.is_view
    }
}
