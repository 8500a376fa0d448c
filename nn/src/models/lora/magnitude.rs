//! Magnitudes of weight-decomposed adapters (DoRA): each row of a weight is a length, which is trained by itself, and a direction, which
//! an adapter changes.
//!
//! ```text
//! y = m * (W + scale B A) x / n + b,    n = ||W + scale B A|| of each row,    m: [out], at first ||W|| of each row
//! ```
//! In backward `n` is a constant. While the adapter adds nothing `m / n` is 1 to the last bit, so a model begins as it was. Both are in f32
//! (f64 beside f64): in bf16 a step of `m` would be lost.
//!
//! Source: Liu et al.: DoRA: Weight-Decomposed Low-Rank Adaptation (2024), sections 4.1 and 4.3.

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Tensor};

use crate::{Init, LayerFactory, Parameter, Result, Scope, Shard};

/// A magnitude's name beside a layer's weight. PEFT's files have the same.
pub(super) const MAGNITUDE: &str = "lora_magnitude_vector";
/// Elements of `W + scale B A` that exist at a time.
const PANEL: usize = 1 << 20;

/// The dtype of magnitudes beside weights of this one.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The magnitude of a layer's rows, cut as they are. It is 0 until [`reset`].
pub(super) fn magnitude(scope: &Scope, weight: &Parameter) -> Result<Parameter> {
    let of_rows = |shape: &[usize]| shape[..shape.len() - 1].iter().copied().collect();
    let mut part: Shard = weight.part().clone();
    part.window.global = of_rows(&part.window.global);
    part.window.offset = of_rows(&part.window.offset);
    part.extent = of_rows(&part.extent);
    let rows = weight.tensor().shape()[0];
    scope.with_dtype(wide(scope.dtype())).shard(MAGNITUDE, &[rows], part, Init::ZEROS)
}

/// Whether ranks have some columns each.
fn is_cut_by_columns(weight: &Parameter) -> bool {
    let part = weight.part();
    part.extent.last() != part.window.global.last()
}

/// Sums of squares of the rows of `W + scale B A`: `W` `[rows, columns]`, `A` `[rank, columns]`, `B` `[rows, rank]`. A panel of rows is
/// made at a time, and added in f32 or f64.
fn squares(weight: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let (dtype, [rows, columns]) = (wide(weight.dtype()), [weight.shape()[0], weight.shape()[1]]);
    let (a, b) = (kernels::cast(a, dtype)?, kernels::cast(b, dtype)?);
    let (mut of_panels, each) = (Vec::new(), (PANEL / columns.max(1)).max(1));
    for first in (0..rows).step_by(each) {
        let count = each.min(rows - first);
        let more = kernels::mul_scalar(&kernels::matmul(&b.narrow(0, first, count)?, &a)?, scale.into())?;
        let sum = kernels::add(&kernels::cast(&weight.narrow(0, first, count)?, dtype)?, &more)?;
        of_panels.push(kernels::sum(&kernels::mul(&sum, &sum)?, &[1], false)?);
    }
    match &of_panels[..] {
        [one] => Ok(one.clone()),
        [] => Ok(Tensor::zeros(&[0], dtype, weight.device())?),
        panels => Ok(kernels::cat(&panels.iter().collect::<Vec<_>>(), 0)?),
    }
}

/// A layer's weight and adapter, as tensors.
pub(super) struct Adapted<'a> {
    pub(super) weight: &'a Tensor,
    pub(super) a: &'a Tensor,
    pub(super) b: &'a Tensor,
    pub(super) scale: f64,
}

impl Adapted<'_> {
    /// The lengths of the rows of `W + scale B A`. If ranks have some columns of `W` each, they add their squares.
    fn norms(&self, layers: &impl LayerFactory, weight: &Parameter) -> Result<Tensor> {
        let squares = squares(self.weight, self.a, self.b, self.scale)?;
        let squares = if is_cut_by_columns(weight) { layers.sum_over_ranks(squares)? } else { squares };
        Ok(kernels::sqrt(&squares)?)
    }

    /// `m / n`, a factor of each row. Of a row of zeros it is 0: it adds nothing.
    pub(super) fn factors(
        &self,
        layers: &impl LayerFactory,
        weight: &Parameter,
        magnitude: &Var,
    ) -> Result<Var> {
        let norms = self.norms(layers, weight)?;
        Ok(magnitude.div(&Var::new(not_zero(&norms)?))?)
    }

    /// `m (W + scale B A) / n`, whole rows of it.
    pub(super) fn merged(&self, magnitude: &Tensor) -> Result<Tensor> {
        let dtype = wide(self.weight.dtype());
        let norms = kernels::sqrt(&squares(self.weight, self.a, self.b, self.scale)?)?;
        let factors = kernels::div(&kernels::cast(magnitude, dtype)?, &not_zero(&norms)?)?.unsqueeze(1)?;
        let product = kernels::matmul(&kernels::cast(self.b, dtype)?, &kernels::cast(self.a, dtype)?)?;
        let more = kernels::mul_scalar(&product, self.scale.into())?;
        let sum = kernels::add(&kernels::cast(self.weight, dtype)?, &more)?;
        Ok(kernels::cast(&kernels::mul(&sum, &factors)?, self.weight.dtype())?)
    }
}

fn not_zero(norms: &Tensor) -> Result<Tensor> {
    Ok(kernels::clamp(norms, Some(f64::from(f32::MIN_POSITIVE).into()), None)?)
}

/// Sets every magnitude among a model's parameters to the lengths of its weight's rows with what the adapter adds now. `adapter` gives a
/// layer's A and factor for its path.
pub(super) fn reset(
    layers: &impl LayerFactory,
    parameters: &[Parameter],
    adapter: impl Fn(&str) -> Result<Option<(Parameter, f64)>>,
) -> Result<()> {
    let find = |name: String| parameters.iter().find(|p| p.name() == name);
    for magnitude in parameters {
        let Some(layer) = magnitude.name().strip_suffix(MAGNITUDE) else { continue };
        let [Some(weight), Some(b)] = ["weight", "lora_B.weight"].map(|name| find(format!("{layer}{name}")))
        else {
            continue;
        };
        let Some((a, scale)) = adapter(layer.strip_suffix('.').unwrap_or(layer))? else { continue };
        let [held, a, b] = [weight.drawn()?, a.drawn()?, b.drawn()?];
        let adapted = Adapted { weight: &held, a: &a, b: &b, scale };
        magnitude.load(&adapted.norms(layers, weight)?)?;
    }
    Ok(())
}
