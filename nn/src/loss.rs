//! Losses as values: settings once, then `forward(input, target)`.

use phalanx_autograd::{
    CrossEntropy as CrossEntropyNumbers, KlReduction, KlTarget, NllLoss, PoissonNll, Reduction, Var,
};
use phalanx_tensor::Tensor;

use crate::Result;
use crate::classes_last::check_first;

/// A loss of an input and a target.
pub trait Loss {
    /// The loss.
    ///
    /// # Errors
    /// If input and target do not fit.
    fn forward(&self, input: &Var, target: &Var) -> Result<Var>;
}

macro_rules! losses {
    ($($(#[$doc:meta])* $name:ident, |$self:ident, $x:ident, $t:ident| $forward:expr, { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr),* $(,)? };)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default),* }
            }
        }

        impl Loss for $name {
            fn forward(&$self, $x: &Var, $t: &Var) -> Result<Var> {
                Ok($forward?)
            }
        }
    )*};
}

losses! {
    /// Of logits `[N, C, ..]` and class indices `[N, ..]` (i64), in nats; a scalar, or with `Reduction::None` `[N, ..]`.
    /// Where the classes are the last dimension, as in `[B, T, C]`: [`CrossEntropyLoss::classes_last`].
    CrossEntropyLoss,
    |self, x, t| check_first("CrossEntropyLoss", x, t).and_then(|()| Ok(x.cross_entropy(t, &self.numbers())?)), {
        /// A weight a class.
        weight: Option<Tensor> = None,
        /// Items with this target do not count.
        ignore_index: i64 = -100,
        /// The share of the target that is spread evenly over all classes.
        label_smoothing: f64 = 0.0,
        /// What becomes of the items' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Squared differences of `x` and `t` of one shape; a scalar, or with `Reduction::None` that shape.
    MseLoss, |self, x, t| x.mse_loss(t, self.reduction), {
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Absolute differences of `x` and `t` of one shape; a scalar, or with `Reduction::None` that shape.
    L1Loss, |self, x, t| x.l1_loss(t, self.reduction), {
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Squared differences where they are small, absolute ones where they are large, of `x` and `t` of one shape; a
    /// scalar, or with `Reduction::None` that shape.
    SmoothL1Loss, |self, x, t| x.smooth_l1_loss(t, self.beta, self.reduction), {
        /// Where the two meet.
        beta: f64 = 1.0,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Cross entropy of two outcomes, of logits `x` and probabilities `t` of one shape, in nats; a scalar, or with
    /// `Reduction::None` that shape.
    BceWithLogitsLoss,
    |self, x, t| x.binary_cross_entropy_with_logits(t, self.weight.as_ref(), self.pos_weight.as_ref(), self.reduction), {
        /// A weight an element.
        weight: Option<Var> = None,
        /// A weight of positive targets.
        pos_weight: Option<Var> = None,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// The Kullback-Leibler divergence of a target from an input of logarithms, of one shape, in nats; a scalar, or
    /// with `Reduction::None` that shape.
    KlDivLoss, |self, x, t| x.kl_div(t, self.target, self.reduction), {
        /// What the target holds.
        target: KlTarget = KlTarget::Probabilities,
        /// What becomes of the elements' losses.
        reduction: KlReduction = KlReduction::Elements(Reduction::Mean),
    };
    /// Squared differences up to `delta`, linear ones beyond, of `x` and `t` of one shape; a scalar, or with
    /// `Reduction::None` that shape.
    HuberLoss, |self, x, t| x.huber_loss(t, self.delta, self.reduction), {
        /// Where the two meet.
        delta: f64 = 1.0,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Cross entropy of two outcomes, of probabilities `x` and `t` of one shape, in nats; a scalar, or with
    /// `Reduction::None` that shape. Of logits use [`BceWithLogitsLoss`].
    BceLoss, |self, x, t| x.binary_cross_entropy(t, self.weight.as_ref(), self.reduction), {
        /// A weight an element.
        weight: Option<Var> = None,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// The negative log likelihood of counts under Poisson distributions; a scalar, or with `Reduction::None` one an element.
    PoissonNllLoss, |self, x, t| {
        let PoissonNllLoss { log_input, full, eps, reduction } = *self;
        x.poisson_nll_loss(t, &PoissonNll { log_input, full, eps, reduction })
    }, {
        /// Whether the input is the logarithm of the rate.
        log_input: bool = true,
        /// Whether Stirling's approximation of `ln t!` is added.
        full: bool = false,
        /// Added to a rate before its logarithm is taken.
        eps: f64 = 1e-8,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Distances that should be small (target 1) or at least `margin` (-1); a scalar, or with `Reduction::None` one an element.
    HingeEmbeddingLoss, |self, x, t| x.hinge_embedding_loss(t, self.margin, self.reduction), {
        /// How large.
        margin: f64 = 1.0,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
}

impl CrossEntropyLoss {
    fn numbers(&self) -> CrossEntropyNumbers {
        CrossEntropyNumbers {
            weight: self.weight.clone(),
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing,
            reduction: self.reduction,
            scale: 1.0,
            wide: false,
        }
    }
}

/// Of logarithms of probabilities `[N, C, ..]` and class indices `[N, ..]`; see [`ClassesLast`](crate::ClassesLast) for `[.., C]`.
impl Loss for NllLoss {
    fn forward(&self, x: &Var, t: &Var) -> Result<Var> {
        check_first("NllLoss", x, t)?;
        Ok(x.nll_loss(t, self)?)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    #[test]
    fn cross_entropy_is_the_likelihood_of_the_softmax() {
        let x = Var::from_slice(&[0.5, -1.0, 2.0, 0.1, 0.2, 0.3], &[2, 3], Device::CPU).unwrap();
        let t = Var::from_slice(&[2i64, 0], &[2], Device::CPU).unwrap();
        let whole: f64 = CrossEntropyLoss::default().forward(&x, &t).unwrap().item().unwrap();
        let likelihood = NllLoss::default().forward(&x.log_softmax(1).unwrap(), &t).unwrap();
        assert!((whole - likelihood.item::<f64>().unwrap()).abs() < 1e-12);
        let sum = CrossEntropyLoss { reduction: Reduction::Sum, ..CrossEntropyLoss::default() };
        assert!((sum.forward(&x, &t).unwrap().item::<f64>().unwrap() - 2.0 * whole).abs() < 1e-12);
    }
}
