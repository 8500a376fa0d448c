//! Losses that want a margin between distances, and the distances.

use phalanx_kernels::Reduction;
use phalanx_tensor::{DType, Dim, Dims, Error, Tensor, broadcast_shapes};

use super::frame::{as_number, broadcasts, composed, floats};
use crate::{Result, Var};

// Losses that want a distance of at least a margin: `margin_ranking_loss`, `hinge_embedding_loss`, `cosine_embedding_loss`,
// `triplet_margin_loss`.
//
// Composed of differentiable operations, in f32 for the halves. Where the margin is just met the derivative is 0.

/// How [`Var::triplet_margin_loss`] measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TripletMargin {
    /// By how much the negative is to be farther than the positive.
    pub margin: f64,
    /// The order of the norm of a difference.
    pub p: f64,
    /// Added to each element of a difference.
    pub eps: f64,
    /// Whether the negative's distance to the positive counts where it is the smaller one.
    pub swap: bool,
    /// What becomes of the items' losses.
    pub reduction: Reduction,
}

impl Default for TripletMargin {
    fn default() -> TripletMargin {
        TripletMargin { margin: 1.0, p: 2.0, eps: 1e-6, swap: false, reduction: Reduction::Mean }
    }
}

impl Var {
    /// `max(0, margin - target (self - other))`: for a target of 1 this should be the larger one, for -1 `other`. All
    /// broadcast.
    ///
    /// # Errors
    /// If the numbers of dimensions differ, the shapes do not broadcast, dtypes or devices differ, or the dtype is no
    /// floating-point one.
    pub fn margin_ranking_loss(
        &self,
        other: &Var,
        target: &Var,
        margin: f64,
        reduction: Reduction,
    ) -> Result<Var> {
        const OP: &str = "margin_ranking_loss";
        if self.rank() != other.rank() || self.rank() != target.rank() {
            let shapes = [self, other, target].map(Var::shape);
            return Err(Error::shape(OP, format!("{shapes:?}"), "as many dimensions of all three").into());
        }
        composed(OP, &[self, other, &as_number(target, self)?], |inputs| {
            let [a, b, target] = [&inputs[0], &inputs[1], &inputs[2]];
            target.neg()?.mul(&a.sub(b)?)?.add_scalar(margin)?.relu()?.reduce(reduction)
        })
    }

    /// Of distances: themselves where the target is 1, `max(0, margin - self)` where it is -1.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, the dtype is no floating-point one, or (where the host
    /// sees the elements) a target is neither 1 nor -1.
    pub fn hinge_embedding_loss(&self, target: &Var, margin: f64, reduction: Reduction) -> Result<Var> {
        const OP: &str = "hinge_embedding_loss";
        check_signs(OP, target)?;
        composed(OP, &[self, &as_number(target, self)?], |inputs| {
            let (x, target) = (&inputs[0], &inputs[1]);
            let apart = x.rsub_scalar(margin)?.relu()?;
            x.where_(&target.gt_scalar(0.0)?, &apart)?.reduce(reduction)
        })
    }

    /// Of pairs of vectors `[n, width]` with targets `[n]`, or one pair `[width]` and a target without dimensions: `1 -
    /// cos` where the target is 1, `max(0, cos - margin)` where it is -1.
    ///
    /// # Errors
    /// If the shapes do not fit, dtypes or devices differ, the dtype is no floating-point one, or (where the host sees the
    /// elements) a target is neither 1 nor -1.
    pub fn cosine_embedding_loss(
        &self,
        other: &Var,
        target: &Var,
        margin: f64,
        reduction: Reduction,
    ) -> Result<Var> {
        const OP: &str = "cosine_embedding_loss";
        const EPS: f64 = 1e-12;
        let fits = self.shape() == other.shape() && matches!(self.rank(), 1 | 2);
        if !fits || target.shape() != &self.shape()[..self.rank() - 1] {
            let shapes = [self, other, target].map(Var::shape);
            let wanted = "[n, width], [n, width] and [n], or [width], [width] and []";
            return Err(Error::shape(OP, format!("{shapes:?}"), wanted).into());
        }
        check_signs(OP, target)?;
        composed(OP, &[self, other, &as_number(target, self)?], |inputs| {
            let [a, b, target] = [&inputs[0], &inputs[1], &inputs[2]];
            let dot = |a: &Var, b: &Var| a.mul(b)?.sum(&[-1], false);
            let squares = |x: &Var| x.square()?.sum(&[-1], false)?.add_scalar(EPS);
            let cos = dot(a, b)?.div(&squares(a)?.mul(&squares(b)?)?.sqrt()?)?;
            let apart = cos.sub_scalar(margin)?.relu()?;
            cos.rsub_scalar(1.0)?.where_(&target.gt_scalar(0.0)?, &apart)?.reduce(reduction)
        })
    }

