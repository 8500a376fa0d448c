//! The backward pass of the synchronised normalisation.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{Backward, BatchNorm as Numbers, Cx, Error, Function, Grads, Result, Saved, Var};
use phalanx_tensor::{DType, Device, Tensor};

use super::sum_over_ranks::SumOverRanks;
use crate::comm::{Comm, Reduction};

/// What the forward pass leaves.
pub(super) struct Recorded {
    pub(super) x: Saved,
    /// Saved only if the gradient of x is wanted.
    pub(super) weight: Option<Saved>,
    /// Whether there is a weight, and a bias.
    pub(super) has: [bool; 2],
    /// Mean and variance of all ranks, [C] each.
    pub(super) given: [Tensor; 2],
    /// The same as the kernels keep them.
    pub(super) stats: Tensor,
    /// Elements of a channel on all ranks.
    pub(super) count: f64,
    pub(super) eps: f64,
    pub(super) comm: Comm,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = cx.get(&self.x)?;
        let needs =
            [cx.needs(0), self.has[0] && cx.needs(1), self.has[1] && cx.needs(1 + usize::from(self.has[0]))];
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| needs[0]).map(|w| cx.get(w)).transpose()?;
        let [dx, dw, db] = match cx.create_graph() {
            true => self.composed(&x, weight.as_ref(), cx.dy(), needs)?,
            false => self.computed(x.tensor(), weight.as_ref().map(Var::tensor), cx.dy().tensor(), needs)?,
        };
        let affine = [self.has[0].then_some(dw), self.has[1].then_some(db)];
        Ok([dx].into_iter().chain(affine.into_iter().flatten()).collect())
    }
}

impl Recorded {
    /// With kernels; narrow floats in f32.
    fn computed(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        dy: &Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<Var>; 3]> {
        let dtype = x.dtype();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let [x, dy] = [kernels::cast(x, wide)?, kernels::cast(dy, wide)?];
        let weight = weight.map(|w| kernels::cast(w, wide)).transpose()?;
        let numbers = Numbers { training: false, momentum: 0.0, eps: self.eps };
        let own = [needs[0], needs[0] || needs[1], needs[0] || needs[2]];
        let [scaled, along, sum] =
            kernels::batch_norm_backward(&x, &self.stats, weight.as_ref(), &dy, &numbers, own)?;
        let dx = match (scaled, &along, &sum) {
            (Some(scaled), Some(along), Some(sum)) => {
                Some(kernels::sub(&scaled, &self.shared(&x, weight.as_ref(), [along, sum])?)?)
            }
            _ => None,
        };
        let narrow = |grad: Option<Tensor>, wanted: bool| -> Result<Option<Var>> {
            let grad = grad.filter(|_| wanted).map(|grad| kernels::cast(&grad, dtype)).transpose()?;
            Ok(grad.map(Var::new))
        };
        Ok([narrow(dx, needs[0])?, narrow(along, needs[1])?, narrow(sum, needs[2])?])
    }

    /// `r w (sum(dy) / n + xhat sum(dy xhat) / n)`, which is a normalisation with another weight and bias.
    fn shared(&self, x: &Tensor, weight: Option<&Tensor>, own: [&Tensor; 2]) -> Result<Tensor> {
        let values = |t: &Tensor| -> Result<Vec<f64>> { Ok(kernels::cast(t, DType::F64)?.to_vec()?) };
        let (mut sums, channels) = (values(own[0])?, x.shape()[1]);
        sums.extend(values(own[1])?);
        let mut sums = Tensor::from_slice(&sums, &[2 * channels], Device::CPU)?;
        let failed = |error: crate::comm::Error| Error::from(crate::Error::from(error));
        self.comm.all_reduce(&mut sums, Reduction::Sum).map_err(failed)?;
        let sums = sums.to_vec::<f64>()?;
        let weight = weight.map_or_else(|| Ok(vec![1.0; channels]), values)?;
        let variance = values(&self.given[1])?;
        let share = |which: usize| {
            let value = |c: usize| {
                sums[which * channels + c] * weight[c] / (self.count * (variance[c] + self.eps).sqrt())
            };
            let values: Vec<f64> = (0..channels).map(value).collect();
            kernels::cast(&Tensor::from_slice(&values, &[channels], x.device())?, x.dtype())
        };
        let (along, shift) = (share(0)?, share(1)?);
        let numbers = Numbers { training: false, momentum: 0.0, eps: self.eps };
        let given = [&self.given[0], &self.given[1]];
        Ok(kernels::batch_norm(x, Some(given), Some(&along), Some(&shift), &numbers)?.0)
    }

    /// Of operations that can be differentiated again.
    fn composed(&self, x: &Var, w: Option<&Var>, dy: &Var, needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let (channels, rank) = (x.shape()[1], x.rank());
        let affine: Vec<usize> = (0..rank).map(|d| if d == 1 { channels } else { 1 }).collect();
        let mean = |v: &Var| -> Result<Var> {
            let sums = SumOverRanks(self.comm.clone()).apply(&[&v.sum_to(&affine)?])?;
            sums[0].mul_scalar(1.0 / self.count)
        };
        let centred = x.sub(&mean(x)?)?;
        let inverse = mean(&centred.mul(&centred)?)?.add_scalar(self.eps)?.rsqrt()?;
        let hat = centred.mul(&inverse)?;
        let dx = || {
            let g = w.map_or_else(|| Ok(dy.clone()), |w| dy.mul(&w.reshape_to(&affine)?))?;
            let along = hat.mul(&mean(&g.mul(&hat)?)?)?;
            g.sub(&mean(&g)?)?.sub(&along)?.mul(&inverse)
        };
        let flat = |grad: Var| grad.sum_to(&affine)?.reshape_to(&[channels]);
        Ok([
            needs[0].then(dx).transpose()?,
            needs[1].then(|| flat(dy.mul(&hat)?)).transpose()?,
            needs[2].then(|| flat(dy.clone())).transpose()?,
        ])
    }
}
