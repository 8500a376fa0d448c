//! Normalizations of channels: over the batch, over groups, over one channel of one item, over neighbouring channels.

use phalanx_kernels::{self as kernels, PoolOptions};
use phalanx_tensor::{Dims, Error, Tensor};
use smallvec::SmallVec;

use super::frame::{composed, named, product};
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, is_recomputing, record};

pub use phalanx_kernels::BatchNorm;

// `y = (x - mean) / sqrt(var + eps) * w + b` for `x` [N, C, ...] with each channel's mean and variance: the batch's own
// in training, else given ones.
//
// Derivative, with `xhat` the normalised channel, `r` its inverse deviation and `g = dy w`: in training
// `dx = r (g - mean(g) - xhat mean(g xhat))`, else `dx = r g`; `dw = sum(dy xhat)` and `db = sum(dy)` over all but the
// channels. Shapes: `w`, `b` and the running statistics [C]. Saves `x`, `w` and four numbers a channel.
// Source: Ioffe, Szegedy: Batch Normalization (2015).

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
        if let Some(running) = running.filter(|_| config.training && !is_recomputing()) {
            kernels::batch_norm_update_(running, x, &stats, config.momentum)?;
        }
        let inputs: SmallVec<[&Var; 3]> = [self].into_iter().chain(weight).chain(bias).collect();
        record("batch_norm", &inputs, y, |s: &SaveContext<'_>| {
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

/// `y = (x - mean) / sqrt(var + eps) * w + b` for `x` [N, C, ...], mean and variance over each item's groups of channels.
///
/// Derivative, with `xhat` the normalised group, `r` its inverse deviation and `g = dy w`:
/// `dx = r (g - mean(g) - xhat mean(g xhat))`, `dw = sum(dy xhat)` and `db = sum(dy)` over all but the channels.
/// Shapes: `w` and `b` `[C]`. Saves `x`, `w` and three numbers a group (the mean in two parts, `r`).
/// Source: Wu, He: Group Normalization (2018).
impl Var {
    /// Group normalisation over `num_groups` groups of neighbouring channels, then scaled by `weight` and shifted by
    /// `bias`, `[C]` each, where they are given.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or shapes, dtypes or devices do not fit.
    pub fn group_norm(
        &self,
        num_groups: usize,
        weight: Option<&Var>,
        bias: Option<&Var>,
        eps: f64,
    ) -> Result<Var> {
        begins();
        let affine = [weight.map(Var::tensor), bias.map(Var::tensor)];
        let (y, stats) = kernels::group_norm(self.tensor(), num_groups, affine[0], affine[1], eps)?;
        let inputs: SmallVec<[&Var; 3]> = [self].into_iter().chain(weight).chain(bias).collect();
        record("group_norm", &inputs, y, |s: &SaveContext<'_>| {
            let saved = (weight.is_some() && s.needs(0)).then(|| s.input(1)).transpose()?;
            let has = [weight.is_some(), bias.is_some()];
            Ok(GroupNorm { x: s.input(0)?, weight: saved, has, stats, num_groups, eps })
        })
    }
}

struct GroupNorm {
    x: SavedVariable,
    /// Saved only if the gradient of x is wanted.
    weight: Option<SavedVariable>,
    /// Whether there is a weight, and a bias.
    has: [bool; 2],
    stats: Tensor,
    num_groups: usize,
    eps: f64,
}

impl Backward for GroupNorm {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = cx.get(&self.x)?;
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| cx.needs(0)).map(|w| cx.get(w)).transpose()?;
        let needs = affine_needs(cx, self.has);
        let made = if cx.create_graph() {
            self.composed(&x, weight.as_ref(), cx.dy(), needs)?
        } else {
            let (weight, dy) = (weight.as_ref().map(Var::tensor), cx.dy().tensor());
            kernels::group_norm_backward(x.tensor(), &self.stats, self.num_groups, weight, dy, needs)?
                .map(|t| t.map(Var::new))
        };
        Ok(affine_grads(made, self.has))
    }
}

