//! Losses as values, like PyTorch's loss modules: `forward(input, target)` by the trait [`Loss`], or `forward` of three tensors. Beside
//! them [`ClassesLast`], for logits `[.., C]`.

use phalanx_autograd::{
    CrossEntropy as CrossEntropyNumbers, GaussianNll, KlReduction, KlTarget, NllLoss, PoissonNll, Reduction,
    TripletMargin, Var,
};
use phalanx_tensor::Tensor;

use crate::{Error, Result};

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
        /// A weight for each class.
        weight: Option<Tensor> = None,
        /// Items with this target are ignored.
        ignore_index: i64 = -100,
        /// The share of the target that is spread evenly over all classes.
        label_smoothing: f64 = 0.0,
        /// How the items' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Squared differences of `x` and `t` of one shape; a scalar, or with `Reduction::None` that shape.
    MseLoss, |self, x, t| x.mse_loss(t, self.reduction), {
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Absolute differences of `x` and `t` of one shape; a scalar, or with `Reduction::None` that shape.
    L1Loss, |self, x, t| x.l1_loss(t, self.reduction), {
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Squared differences where they are small, absolute ones where they are large, of `x` and `t` of one shape; a
    /// scalar, or with `Reduction::None` that shape.
    SmoothL1Loss, |self, x, t| x.smooth_l1_loss(t, self.beta, self.reduction), {
        /// The difference at which the two pieces meet.
        beta: f64 = 1.0,
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Cross entropy of two outcomes, of logits `x` and probabilities `t` of one shape, in nats; a scalar, or with
    /// `Reduction::None` that shape.
    BceWithLogitsLoss,
    |self, x, t| x.binary_cross_entropy_with_logits(t, self.weight.as_ref(), self.pos_weight.as_ref(), self.reduction), {
        /// A weight for each element.
        weight: Option<Var> = None,
        /// A weight of positive targets.
        pos_weight: Option<Var> = None,
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// The Kullback-Leibler divergence of a target from an input of logarithms, of one shape, in nats; a scalar, or
    /// with `Reduction::None` that shape.
    KlDivLoss, |self, x, t| x.kl_div(t, self.target, self.reduction), {
        /// What the target's elements are.
        target: KlTarget = KlTarget::Probabilities,
        /// How the elements' losses are reduced.
        reduction: KlReduction = KlReduction::Elements(Reduction::Mean),
    };
    /// Squared differences up to `delta`, linear ones beyond, of `x` and `t` of one shape; a scalar, or with
    /// `Reduction::None` that shape.
    HuberLoss, |self, x, t| x.huber_loss(t, self.delta, self.reduction), {
        /// The difference at which the two pieces meet.
        delta: f64 = 1.0,
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Cross entropy of two outcomes, of probabilities `x` and `t` of one shape, in nats; a scalar, or with
    /// `Reduction::None` that shape. Of logits use [`BceWithLogitsLoss`].
    BceLoss, |self, x, t| x.binary_cross_entropy(t, self.weight.as_ref(), self.reduction), {
        /// A weight for each element.
        weight: Option<Var> = None,
        /// How the elements' losses are reduced.
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
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Distances that should be small (target 1) or at least `margin` (-1); a scalar, or with `Reduction::None` one an element.
    HingeEmbeddingLoss, |self, x, t| x.hinge_embedding_loss(t, self.margin, self.reduction), {
        /// How large.
        margin: f64 = 1.0,
        /// How the elements' losses are reduced.
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

/// A loss of class indices whose classes are the *last* dimension of its input: logits `[B, T, C]` and targets `[B, T]`, of a
/// language model. Without it the losses take the classes at dimension 1, as PyTorch does: `[N, C, ..]` and `[N, ..]`.
///
/// ```
/// use phalanx_nn::autograd::Var;
/// use phalanx_nn::tensor::Device;
/// use phalanx_nn::{CrossEntropyLoss, Loss};
/// let logits = Var::from_slice(&[0f32; 2 * 3 * 5], &[2, 3, 5], Device::CPU)?;
/// let targets = Var::from_slice(&[0i64, 1, 2, 3, 4, 0], &[2, 3], Device::CPU)?;
/// let loss = CrossEntropyLoss::default().classes_last().forward(&logits, &targets)?;
/// assert!((loss.item::<f32>()? - 5f32.ln()).abs() < 1e-6);
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ClassesLast<L>(pub L);

impl CrossEntropyLoss {
    /// The same loss of logits `[.., C]` and class indices `[..]`.
    pub fn classes_last(self) -> ClassesLast<CrossEntropyLoss> {
        ClassesLast(self)
    }
}

/// Of logits `[.., C]` and class indices `[..]`; a scalar, or with `Reduction::None` `[..]`.
impl Loss for ClassesLast<CrossEntropyLoss> {
    fn forward(&self, x: &Var, t: &Var) -> Result<Var> {
        last("CrossEntropyLoss", &self.0, self.0.reduction, x, t)
    }
}

/// Of logarithms of probabilities `[.., C]` and class indices `[..]`; a scalar, or with `Reduction::None` `[..]`.
impl Loss for ClassesLast<NllLoss> {
    fn forward(&self, x: &Var, t: &Var) -> Result<Var> {
        last("NllLoss", &self.0, self.0.reduction, x, t)
    }
}

fn last(name: &str, loss: &impl Loss, reduction: Reduction, x: &Var, t: &Var) -> Result<Var> {
    let Some((&classes, items)) = x.shape().split_last().filter(|(_, items)| *items == t.shape()) else {
        let why = format!(
            "got an input of shape {:?} and targets of shape {:?}, wanted [.., C] and [..]",
            x.shape(),
            t.shape()
        );
        return Err(Error::invalid(format!("{name}, classes last"), why));
    };
    let count = t.numel();
    let y = loss.forward(&x.reshape_to(&[count, classes])?, &t.reshape_to(&[count])?)?;
    if reduction == Reduction::None { Ok(y.reshape_to(items)?) } else { Ok(y) }
}

/// Refuses targets that fit only if the classes are the last dimension. The error names [`ClassesLast`].
pub(crate) fn check_first(name: &str, x: &Var, t: &Var) -> Result<()> {
    let shape = x.shape();
    let (Some((_, items)), true) = (shape.split_last(), shape.len() > 2) else { return Ok(()) };
    if items != t.shape() || (shape[0] == items[0] && shape[2..] == items[1..]) {
        return Ok(());
    }
    let wanted = [&shape[..1], &shape[2..]].concat();
    let why = format!(
        "got an input of shape {shape:?}, whose classes are dimension 1, and targets of shape {items:?}, wanted {wanted:?}; \
         if the classes come last, use `ClassesLast({name} {{ .. }})`"
    );
    Err(Error::invalid(name, why))
}

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
        /// How the elements' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Vectors that should point the same way (target 1) or not (-1): `forward(a, b, target)`; see
    /// [`Var::cosine_embedding_loss`].
    CosineEmbeddingLoss, |self, a, b, target| a.cosine_embedding_loss(b, target, self.margin, self.reduction), {
        /// The cosine from which vectors that should not are punished.
        margin: f64 = 0.0,
        /// How the items' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
    /// Which of two scores should be the larger one, the first (target 1) or the second (-1): `forward(a, b, target)`; see
    /// [`Var::margin_ranking_loss`].
    MarginRankingLoss, |self, a, b, target| a.margin_ranking_loss(b, target, self.margin, self.reduction), {
        /// By how much.
        margin: f64 = 0.0,
        /// How the items' losses are reduced.
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
        /// How the items' losses are reduced.
        reduction: Reduction = Reduction::Mean,
    };
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

    fn logits(shape: &[usize]) -> Var {
        let values: Vec<f64> = (0..shape.iter().product()).map(|i| (i as f64 * 0.7).sin()).collect();
        Var::from_slice(&values, shape, Device::CPU).unwrap()
    }

    fn targets(shape: &[usize]) -> Var {
        let values: Vec<i64> = (0..shape.iter().product()).map(|i| (i % 3) as i64).collect();
        Var::from_slice(&values, shape, Device::CPU).unwrap()
    }

    #[test]
    fn classes_at_the_end_are_those_at_dimension_1_moved() {
        // With T = C both readings fit; each loss takes its own.
        for (shape, t) in [(&[2, 4, 3][..], &[2, 4][..]), (&[2, 3, 3], &[2, 3]), (&[5, 3], &[5]), (&[3], &[])]
        {
            let (x, t) = (logits(shape), targets(t));
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                let loss =
                    CrossEntropyLoss { reduction, label_smoothing: 0.1, ..CrossEntropyLoss::default() };
                let got = loss.clone().classes_last().forward(&x, &t).unwrap();
                let moved = if x.rank() == 3 { x.transpose(1, 2).unwrap() } else { x.clone() };
                let (moved, flat) = match x.rank() {
                    1 => (moved.reshape(&[1, 3]).unwrap(), t.reshape(&[1]).unwrap()),
                    _ => (moved, t.clone()),
                };
                let want = loss.forward(&moved, &flat).unwrap();
                let (g, w): (Vec<f64>, Vec<f64>) = (got.to_vec().unwrap(), want.to_vec().unwrap());
                assert!(g.iter().zip(&w).all(|(a, b)| (a - b).abs() < 1e-12), "{shape:?}: {g:?}, {w:?}");
                assert_eq!(got.shape(), if reduction == Reduction::None { t.shape() } else { &[] });
            }
            let likely = ClassesLast(NllLoss::default()).forward(&x.log_softmax(-1).unwrap(), &t).unwrap();
            let entropy = ClassesLast(CrossEntropyLoss::default()).forward(&x, &t).unwrap();
            assert!((likely.item::<f64>().unwrap() - entropy.item::<f64>().unwrap()).abs() < 1e-12);
        }
    }

    #[test]
    fn targets_that_fit_only_the_other_reading_name_the_loss_that_takes_them() {
        let (x, t) = (logits(&[2, 4, 3]), targets(&[2, 4]));
        for error in [CrossEntropyLoss::default().forward(&x, &t), NllLoss::default().forward(&x, &t)] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("[2, 4, 3]") && text.contains("wanted [2, 3]"), "{text}");
            assert!(text.contains("ClassesLast"), "{text}");
        }
        let error = CrossEntropyLoss::default().classes_last().forward(&x, &targets(&[2, 3])).unwrap_err();
        assert!(error.to_string().contains("[.., C]"), "{error}");
        assert!(CrossEntropyLoss::default().forward(&x, &targets(&[2, 3])).is_ok());
    }

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
