//! The negative log likelihood of class indices [N, ...] under log probabilities [N, C, ...].
//!
//! An item's loss is `-w[y] x[y]`; the mean divides by the sum of `w[y]` over the items that count. Derivative:
//! `dx[y] = -w[y] dy`, times the item's share in the result. Losses are added in f64, items in order.

use phalanx_kernels as kernels;
use phalanx_tensor::Tensor;

pub use phalanx_kernels::NllLoss;

use super::cross_entropy::beside_classes;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

impl Var {
    /// The loss of these log probabilities and i64 targets, which may hold `ignore_index`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or a target is no class.
    pub fn nll_loss(&self, target: &Var, config: &NllLoss) -> Result<Var> {
        begins();
        let y = kernels::nll_loss(self.tensor(), target.tensor(), config)?;
        record("nll_loss", &[self], y, |s: &Saver<'_>| {
            // Only the shape of x is used.
            Ok(Recorded { x: s.input(0)?, target: target.tensor().clone(), config: config.clone() })
        })
    }
}

struct Recorded {
    x: SavedVariable,
    target: Tensor,
    config: NllLoss,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dy) = (cx.get(&self.x)?, cx.dy());
        let slope = |dy: &Tensor| kernels::nll_loss_backward(x.tensor(), &self.target, dy, &self.config);
        if !cx.create_graph() {
            return grads1(Var::new(slope(dy.tensor())?));
        }
        let ones = kernels::full(dy.shape(), 1.0, dy.dtype(), dy.device())?;
        grads1(Var::new(slope(&ones)?).mul(&beside_classes(dy)?)?)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::NllLoss;
    use crate::Var;
    use crate::ops::Reduction;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let target = Var::from_slice(&[1i64, 0, 2, -100], &[2, 2], Device::CPU).unwrap();
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            let config = NllLoss { reduction, ..NllLoss::default() };
            check_twice(&[&[2, 3, 2]], |v| v[0].nll_loss(&target, &config));
        }
    }
}
