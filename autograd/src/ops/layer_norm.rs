//! `y = (x - mean) / sqrt(var + eps) * w + b` over the last dimensions, mean and variance of each row its own.
//!
//! Derivative, with `xhat` the normalised row, `r` its inverse deviation and `g = dy w`:
//! `dx = r (g - mean(g) - xhat mean(g xhat))`, `dw = sum(dy xhat)` and `db = sum(dy)` over the rows.
//! Shapes: `x` [.., n..], `w` and `b` [n..]. Saves `x`, `w` and two or three numbers a row (mean, `r`), from which the
//! backward pass makes `xhat` again in its one pass. The mean is kept in two parts, so that a small spread beside a
//! large mean keeps its digits.
//! Source: Ba, Kiros, Hinton: Layer Normalization (2016).

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Tensor};
use smallvec::SmallVec;

use super::normalize::Normalization;
use crate::{Backward, Cx, Grads, Result, Saved, Saver, Var, record};

impl Var {
    /// Layer normalisation over the last dimensions, which must be `normalized_shape`, then scaled by `weight` and
    /// shifted by `bias` where they are given.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn layer_norm(
        &self,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        bias: Option<&Var>,
        eps: f64,
    ) -> Result<Var> {
        let affine = [weight.map(Var::tensor), bias.map(Var::tensor)];
        let (y, stats) = kernels::layer_norm(self.tensor(), normalized_shape, affine[0], affine[1], eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: true, eps };
        record_norm(
            "layer_norm",
            form,
            [self].into_iter().chain(weight).chain(bias),
            weight.is_some(),
            (y, stats),
        )
    }
}

/// What is normalised and how.
pub(super) struct Form {
    pub(super) shape: Dims,
    /// Whether the mean is subtracted: layer normalisation, else root mean square.
    pub(super) centred: bool,
    pub(super) eps: f64,
}

/// Records a normalisation of the inputs x, weight?, bias? that gave `y` and the rows' numbers.
pub(super) fn record_norm<'a>(
    name: &'static str,
    form: Form,
    inputs: impl Iterator<Item = &'a Var>,
    weighted: bool,
    (y, stats): (Tensor, Tensor),
) -> Result<Var> {
    let inputs: SmallVec<[&Var; 3]> = inputs.collect();
    record(name, &inputs, y, |s: &Saver<'_>| {
        let weight = (weighted && s.needs(0)).then(|| s.input(1)).transpose()?;
        Ok(RowNorm { x: s.input(0)?, weight, weighted, inputs: inputs.len(), stats, form })
    })
}

struct RowNorm {
    x: Saved,
    /// Saved only if the gradient of x is wanted.
    weight: Option<Saved>,
    weighted: bool,
    /// How many inputs were recorded.
    inputs: usize,
    stats: Tensor,
    form: Form,
}

impl Backward for RowNorm {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = cx.get(&self.x)?;
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| cx.needs(0)).map(|w| cx.get(w)).transpose()?;
        let bias = 1 + usize::from(self.weighted);
        let needs = [cx.needs(0), self.weighted && cx.needs(1), bias < self.inputs && cx.needs(bias)];
        let [dx, dw, db] = match cx.create_graph() {
            true => self.composed(&x, weight.as_ref(), cx.dy(), needs)?,
            false => self.fused(&x, weight.as_ref(), cx.dy(), needs)?,
        };
        let affine = [Some(dw).filter(|_| self.weighted), Some(db)];
        Ok([dx].into_iter().chain(affine.into_iter().flatten()).take(self.inputs).collect())
    }
}

impl RowNorm {
    fn fused(&self, x: &Var, w: Option<&Var>, dy: &Var, needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let ([x, dy], w, shape) = ([x.tensor(), dy.tensor()], w.map(Var::tensor), &self.form.shape);
        let made = if self.form.centred {
            kernels::layer_norm_backward(x, &self.stats, shape, w, dy, needs)?
        } else {
            let [dx, dw] = kernels::rms_norm_backward(x, &self.stats, shape, w, dy, [needs[0], needs[1]])?;
            [dx, dw, None]
        };
        Ok(made.map(|t| t.map(Var::new)))
    }

    fn composed(&self, x: &Var, w: Option<&Var>, dy: &Var, needs: [bool; 3]) -> Result<[Option<Var>; 3]> {
        let shape = &self.form.shape;
        let dims: Dims = (x.rank() - shape.len()..x.rank()).collect();
        let Form { centred, eps, .. } = self.form;
        Normalization { x, weight: w, dy, dims: &dims, centred, eps }.gradients(shape, needs)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        check_twice(&[&[3, 5], &[5], &[5]], |v| v[0].layer_norm(&[5], Some(&v[1]), Some(&v[2]), 1e-2));
        check_twice(&[&[3, 2, 3], &[2, 3]], |v| v[0].layer_norm(&[2, 3], None, Some(&v[1]), 1e-2));
    }
}
