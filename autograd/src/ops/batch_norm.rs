//! `y = (x - mean) / sqrt(var + eps) * w + b` for `x` [N, C, ...] with each channel's mean and variance: the batch's own
//! in training, else given ones.
//!
//! Derivative, with `xhat` the normalised channel, `r` its inverse deviation and `g = dy w`: in training
//! `dx = r (g - mean(g) - xhat mean(g xhat))`, else `dx = r g`; `dw = sum(dy xhat)` and `db = sum(dy)` over all but the
//! channels. Shapes: `w`, `b` and the running statistics [C]. Saves `x`, `w` and four numbers a channel.
//! Source: Ioffe, Szegedy: Batch Normalization (2015).

use phalanx_kernels as kernels;
use phalanx_tensor::{Context, Tensor};
use smallvec::SmallVec;

pub use phalanx_kernels::BatchNorm;

use super::group_norm::{affine_grads, affine_needs};
use super::normalize::{Normalization, beside};
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, record};

impl Var {
    /// Batch normalisation, then scaled by `weight` and shifted by `bias` where they are given. `running` are the running
    /// mean and variance: used outside training, and moved towards the batch's (with its unbiased variance) in it, but
    /// not when a forward pass is repeated for its saved values.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, there are no running statistics outside training, or fewer than two
    /// elements a channel in it.
    pub fn batch_norm(
        &self,
        running: Option<[&mut Tensor; 2]>,
        weight: Option<&Var>,
        bias: Option<&Var>,
        config: &BatchNorm,
    ) -> Result<Var> {
        begins();
        let x = self.tensor();
        let affine = [weight.map(Var::tensor), bias.map(Var::tensor)];
        let given = running.as_ref().map(|r| [&*r[0], &*r[1]]);
        let (y, stats) = kernels::batch_norm(x, given, affine[0], affine[1], config)?;
        if let Some(running) = running.filter(|_| config.training && !Context::current().recomputing) {
            kernels::batch_norm_update_(running, x, &stats, config.momentum)?;
        }
        let inputs: SmallVec<[&Var; 3]> = [self].into_iter().chain(weight).chain(bias).collect();
        record("batch_norm", &inputs, y, |s: &Saver<'_>| {
            let saved = (weight.is_some() && s.needs(0)).then(|| s.input(1)).transpose()?;
            let has = [weight.is_some(), bias.is_some()];
            Ok(Recorded { x: s.input(0)?, weight: saved, has, stats, config: *config })
        })
    }
}

struct Recorded {
    x: SavedVariable,
    /// Saved only if the gradient of x is wanted.
    weight: Option<SavedVariable>,
    /// Whether there is a weight, and a bias.
    has: [bool; 2],
    stats: Tensor,
    config: BatchNorm,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = cx.get(&self.x)?;
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| cx.needs(0)).map(|w| cx.get(w)).transpose()?;
        let needs = affine_needs(cx, self.has);
        let made = if cx.create_graph() {
            self.composed(&x, weight.as_ref(), cx.dy(), needs)?
        } else {
            let (weight, dy) = (weight.as_ref().map(Var::tensor), cx.dy().tensor());
            kernels::batch_norm_backward(x.tensor(), &self.stats, weight, dy, &self.config, needs)?
                .map(|t| t.map(Var::new))
        };
        Ok(affine_grads(made, self.has))
    }
}

impl Recorded {
    fn composed(&self, x: &Var, w: Option<&Var>, dy: &Var, needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let (channels, rank) = (x.shape()[1], x.rank());
        let affine = beside(channels, rank);
        let weight = w.map(|w| w.reshape_to(&affine)).transpose()?;
        let weight = weight.as_ref();
        let [dx, dw, db] = if self.config.training {
            let dims: Vec<usize> = (0..rank).filter(|&d| d != 1).collect();
            let eps = self.config.eps;
            Normalization { x, weight, dy, dims: &dims, centred: true, eps }.gradients(&affine, needs)?
        } else {
            self.given(x, weight, dy, &affine, needs)?
        };
        let flat = |grad: Option<Var>| grad.map(|g| g.reshape_to(&[channels])).transpose();
        Ok([dx, flat(dw)?, flat(db)?])
    }

    /// The gradients where the statistics are constants.
    fn given(
        &self,
        x: &Var,
        weight: Option<&Var>,
        dy: &Var,
        affine: &[usize],
        needs: [bool; 3],
    ) -> Result<[Option<Var>; 3]> {
        let kept = |which: usize| Var::new(self.stats.select(1, which)?.with_shape(affine)?).to(x.dtype());
        let (high, low, inverse) = (kept(0)?, kept(1)?, kept(2)?);
        let dx = || weight.map_or_else(|| Ok(dy.clone()), |w| dy.mul(w))?.mul(&inverse);
        let dw = || dy.mul(&x.sub(&high)?.sub(&low)?.mul(&inverse)?)?.sum_to(affine);
        Ok([
            needs[0].then(dx).transpose()?,
            needs[1].then(dw).transpose()?,
            needs[2].then(|| dy.sum_to(affine)).transpose()?,
        ])
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Context, Device, Tensor};

    use super::BatchNorm;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let running =
            || [[0.5, -0.5], [1.5, 0.5]].map(|v| Tensor::from_slice(&v, &[2], Device::CPU).unwrap());
        for training in [true, false] {
            let config = BatchNorm { training, eps: 1e-2, ..BatchNorm::default() };
            for shape in [&[4, 2][..], &[2, 2, 3]] {
                check_twice(&[shape, &[2], &[2]], |v| {
                    let [mut mean, mut var] = running();
                    v[0].batch_norm(Some([&mut mean, &mut var]), Some(&v[1]), Some(&v[2]), &config)
                });
            }
        }
    }

    #[test]
    fn a_repeated_forward_pass_does_not_move_the_running_statistics() {
        let [mut mean, mut var] = [0.0, 1.0].map(|x| Tensor::from_slice(&[x], &[1], Device::CPU).unwrap());
        let x = Var::from_slice(&[1.0, 3.0], &[2, 1], Device::CPU).unwrap();
        let config = BatchNorm::default();
        x.batch_norm(Some([&mut mean, &mut var]), None, None, &config).unwrap();
        let moved = mean.to_vec::<f64>().unwrap();
        assert!((moved[0] - 0.2).abs() < 1e-12);
        let _repeated = Context::with(|c| c.recomputing = true);
        x.batch_norm(Some([&mut mean, &mut var]), None, None, &config).unwrap();
        assert_eq!(mean.to_vec::<f64>().unwrap(), moved);
    }
}