    /// `max(0, |self - positive| - |self - negative| + margin)` of vectors along the last dimension; all broadcast.
    ///
    /// # Errors
    /// If the numbers of dimensions differ or are 0, the shapes do not broadcast, dtypes or devices differ, the dtype is no
    /// floating-point one, or the margin is not positive.
    pub fn triplet_margin_loss(&self, positive: &Var, negative: &Var, config: &TripletMargin) -> Result<Var> {
        const OP: &str = "triplet_margin_loss";
        let TripletMargin { margin, p, eps, swap, reduction } = *config;
        if self.rank() == 0 || self.rank() != positive.rank() || self.rank() != negative.rank() {
            let shapes = [self, positive, negative].map(Var::shape);
            return Err(Error::shape(OP, format!("{shapes:?}"), "as many dimensions of all three").into());
        }
        if margin.is_nan() || margin <= 0.0 || p.is_nan() || p < 0.0 {
            let got = format!("margin {margin}, p {p}");
            return Err(Error::range(OP, got, "a margin above 0 and a norm's order of at least 0").into());
        }
        composed(OP, &[self, positive, negative], |inputs| {
            let [anchor, positive, negative] = [&inputs[0], &inputs[1], &inputs[2]];
            let distance = |a: &Var, b: &Var| a.sub(b)?.add_scalar(eps)?.norm(p, &[-1], false);
            let (near, mut far) = (distance(anchor, positive)?, distance(anchor, negative)?);
            if swap {
                far = far.minimum(&distance(positive, negative)?)?;
            }
            near.sub(&far)?.add_scalar(margin)?.relu()?.reduce(reduction)
        })
    }
}

/// All 1 or -1, where the host can see them.
fn check_signs(op: &'static str, target: &Var) -> Result<()> {
    if target.device().is_cuda() || target.device().is_meta() {
        return Ok(());
    }
    let values = target.detach().to(DType::F64)?.to_vec::<f64>()?;
    match values.iter().find(|value| value.abs() != 1.0) {
        Some(bad) => Err(Error::range(op, format!("target {bad}"), "1 or -1").into()),
        None => Ok(()),
    }
}

/// How far vectors are from each other, or how far they point the same way. Composed of norms.
impl Var {
    /// The cosine of the angle between vectors along `dim`, which goes away; both broadcast. Norms below `eps` count as
    /// `eps`.
    ///
    /// # Errors
    /// If the shapes do not broadcast, there is no such dimension, the dtype is no floating-point one, or dtypes or devices
    /// differ.
    pub fn cosine_similarity(&self, other: &Var, dim: impl Dim, eps: f64) -> Result<Var> {
        const NAME: &str = "cosine_similarity";
        floats(NAME, &[self, other])?;
        broadcasts(NAME, &[self, other])?;
        let shape = broadcast_shapes(NAME, self.shape(), other.shape())?;
        let dim = dim.resolve(shape.len().max(1), NAME)?;
        composed(NAME, &[self, other], |v| {
            let (a, b) = (v[0].broadcast_to(&shape)?, v[1].broadcast_to(&shape)?);
            let unit = |x: &Var| x.div(&x.norm(2.0, &[dim], true)?.clamp(Some(eps.into()), None)?);
            unit(&a)?.mul(&unit(&b)?)?.sum(&[dim], false)
        })
    }