impl GroupNorm {
    /// With the groups as a dimension: [N, G, C / G, places].
    fn composed(&self, x: &Var, w: Option<&Var>, dy: &Var, needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let (groups, channels) = (self.num_groups, x.shape()[1]);
        let places: usize = x.shape()[2..].iter().product();
        let grouped = [x.shape()[0], groups, channels / groups, places];
        let affine = [1, groups, channels / groups, 1];
        let weight = w.map(|w| w.reshape_to(&affine)).transpose()?;
        let (x_grouped, dy) = (x.reshape_to(&grouped)?, dy.reshape_to(&grouped)?);
        let [dx, dw, db] = Normalization {
            x: &x_grouped,
            weight: weight.as_ref(),
            dy: &dy,
            dims: &[2, 3],
            centred: true,
            eps: self.eps,
        }
        .gradients(&affine, needs)?;
        let back = |grad: Option<Var>, shape: &[usize]| grad.map(|g| g.reshape_to(shape)).transpose();
        Ok([back(dx, x.shape())?, back(dw, &[channels])?, back(db, &[channels])?])
    }
}

/// Which of the gradients of x, weight and bias are wanted, of an operation with the inputs x, weight?, bias?.
pub(super) fn affine_needs(cx: &Cx<'_>, has: [bool; 2]) -> [bool; 3] {
    [cx.needs(0), has[0] && cx.needs(1), has[1] && cx.needs(1 + usize::from(has[0]))]
}

/// The gradients of x, weight and bias as those of the inputs x, weight?, bias?.
pub(super) fn affine_grads([dx, dw, db]: [Option<Var>; 3], has: [bool; 2]) -> Grads {
    let mut grads: Grads = [dx].into_iter().collect();
    grads.extend(has[0].then_some(dw));
    grads.extend(has[1].then_some(db));
    grads
}

/// Each channel of each item to mean 0 and variance 1: `group_norm` with a group a channel, whose derivative it has.
///
/// Source: Ulyanov, Vedaldi, Lempitsky: Instance Normalization (2016).
impl Var {
    /// Instance normalisation of `[n, channels, ..]` by each channel's own statistics, then scaled by `weight` and
    /// shifted by `bias`, `[channels]` each, where they are given.
    ///
    /// # Errors
    /// If a channel has one element only, whose result would be 0 whatever it is; if shapes, dtypes or devices do not fit.
    pub fn instance_norm(&self, weight: Option<&Var>, bias: Option<&Var>, eps: f64) -> Result<Var> {
        const OP: &str = "instance_norm";
        let places: Option<&[usize]> = self.shape().get(2..);
        if places.is_none_or(|places| places.iter().all(|&n| n == 1)) {
            let wanted = "[n, channels, ..] with more than one element a channel";
            return Err(Error::shape(OP, format!("{:?}", self.shape()), wanted).into());
        }
        if self.numel() == 0 && self.shape()[1] == 0 {
            return Ok(self.clone());
        }
        named(OP, self.group_norm(self.shape()[1], weight, bias, eps))
    }
}

/// `y = x / (k + alpha m)^beta` with the mean `m` of the squares of `size` neighbouring channels, zeros beyond the
/// first and the last.
///
/// Composed of `square`, `avg_pool2d` over the channels and `pow`, whose derivatives it has. The halves are computed in
/// f32. Source: Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks (2012).
impl Var {
    /// Local response normalisation of `[n, channels, ..]` over windows of `size` channels, PyTorch's
    /// `functional.local_response_norm`.
    ///
    /// # Errors
    /// If there are fewer than three dimensions, `size` is 0, or the dtype is no floating-point one.
    pub fn local_response_norm(&self, size: usize, alpha: f64, beta: f64, k: f64) -> Result<Var> {
        const OP: &str = "local_response_norm";
        let &[n, channels, ref places @ ..] = self.shape() else { return Err(few(self)) };
        if places.is_empty() {
            return Err(few(self));
        }
        if size == 0 || isize::try_from(size).is_err() {
            return Err(Error::range(OP, format!("size {size}"), "at least 1 channel").into());
        }
        if self.numel() == 0 {
            return Ok(self.clone());
        }
        let rows = [n, channels, product(OP, places)?];
        composed(OP, &[self], |x| {
            let margins = [(0, 0), ((size / 2) as isize, ((size - 1) / 2) as isize)];
            let squares = x[0].square()?.reshape_to(&rows)?.pad(&margins, 0.0)?;
            let windows = PoolOptions { stride: [1, 1], ..PoolOptions::new([size, 1]) };
            let means = squares.avg_pool2d(&windows, true)?.reshape_to(x[0].shape())?;
            x[0].div(&means.mul_scalar(alpha)?.add_scalar(k)?.pow_scalar(beta)?)
        })
    }
}

fn few(x: &Var) -> crate::Error {
    Error::shape(
        "local_response_norm",
        format!("{:?}", x.shape()),
        "[n, channels, ..] of three dimensions or more",
    )
    .into()
}

