//! `y = (x - mean) / sqrt(var + eps) * w + b` for `x` [N, C, ...], mean and variance over each item's groups of channels.
//!
//! Derivative, with `xhat` the normalised group, `r` its inverse deviation and `g = dy w`:
//! `dx = r (g - mean(g) - xhat mean(g xhat))`, `dw = sum(dy xhat)` and `db = sum(dy)` over all but the channels.
//! Shapes: `w` and `b` [C]. Saves `x`, `w` and three numbers a group (the mean in two parts, `r`).
//! Source: Wu, He: Group Normalization (2018).

use phalanx_kernels as kernels;
use phalanx_tensor::Tensor;
use smallvec::SmallVec;

use super::normalize::Normalization;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, record};

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
        record("group_norm", &inputs, y, |s: &Saver<'_>| {
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

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        check_twice(&[&[2, 4, 3], &[4], &[4]], |v| v[0].group_norm(2, Some(&v[1]), Some(&v[2]), 1e-2));
        check_twice(&[&[2, 6], &[6]], |v| v[0].group_norm(2, None, Some(&v[1]), 1e-2));
    }
}
