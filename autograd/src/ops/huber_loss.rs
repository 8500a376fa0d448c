//! `d² / 2` where `|d| < delta`, else `delta (|d| - delta / 2)`, of `d = x - t`, elementwise and broadcast, then reduced.
//!
//! Derivative: `dx = dy d` where `|d| < delta`, else `dy delta sign(d)`, `dt = -dx`. Saves both. The elements' losses are
//! rounded once, and so are their gradients.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Error, Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use crate::{Result, Var, begins};

impl Var {
    /// The difference to `target`, squared up to `delta` and linear beyond; usually `delta` is 1.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, the dtype is no floating-point one, or `delta` is not positive.
    pub fn huber_loss(&self, target: &Var, delta: f64, reduction: Reduction) -> Result<Var> {
        begins();
        if delta.is_nan() || delta <= 0.0 {
            return Err(Error::range("huber_loss", format!("delta {delta}"), "a number above 0").into());
        }
        let y = kernels::huber_loss(self.tensor(), target.tensor(), delta)?;
        broadcasting(&[self, target], y, HuberLoss { delta })?.reduce(reduction)
    }
}

struct HuberLoss {
    delta: f64,
}

impl Broadcasting for HuberLoss {
    const NAME: &'static str = "huber_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::huber_loss_backward(x[0].tensor(), x[1].tensor(), dy, self.delta)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        let linear = super::abs::signed(&d, dy)?.mul_scalar(self.delta)?;
        dy.mul(&d)?.where_(&d.abs()?.lt_scalar(self.delta)?, &linear)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn both_sides_of_delta_follow_the_formula_and_derivatives_hold() {
        let x = Var::from_slice(&[0.0, 0.5, -2.0, 3.0], &[4], Device::CPU).unwrap();
        let zero = Var::scalar(0.0, Device::CPU).unwrap();
        let y = x.huber_loss(&zero, 2.0, Reduction::None).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(y, [0.0, 0.125, 2.0, 4.0]);
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            check_twice(&[&[2, 3], &[3]], |v| v[0].square()?.huber_loss(&v[1], 0.4, reduction));
        }
        for delta in [0.0, -1.0, f64::NAN] {
            assert!(x.huber_loss(&zero, delta, Reduction::Mean).is_err());
        }
    }
}