// The gradients of a normalisation as differentiable operations, for all of them: layer, root mean square, group and
// batch.

/// A normalisation `y = xhat w + b`, shaped so that `w` broadcasts to `x`.
pub(super) struct Normalization<'a> {
    pub(super) x: &'a Var,
    pub(super) weight: Option<&'a Var>,
    pub(super) dy: &'a Var,
    /// The dimensions that a mean is taken over.
    pub(super) dims: &'a [usize],
    /// Whether the mean is subtracted.
    pub(super) centred: bool,
    pub(super) eps: f64,
}

impl Normalization<'_> {
    /// The gradients of x, weight and bias; the latter two in the shape `affine`.
    pub(super) fn gradients(&self, affine: &[usize], needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let (x, dy) = (self.x, self.dy);
        let mean = |v: &Var| v.mean(self.dims, true);
        let centre = |v: &Var| if self.centred { v.sub(&mean(v)?) } else { Ok(v.clone()) };
        let centred = centre(x)?;
        let inverse = mean(&centred.mul(&centred)?)?.add_scalar(self.eps)?.rsqrt()?;
        let hat = centred.mul(&inverse)?;
        let dx = || {
            let g = self.weight.map_or_else(|| Ok(dy.clone()), |w| dy.mul(w))?;
            let along = hat.mul(&mean(&g.mul(&hat)?)?)?;
            centre(&g)?.sub(&along)?.mul(&inverse)
        };
        Ok([
            needs[0].then(dx).transpose()?,
            needs[1].then(|| dy.mul(&hat)?.sum_to(affine)).transpose()?,
            needs[2].then(|| dy.sum_to(affine)).transpose()?,
        ])
    }
}

/// The shape of a weight a channel that broadcasts to [N, C, ...] of this rank.
fn beside(channels: usize, rank: usize) -> Dims {
    (0..rank).map(|d| if d == 1 { channels } else { 1 }).collect()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Context, DType, Device, Tensor};

    use super::BatchNorm;
    use crate::ops::testing::check_twice;
    use crate::{ContextMode, Var};

    #[test]
    fn first_and_second_derivatives_of_batch_norm_hold() {
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
        let _repeated = Context::with(|c| c.set_recomputing(true));
        x.batch_norm(Some([&mut mean, &mut var]), None, None, &config).unwrap();
        assert_eq!(mean.to_vec::<f64>().unwrap(), moved);
    }

    #[test]
    fn first_and_second_derivatives_of_group_norm_hold() {
        check_twice(&[&[2, 4, 3], &[4], &[4]], |v| v[0].group_norm(2, Some(&v[1]), Some(&v[2]), 1e-2));
        check_twice(&[&[2, 6], &[6]], |v| v[0].group_norm(2, None, Some(&v[1]), 1e-2));
    }

    #[test]
    fn first_and_second_derivatives_of_instance_norm_hold() {
        check_twice(&[&[2, 3, 4], &[3], &[3]], |v| v[0].instance_norm(Some(&v[1]), Some(&v[2]), 1e-2));
        check_twice(&[&[2, 2, 3, 2]], |v| v[0].instance_norm(None, None, 1e-2));
        check_twice(&[&[0, 2, 3], &[2]], |v| v[0].instance_norm(None, Some(&v[1]), 1e-2));
    }

    #[test]
    fn a_channel_of_one_element_is_refused() {
        for shape in [&[2, 3, 1][..], &[2, 3], &[2], &[2, 3, 1, 1]] {
            let x = Var::new(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap());
            assert!(x.instance_norm(None, None, 1e-5).unwrap_err().to_string().starts_with("instance_norm"));
        }
    }

    #[test]
    fn windows_lie_around_each_channel_and_derivatives_hold() {
        let x = Var::from_slice(&[1.0, 2.0, 3.0], &[1, 3, 1], Device::CPU).unwrap();
        let y = x.local_response_norm(2, 2.0, 1.0, 1.0).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(y, [1.0 / 2.0, 2.0 / 6.0, 3.0 / 14.0]);
        for size in [1, 2, 3, 9] {
            check_twice(&[&[2, 4, 2]], |v| v[0].local_response_norm(size, 0.3, 0.75, 1.2));
        }
        assert!(x.local_response_norm(0, 1.0, 1.0, 1.0).unwrap_err().to_string().contains("size 0"));
        assert!(x.select(0, 0).unwrap().local_response_norm(2, 1.0, 1.0, 1.0).is_err());
    }
}
