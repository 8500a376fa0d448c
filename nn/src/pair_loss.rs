//! Losses of three tensors as values: settings once, then `forward` with all three.

use phalanx_autograd::{GaussianNll, Reduction, TripletMargin, Var};

use crate::Result;

macro_rules! losses {
    ($($(#[$doc:meta])* $name:ident, |$self:ident, $a:ident, $b:ident, $c:ident| $forward:expr, { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr),* $(,)? };)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default),* }
            }
        }

        impl $name {
            /// The loss: a scalar, or with `Reduction::None` one an item.
            ///
            /// # Errors
            /// If the three do not fit.
            pub fn forward(&$self, $a: &Var, $b: &Var, $c: &Var) -> Result<Var> {
                Ok($forward?)
            }
        }
    )*};
}

losses! {
    /// The negative log likelihood of targets under normal distributions: `forward(mean, target, variance)`; see
    /// [`Var::gaussian_nll_loss`].
    GaussianNllLoss, |self, x, t, variance| {
        let GaussianNllLoss { full, eps, reduction } = *self;
        x.gaussian_nll_loss(t, variance, &GaussianNll { full, eps, reduction })
    }, {
        /// Whether the constant `ln(2 pi) / 2` is added.
        full: bool = false,
        /// The smallest variance that is used.
        eps: f64 = 1e-6,
        /// What becomes of the elements' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Vectors that should point the same way (target 1) or not (-1): `forward(a, b, target)`; see
    /// [`Var::cosine_embedding_loss`].
    CosineEmbeddingLoss, |self, a, b, target| a.cosine_embedding_loss(b, target, self.margin, self.reduction), {
        /// The cosine from which vectors that should not are punished.
        margin: f64 = 0.0,
        /// What becomes of the items' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Which of two scores should be the larger one, the first (target 1) or the second (-1): `forward(a, b, target)`; see
    /// [`Var::margin_ranking_loss`].
    MarginRankingLoss, |self, a, b, target| a.margin_ranking_loss(b, target, self.margin, self.reduction), {
        /// By how much.
        margin: f64 = 0.0,
        /// What becomes of the items' losses.
        reduction: Reduction = Reduction::Mean,
    };
    /// Anchors that should be nearer to the positive than to the negative: `forward(anchor, positive, negative)`; see
    /// [`Var::triplet_margin_loss`].
    TripletMarginLoss, |self, anchor, positive, negative| {
        let TripletMarginLoss { margin, p, eps, swap, reduction } = *self;
        anchor.triplet_margin_loss(positive, negative, &TripletMargin { margin, p, eps, swap, reduction })
    }, {
        /// By how much.
        margin: f64 = 1.0,
        /// The order of the distance's norm.
        p: f64 = 2.0,
        /// Added to each element of a difference.
        eps: f64 = 1e-6,
        /// Whether the negative's distance to the positive counts where it is the smaller one.
        swap: bool = false,
        /// What becomes of the items' losses.
        reduction: Reduction = Reduction::Mean,
    };
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    #[test]
    fn settings_reach_the_operations() {
        let make = |values: &[f64]| Var::from_slice(values, &[1, 2], Device::CPU).unwrap();
        let (a, b, c) = (make(&[1.0, 0.0]), make(&[0.0, 2.0]), make(&[1.0, 4.0]));
        let one = Var::from_slice(&[-1i64], &[1], Device::CPU).unwrap();
        let item = |y: Result<Var>| y.unwrap().sum_all().unwrap().item::<f64>().unwrap();
        let none = Reduction::None;
        let far = TripletMarginLoss { margin: 2.0, p: 1.0, eps: 0.0, reduction: none, swap: true };
        assert_eq!(item(far.forward(&a, &b, &c)), 3.0 - 3.0 + 2.0);
        let apart = CosineEmbeddingLoss { margin: -0.5, reduction: Reduction::Sum };
        assert!((item(apart.forward(&a, &b, &one)) - 0.5).abs() < 1e-9);
        let ranked = MarginRankingLoss { margin: 3.0, reduction: none };
        assert_eq!(item(ranked.forward(&a, &b, &c)), 2.0 + 11.0);
        let normal = GaussianNllLoss { reduction: Reduction::Sum, ..GaussianNllLoss::default() };
        let wanted = 0.5 * ((1.0 + 4f64.ln()) + 4.0 / 4.0);
        assert!((item(normal.forward(&a, &b, &c)) - wanted).abs() < 1e-12);
    }
}
