//! `y = (x - mean) / sqrt(var + eps) * w + b` over the last dimensions, mean and variance of each row its own.
//!
//! Derivative, with `xhat` the normalised row, `r` its inverse deviation and `g = dy w`:
//! `dx = r (g - mean(g) - xhat mean(g xhat))`, `dw = sum(dy xhat)` and `db = sum(dy)` over the rows.
//! Shapes: `x` [.., n..], `w` and `b` [n..]. Saves `x`, `w` and two or three numbers a row (mean, `r`), from which the
//! backward pass makes `xhat` again in its one pass, and `y` for what would save it ([`Rematerialized`]). The mean is kept in two parts, so that a small spread beside a
//! large mean keeps its digits.
//! Source: Ba, Kiros, Hinton: Layer Normalization (2016).

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use super::normalize::Normalization;
use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SavedVariable, Saver, Var, begins, record, record_many,
};

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
        begins();
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

impl Form {
    /// How the normalised rows are made again of x, weight and bias.
    fn again(&self, weighted: bool) -> impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static {
        let Form { ref shape, centred, eps } = *self;
        let shape = shape.clone();
        move |of| {
            let (w, b) = (of.get(1).filter(|_| weighted), of.get(1 + usize::from(weighted)));
            Ok(match centred {
                true => kernels::layer_norm(&of[0], &shape, w, b, eps)?.0,
                false => kernels::rms_norm(&of[0], &shape, w, eps)?.0,
            })
        }
    }
}

/// Records a normalisation of the inputs x, weight?, bias? that gave `y` and the rows' numbers.
pub(super) fn record_norm<'a>(
    name: &'static str,
    form: Form,
    inputs: impl Iterator<Item = &'a Var>,
    weighted: bool,
    (y, stats): (Tensor, Tensor),
) -> Result<Var> {
    let inputs: SmallVec<[&Var; 4]> = inputs.collect();
    record(name, &inputs, y, |s: &Saver<'_>| {
        let weight = (weighted && s.needs(0)).then(|| s.input(1)).transpose()?;
        let rematerialized = s.rematerialized(0, 0..inputs.len(), form.again(weighted));
        Ok(RowNorm {
            x: s.input(0)?,
            weight,
            weighted,
            inputs: inputs.len(),
            added: false,
            stats,
            form,
            rematerialized,
        })
    })
}

/// Records a normalisation of x + residual, of the inputs x, residual, weight?, bias?, that gave the sum, `y` and the rows'
/// numbers.
pub(super) fn record_added<'a>(
    name: &'static str,
    form: Form,
    inputs: impl Iterator<Item = &'a Var>,
    weighted: bool,
    [sum, y, stats]: [Tensor; 3],
) -> Result<(Var, Var)> {
    let inputs: SmallVec<[&Var; 4]> = inputs.collect();
    let mut made = record_many(name, &inputs, [sum, y].into_iter().collect(), |s: &Saver<'_>| {
        let weight = (weighted && (s.needs(0) || s.needs(1))).then(|| s.input(2)).transpose()?;
        let rematerialized = s.rematerialized_of_output(1, 0, 2..inputs.len(), form.again(weighted));
        Ok(RowNorm {
            x: s.output(0)?,
            weight,
            weighted,
            inputs: inputs.len(),
            added: true,
            stats,
            form,
            rematerialized,
        })
    })?;
    let y = made.remove(1);
    Ok((made.remove(0), y))
}

struct RowNorm {
    /// What was normalised.
    x: SavedVariable,
    /// Saved only if the gradient of x is wanted.
    weight: Option<SavedVariable>,
    weighted: bool,
    /// How many inputs were recorded.
    inputs: usize,
    /// Whether x is the sum of the first two, and the first output.
    added: bool,
    stats: Tensor,
    form: Form,
    /// How `y` is made again.
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for RowNorm {
    const REMATERIALIZES: bool = true;

    fn rematerialized(&self, i: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref().filter(|_| i == usize::from(self.added))
    }

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let summands = 1 + usize::from(self.added);
        let (dy, dsum) = if self.added { (cx.dy_at(1), cx.dy_at(0)) } else { (Some(cx.dy()), None) };
        let needs_x = (0..summands).any(|i| cx.needs(i));
        let [dx, dw, db] = match dy {
            None => [dsum.cloned(), None, None],
            Some(dy) => {
                let bias = summands + usize::from(self.weighted);
                let needs = |i: usize| i < self.inputs && cx.needs(i);
                self.gradients(cx, dy, dsum, [needs_x, self.weighted && needs(summands), needs(bias)])?
            }
        };
        let affine = [Some(dw).filter(|_| self.weighted), Some(db)];
        let summands = std::iter::repeat_n(dx, summands);
        Ok(summands.chain(affine.into_iter().flatten()).take(self.inputs).collect())
    }

    /// Weight and bias ask for that of the normalised rows alone.
    fn keeps_gradient(&self, i: usize) -> bool {
        !self.added || i == 1
    }
}

impl RowNorm {
    /// Of x, weight and bias, given those of `y` and, where x is an output, of x.
    fn gradients(
        &self,
        cx: &Cx<'_>,
        dy: &Var,
        dsum: Option<&Var>,
        needs: [bool; 3],
    ) -> Result<[Option<Var>; 3]> {
        let x = cx.get(&self.x)?;
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| needs[0]).map(|w| cx.get(w)).transpose()?;
        if !cx.create_graph() {
            return self.fused(&x, weight.as_ref(), dy, dsum, needs);
        }
        let [dx, dw, db] = self.composed(&x, weight.as_ref(), dy, needs)?;
        let dx = match (dx, dsum) {
            (Some(dx), Some(dsum)) => Some(dsum.add(&dx)?),
            (dx, _) => dx,
        };
        Ok([dx, dw, db])
    }

    fn fused(
        &self,
        x: &Var,
        w: Option<&Var>,
        dy: &Var,
        dsum: Option<&Var>,
        needs: [bool; 3],
    ) -> Result<[Option<Var>; 3]> {
        let ([x, dy], w) = ([x.tensor(), dy.tensor()], w.map(Var::tensor));
        let (shape, stats) = (&self.form.shape, &self.stats);
        let without_bias = [needs[0], needs[1]];
        let made = match (self.form.centred, dsum.map(Var::tensor)) {
            (true, None) => kernels::layer_norm_backward(x, stats, shape, w, dy, needs)?,
            (true, Some(dsum)) => kernels::add_layer_norm_backward(x, stats, shape, w, [dy, dsum], needs)?,
            (false, None) => with_none(kernels::rms_norm_backward(x, stats, shape, w, dy, without_bias)?),
            (false, Some(dsum)) => {
                with_none(kernels::add_rms_norm_backward(x, stats, shape, w, [dy, dsum], without_bias)?)
            }
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

fn with_none([dx, dw]: [Option<Tensor>; 2]) -> [Option<Tensor>; 3] {
    [dx, dw, None]
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
