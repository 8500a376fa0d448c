//! What a loss makes of its items' losses.

use phalanx_kernels::Reduction;
use phalanx_tensor::Error;

use crate::{Result, Var};

impl Var {
    /// All elements as they are, their mean or their sum.
    pub(crate) fn reduce(&self, reduction: Reduction) -> Result<Var> {
        match reduction {
            Reduction::None => Ok(self.clone()),
            Reduction::Mean => self.mean_all(),
            Reduction::Sum => self.sum_all(),
        }
    }
}

/// Refuses an input and a target of different shapes: broadcast, each element would meet others than its own.
pub(super) fn one_shape(op: &'static str, x: &Var, target: &Var) -> Result<()> {
    if x.tensor().same_shape(target.tensor()) {
        return Ok(());
    }
    let got = format!("an input of shape {:?} and a target of shape {:?}", x.shape(), target.shape());
    Err(Error::shape(op, got, "one shape for both").into())
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::{KlReduction, KlTarget};
    use crate::{Result, Var};

    #[test]
    fn losses_of_different_shapes_are_refused_and_not_broadcast() {
        let zeros = |shape: &[usize]| Var::new(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap());
        let (x, t) = (zeros(&[2]), zeros(&[2, 1]));
        let mean = Reduction::Mean;
        let losses: [(&str, Result<Var>); 5] = [
            ("mse_loss", x.mse_loss(&t, mean)),
            ("l1_loss", x.l1_loss(&t, mean)),
            ("smooth_l1_loss", x.smooth_l1_loss(&t, 1.0, mean)),
            ("binary_cross_entropy_with_logits", x.binary_cross_entropy_with_logits(&t, None, None, mean)),
            ("kl_div", x.kl_div(&t, KlTarget::Probabilities, KlReduction::BatchMean)),
        ];
        for (name, loss) in losses {
            let error = loss.unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name}: got an input of shape [2] and a target of shape [2, 1]")),
                "{error}"
            );
        }
        let large = zeros(&[3, 2]);
        for (weight, positive) in [(Some(&large), None), (None, Some(&large))] {
            let error =
                x.binary_cross_entropy_with_logits(&x, weight, positive, mean).unwrap_err().to_string();
            assert!(error.contains("[3, 2]") && error.contains("broadcasts to [2]"), "{error}");
        }
        assert!(x.smooth_l1_loss(&x, -1.0, mean).unwrap_err().to_string().contains("beta"));
    }
}
