//! Normalizations over the last dimensions, alone and fused with a residual addition.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use super::channel_norms::Normalization;
use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SaveContext, SavedVariable, Var, begins, record, record_many,
};

/// `y = (x - mean) / sqrt(var + eps) * w + b` over the last dimensions, mean and variance of each row its own.
///
/// Derivative, with `xhat` the normalised row, `r` its inverse deviation and `g = dy w`:
/// `dx = r (g - mean(g) - xhat mean(g xhat))`, `dw = sum(dy xhat)` and `db = sum(dy)` over the rows.
/// Shapes: `x` [.., n..], `w` and `b` [n..]. Saves `x`, `w` and two or three numbers a row (mean, `r`), from which the
/// backward pass computes `xhat` again in its one pass, and `y` for operations that would save it ([`Rematerialized`]).
/// The mean is kept in two parts, so that a small spread beside a large mean keeps its digits.
/// Source: Ba, Kiros, Hinton: Layer Normalization (2016).
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
        Form::layer(normalized_shape, eps, self.dtype()).record("layer_norm", self, [weight, bias])
    }

    /// What begins a branch of a pre-norm block: the residual stream, which is this, and its [`Var::layer_norm`] in the branch's
    /// dtype. The gradient that the stream gets beside the branch is added in the norm's backward pass, and the cast is no pass of its
    /// own on a GPU.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn pre_layer_norm(
        &self,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        bias: Option<&Var>,
        eps: f64,
        dtype: DType,
    ) -> Result<(Var, Var)> {
        begins();
        let form = Form::layer(normalized_shape, eps, dtype);
        form.record_on_stream("pre_layer_norm", (self, None), [weight, bias])
    }
}

/// What is normalised and how.
struct Form {
    shape: Dims,
    /// Whether the mean is subtracted: layer normalisation, else root mean square.
    centred: bool,
    eps: f64,
    /// Of the result.
    dtype: DType,
}

impl Form {
    fn layer(shape: &[usize], eps: f64, dtype: DType) -> Form {
        Form { shape: Dims::from_slice(shape), centred: true, eps, dtype }
    }

    fn rms(shape: &[usize], eps: f64, dtype: DType) -> Form {
        Form { shape: Dims::from_slice(shape), centred: false, eps, dtype }
    }

    /// The normalised rows of x, and their numbers.
    fn norm(&self, x: &Tensor, [w, b]: [Option<&Tensor>; 2]) -> TensorResult<(Tensor, Tensor)> {
        match self.centred {
            true => kernels::layer_norm_to(x, &self.shape, w, b, self.eps, self.dtype),
            false => kernels::rms_norm_to(x, &self.shape, w, self.eps, self.dtype),
        }
    }

    /// Records the normalisation of x.
    fn record(self, name: &'static str, x: &Var, affine: [Option<&Var>; 2]) -> Result<Var> {
        let (y, stats) = self.norm(x.tensor(), affine.map(|v| v.map(Var::tensor)))?;
        let inputs: SmallVec<[&Var; 4]> = [x].into_iter().chain(affine.into_iter().flatten()).collect();
        record(name, &inputs, y, |s: &SaveContext<'_>| {
            RowNorm::save(
                s,
                self,
                Places { summands: 1, y: 0, weighted: affine[0].is_some(), inputs: inputs.len() },
                stats,
            )
        })
    }

    /// Records the normalisation of x, or of x and a branch's result added, beside what was normalised.
    fn record_on_stream(
        self,
        name: &'static str,
        (x, branch): (&Var, Option<&Var>),
        affine: [Option<&Var>; 2],
    ) -> Result<(Var, Var)> {
        let [w, b] = affine.map(|v| v.map(Var::tensor));
        let [stream, y, stats] = match (branch.map(Var::tensor), self.centred) {
            (None, _) => {
                let (y, stats) = self.norm(x.tensor(), [w, b])?;
                [x.tensor().clone(), y, stats]
            }
            (Some(branch), true) => kernels::add_layer_norm(x.tensor(), branch, &self.shape, w, b, self.eps)?,
            (Some(branch), false) => kernels::add_rms_norm(x.tensor(), branch, &self.shape, w, self.eps)?,
        };
        let inputs = [Some(x), branch].into_iter().chain(affine);
        let inputs: SmallVec<[&Var; 4]> = inputs.flatten().collect();
        let summands = 1 + usize::from(branch.is_some());
        let places = Places { summands, y: 1, weighted: affine[0].is_some(), inputs: inputs.len() };
        let outputs = [stream, y].into_iter().collect();
        let mut made =
            record_many(name, &inputs, outputs, |s: &SaveContext<'_>| RowNorm::save(s, self, places, stats))?;
        let y = made.remove(1);
        Ok((made.remove(0), y))
    }
}