    /// The distance, in the norm of order `p`, of each of the points [.., n, m] from each of `other` [.., k, m]:
    /// [.., n, k]; leading dimensions broadcast. `p` is 0 (how many coordinates differ) or more, or infinite. The
    /// derivative where the distance is 0 is 0.
    ///
    /// All differences are made, n k m numbers.
    ///
    /// # Errors
    /// If the shapes do not fit, `p` is negative or NaN, the dtype is no floating-point one, or dtypes or devices differ.
    pub fn cdist(&self, other: &Var, p: f64) -> Result<Var> {
        const NAME: &str = "cdist";
        if p.is_nan() || p < 0.0 {
            return Err(Error::invalid(NAME, format!("got p = {p}, wanted a number from 0 up")).into());
        }
        let fits = self.rank() >= 2 && other.rank() >= 2 && self.shape().last() == other.shape().last();
        if !fits {
            let got = format!("{:?} and {:?}", self.shape(), other.shape());
            return Err(Error::shape(NAME, got, "[.., n, m] and [.., k, m]").into());
        }
        floats(NAME, &[self, other])?;
        let (a, b) = (self.shape(), other.shape());
        let lead = broadcast_shapes(NAME, &a[..a.len() - 2], &b[..b.len() - 2])?;
        if a.last() == Some(&0) && p.is_infinite() {
            // The largest of no differences.
            let shape: Dims = lead.iter().copied().chain([a[a.len() - 2], b[b.len() - 2]]).collect();
            return Ok(Var::new(Tensor::zeros(&shape, self.dtype(), self.device())?));
        }
        composed(NAME, &[self, other], |v| {
            v[0].unsqueeze(-2)?.sub(&v[1].unsqueeze(-3)?)?.norm(p, &[-1], false)
        })
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;
    use phalanx_tensor::Device;

    use super::TripletMargin;
    use crate::Var;
    use crate::ops::testing::check_twice;

    const REDUCTIONS: [Reduction; 3] = [Reduction::None, Reduction::Mean, Reduction::Sum];

    fn signs(values: &[i64]) -> Var {
        Var::from_slice(values, &[values.len()], Device::CPU).unwrap()
    }

    #[test]
    fn first_and_second_derivatives_hold() {
        let target = signs(&[1, -1, 1]);
        for reduction in REDUCTIONS {
            check_twice(&[&[3], &[3]], |v| v[0].tanh()?.margin_ranking_loss(&v[1], &target, 0.31, reduction));
            check_twice(&[&[2, 3]], |v| v[0].tanh()?.hinge_embedding_loss(&target, 0.71, reduction));
            check_twice(&[&[3, 4], &[3, 4]], |v| v[0].cosine_embedding_loss(&v[1], &target, -0.9, reduction));
            let one = target.select(0, 1).unwrap();
            check_twice(&[&[4], &[4]], |v| v[0].cosine_embedding_loss(&v[1], &one, -0.9, reduction));
            for (p, swap) in [(2.0, false), (2.0, true), (3.0, false), (1.0, true)] {
                let config = TripletMargin { margin: 2.0, p, swap, reduction, ..TripletMargin::default() };
                check_twice(&[&[3, 4], &[3, 4], &[1, 4]], |v| {
                    v[0].triplet_margin_loss(&v[1], &v[2], &config)
                });
            }
        }
    }

    #[test]
    fn values_follow_the_formulas() {
        let make = |values: &[f64]| Var::from_slice(values, &[values.len()], Device::CPU).unwrap();
        let none = Reduction::None;
        let target = signs(&[1, -1, -1]);
        let (a, b) = (make(&[1.0, 2.0, 0.5]), make(&[3.0, 0.0, 0.5]));
        let vec = |y: crate::Result<Var>| y.unwrap().to_vec::<f64>().unwrap();
        assert_eq!(vec(a.margin_ranking_loss(&b, &target, 0.5, none)), [2.5, 2.5, 0.5]);
        assert_eq!(vec(a.hinge_embedding_loss(&target, 1.0, none)), [1.0, 0.0, 0.5]);
        let (east, north) = (make(&[2.0, 0.0]), make(&[0.0, 3.0]));
        let one = |sign: i64| Var::scalar(sign, Device::CPU).unwrap();
        assert_eq!(vec(east.cosine_embedding_loss(&north, &one(1), 0.0, none)), [1.0]);
        assert!((vec(east.cosine_embedding_loss(&east, &one(-1), 0.25, none))[0] - 0.75).abs() < 1e-9);
        let config = TripletMargin { eps: 0.0, ..TripletMargin::default() };
        let triplet = east.triplet_margin_loss(&make(&[2.0, 3.0]), &make(&[2.0, -1.0]), &config);
        assert_eq!(vec(triplet), [3.0]);
    }

    #[test]
    fn labels_and_shapes_that_make_no_sense_are_refused() {
        let x = Var::from_slice(&[1.0, 2.0], &[2], Device::CPU).unwrap();
        let error = |y: crate::Result<Var>| y.unwrap_err().to_string();
        assert!(error(x.hinge_embedding_loss(&signs(&[0, 1]), 1.0, Reduction::Mean)).contains("target 0"));
        let pair = x.unsqueeze(-1).unwrap();
        assert!(
            error(pair.cosine_embedding_loss(&pair, &signs(&[1, 2]), 0.0, Reduction::Mean))
                .contains("target 2")
        );
        assert!(error(pair.cosine_embedding_loss(&pair, &pair, 0.0, Reduction::Mean)).contains("[n, width]"));
        assert!(error(x.margin_ranking_loss(&pair, &x, 0.0, Reduction::Mean)).contains("dimensions"));
        for margin in [0.0, f64::NAN] {
            let config = TripletMargin { margin, ..TripletMargin::default() };
            assert!(error(x.triplet_margin_loss(&x, &x, &config)).starts_with("triplet_margin_loss: margin"));
        }
    }
}