/// Where a normalisation has its inputs and outputs.
#[derive(Clone, Copy)]
struct Places {
    /// x, or x and a branch's result, which are added; then come weight and bias.
    summands: usize,
    /// The number of the output `y`; 1 if output 0 is what was normalised.
    y: usize,
    weighted: bool,
    /// How many inputs were recorded.
    inputs: usize,
}

struct RowNorm {
    /// What was normalised.
    x: SavedVariable,
    /// Saved only if the gradient of x is wanted.
    weight: Option<SavedVariable>,
    places: Places,
    stats: Tensor,
    form: Form,
    /// How `y` is computed again.
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for RowNorm {
    const REMATERIALIZES: bool = true;

    fn rematerialized(&self, i: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref().filter(|_| i == self.places.y)
    }

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let Places { summands, y, weighted, inputs } = self.places;
        let (dy, dsum) = if y == 1 { (cx.dy_at(1), cx.dy_at(0)) } else { (Some(cx.dy()), None) };
        let needs = |i: usize| i < inputs && cx.needs(i);
        let bias = summands + usize::from(weighted);
        let wanted = [needs(0), summands == 2 && needs(1), weighted && needs(summands), needs(bias)];
        let [dx, dbranch, dw, db] = match dy {
            None => {
                let narrow = |dsum: &Var| dsum.to(self.form.dtype);
                [dsum.cloned(), dsum.filter(|_| wanted[1]).map(narrow).transpose()?, None, None]
            }
            Some(dy) => self.gradients(cx, dy, dsum, wanted)?,
        };
        let grads =
            [Some(dx), Some(dbranch).filter(|_| summands == 2), Some(dw).filter(|_| weighted), Some(db)];
        Ok(grads.into_iter().flatten().take(inputs).collect())
    }

    /// Weight and bias ask for that of the normalised rows alone.
    fn keeps_gradient(&self, i: usize) -> bool {
        i == self.places.y
    }
}

impl RowNorm {
    fn save(s: &SaveContext<'_>, form: Form, places: Places, stats: Tensor) -> Result<RowNorm> {
        let Places { summands, y, weighted, inputs } = places;
        let needs_x = (0..summands).any(|i| s.needs(i));
        let weight = (weighted && needs_x).then(|| s.input(summands)).transpose()?;
        let again = Form { shape: form.shape.clone(), ..form };
        let compute = move |of: &[Tensor]| {
            let (w, b) = (of.get(1).filter(|_| weighted), of.get(1 + usize::from(weighted)));
            Ok(again.norm(&of[0], [w, b])?.0)
        };
        let affine = summands..inputs;
        let (x, rematerialized) = match summands {
            1 => (s.input(0)?, s.rematerialized(y, 0..inputs, compute)),
            _ => (s.output(0)?, s.rematerialized_of_output(y, 0, affine, compute)),
        };
        Ok(RowNorm { x, weight, places, stats, form, rematerialized })
    }

    /// Of x, the branch, weight and bias, given those of `y` and, where it is an output, of what was normalised.
    fn gradients(
        &self,
        cx: &Cx<'_>,
        dy: &Var,
        dsum: Option<&Var>,
        needs: [bool; 4],
    ) -> Result<[Option<Var>; 4]> {
        let (x, needs_x) = (cx.get(&self.x)?, needs[0] || needs[1]);
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| needs_x).map(|w| cx.get(w)).transpose()?;
        if !cx.create_graph() {
            return self.fused(&x, weight.as_ref(), dy, dsum, needs);
        }
        let [dx, dw, db] =
            self.composed(&x, weight.as_ref(), &dy.to(x.dtype())?, [needs_x, needs[2], needs[3]])?;
        let dx = match (dx, dsum) {
            (Some(dx), Some(dsum)) => Some(dsum.add(&dx)?),
            (dx, _) => dx,
        };
        let dbranch = dx.as_ref().filter(|_| needs[1]).map(|dx| dx.to(dy.dtype())).transpose()?;
        Ok([dx, dbranch, dw, db])
    }

    fn fused(
        &self,
        x: &Var,
        w: Option<&Var>,
        dy: &Var,
        dsum: Option<&Var>,
        needs: [bool; 4],
    ) -> Result<[Option<Var>; 4]> {
        let ([x, dy], w) = ([x.tensor(), dy.tensor()], w.map(Var::tensor));
        let (shape, stats, slopes) = (&self.form.shape, &self.stats, (dy, dsum.map(Var::tensor)));
        let ([dx, dbranch, dw, db], alone) = (needs, self.places.y == 0);
        let made = match (self.form.centred, alone) {
            (true, true) => {
                let [dx, dw, db] = kernels::layer_norm_backward(x, stats, shape, w, dy, [dx, dw, db])?;
                [dx, None, dw, db]
            }
            (true, false) => kernels::add_layer_norm_backward(x, stats, shape, w, slopes, needs)?,
            (false, true) => {
                let [dx, dw] = kernels::rms_norm_backward(x, stats, shape, w, dy, [dx, dw])?;
                [dx, None, dw, None]
            }
            (false, false) => {
                let needs = [dx, dbranch, dw];
                let [dx, dbranch, dw] = kernels::add_rms_norm_backward(x, stats, shape, w, slopes, needs)?;
                [dx, dbranch, dw, None]
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

/// `y = x / sqrt(mean(x²) + eps) * w` over the last dimensions.
///
/// Derivative, with `xhat` the normalised row, `r` its inverse root and `g = dy w`: `dx = r (g - xhat mean(g xhat))` and
/// `dw = sum(dy xhat)` over the rows. Shapes: `x` [.., n..], `w` [n..]. Saves `x`, `w` and `r`.
/// Source: Zhang, Sennrich: Root Mean Square Layer Normalization (2019).
impl Var {
    /// Root-mean-square normalisation over the last dimensions, which must be `normalized_shape`, then scaled by
    /// `weight` if given.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn rms_norm(&self, normalized_shape: &[usize], weight: Option<&Var>, eps: f64) -> Result<Var> {
        begins();
        Form::rms(normalized_shape, eps, self.dtype()).record("rms_norm", self, [weight, None])
    }

    /// The residual stream, which is this, and its [`Var::rms_norm`] in the branch's dtype, as [`Var::pre_layer_norm`].
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn pre_rms_norm(
        &self,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        eps: f64,
        dtype: DType,
    ) -> Result<(Var, Var)> {
        begins();
        let form = Form::rms(normalized_shape, eps, dtype);
        form.record_on_stream("pre_rms_norm", (self, None), [weight, None])
    }
}

/// `s = x + residual` and `y`, the layer normalisation of `s`: what ends a branch of a transformer's block and begins the
/// next, in one pass.
///
/// Derivative: `dx = dresidual = ds + ` [`Var::layer_norm`]'s for `dy`, added in that pass; `dw` and `db` are
/// the latter's. Shapes: `x`, `residual`, `s` and `y` [.., n..], `w` and `b` [n..]. Saves `s`, `w` and the rows' numbers.
/// The residual may have another dtype than `x`, as bf16 branches beside a stream in f32; `y` has it too.
impl Var {
    /// `self + residual`, of one shape, and its [`Var::layer_norm`]: the values of [`Var::add`] and that, to the bit. The sum has this
    /// dtype, and the norm that of the residual.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn add_layer_norm(
        &self,
        residual: &Var,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        bias: Option<&Var>,
        eps: f64,
    ) -> Result<(Var, Var)> {
        begins();
        let form = Form::layer(normalized_shape, eps, residual.dtype());
        form.record_on_stream("add_layer_norm", (self, Some(residual)), [weight, bias])
    }
}

/// `s = x + residual` and `y`, the root-mean-square normalisation of `s`, in one pass.
///
/// Derivative: `dx = dresidual = ds + ` [`Var::rms_norm`]'s for `dy`, added in that pass; `dw` is the latter's.
/// Shapes: `x`, `residual`, `s` and `y` [.., n..], `w` [n..]. Saves `s`, `w` and a number a row.
impl Var {
    /// `self + residual`, of one shape, and its [`Var::rms_norm`]: the values of [`Var::add`] and that, to the bit. The sum has this
    /// dtype, and the norm that of the residual.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn add_rms_norm(
        &self,
        residual: &Var,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        eps: f64,
    ) -> Result<(Var, Var)> {
        begins();
        let form = Form::rms(normalized_shape, eps, residual.dtype());
        form.record_on_stream("add_rms_norm", (self, Some(residual)), [weight, None])
    }
}

#[cfg(test)]
mod tests;
