//! [`HeadsParallelRmsNorm`]: an RMS norm over the features of all heads, of which each rank has some.
//!
//! ```text
//! each rank, of each row     s = sum of x² over its features
//! one exchange, then         r = 1 / sqrt((sum of s) / features + eps),   y = x r w
//! backward, of each row      c = sum of dy w x r over its features
//! one exchange, then         dx = r (dy w - x r (sum of c) / features),   dw = sum over rows of dy x r
//! ```
//! Sums over features are added within a rank first and then in order of the ranks, in f32, or f64 of f64 values. Saves x, w and r.
//! Sources: Zhang and Sennrich: Root mean square layer normalization (2019); OLMo Team: 2 OLMo 2 Furious (2025).

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{
    Backward, Cx, Grads, Result as GradResult, SaveContext, SavedVariable, Var, begins, record,
};
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{Error, HeadsNormSpec, Init, Module, Parameter, Result, Scope, Shard, parameters};
use phalanx_tensor::{DType, Scalar, Tensor};

use super::TensorParallel;
use super::group::BackwardExchange;
use super::mappings::{Exchange, Split, exchanged};
use crate::comm::Comm;

/// `x / sqrt(mean(x²) + eps) * weight` for this rank's features `[.., features / ranks]`, the mean over those of all ranks. The weight is cut
/// with the features, so its gradient is this rank's own.
pub struct HeadsParallelRmsNorm {
    /// `[features / ranks]`
    pub weight: Parameter,
    group: TensorParallel,
    features: usize,
    eps: f64,
    plus_one: bool,
}

parameters!(HeadsParallelRmsNorm { weight });

impl HeadsParallelRmsNorm {
    /// This rank's part of a norm.
    ///
    /// # Errors
    /// If the ranks do not divide the features, `eps` is negative or no number, or memory is short.
    pub fn new(group: &TensorParallel, scope: &Scope, spec: HeadsNormSpec) -> Result<HeadsParallelRmsNorm> {
        let HeadsNormSpec { features, eps, plus_one } = spec;
        let (comm, path) = (group.comm(), scope.path());
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(Error::invalid(path, format!("got an eps of {eps}, wanted a number from 0 up")));
        }
        let range = Split::even(&format!("{path}: features"), 0, features, comm.size())?.range(comm.rank());
        let window =
            Window { global: Dims::from_slice(&[features]), offset: Dims::from_slice(&[range.start]) };
        let held = [range.len()];
        let part = Shard { window, extent: Dims::from_slice(&held) };
        let init = if plus_one { Init::ZEROS } else { Init::ONES };
        let weight = scope.shard("weight", &held, part, init)?;
        Ok(HeadsParallelRmsNorm { weight, group: group.clone(), features, eps, plus_one })
    }
}

impl Module for HeadsParallelRmsNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        let weight = self.weight.var();
        let factor = if self.plus_one { weight.add_scalar(1.0)? } else { weight };
        let norm = Norm { features: self.features, eps: self.eps, comm: self.group.comm().clone() };
        Ok(norm.apply(x, &factor)?)
    }
}

const OP: &str = "heads_parallel_rms_norm";
/// Every rank uses the sum for its own features.
const SUMS: [Exchange; 2] = [Exchange::Sum, Exchange::Sum];

#[derive(Clone)]
struct Norm {
    /// Those of all ranks.
    features: usize,
    eps: f64,
    comm: Comm,
}

impl Norm {
    /// The normalised `x` `[.., own features]`, times `weight` `[own features]`.
    fn apply(&self, x: &Var, weight: &Var) -> GradResult<Var> {
        begins();
        if x.shape().last() != weight.shape().last() || weight.rank() != 1 || x.dtype() != weight.dtype() {
            let got = format!("got {:?} {} and a weight", x.shape(), x.dtype());
            let got = format!("{got} {:?} {}", weight.shape(), weight.dtype());
            let wanted = "wanted [.., this rank's features] and a weight of as many, of one dtype";
            return Err(Error::invalid(OP, format!("{got}, {wanted}")).into());
        }
        let wide = kernels::cast(x.tensor(), wide_of(x.dtype()))?;
        let squares = kernels::sum(&kernels::square(&wide)?, &[-1], true)?;
        let sum = Exchange::Sum.run(&self.comm, &squares, true)?;
        let mean = kernels::mul_scalar(&sum, Scalar::Float(1.0 / self.features as f64))?;
        let scale = kernels::rsqrt(&kernels::add_scalar(&mean, Scalar::Float(self.eps))?)?;
        let normed = kernels::mul(&wide, &scale)?;
        let y = kernels::mul(&normed, &kernels::cast(weight.tensor(), wide.dtype())?)?;
        let y = kernels::cast(&y, x.dtype())?;
        record(OP, &[x, weight], y, |s: &SaveContext<'_>| {
            Ok(Normed { x: s.input(0)?, weight: s.input(1)?, scale, norm: self.clone() })
        })
    }

    /// `1 / sqrt(mean(x²) + eps)`, as a function of `x` that is differentiated again.
    fn scale(&self, x: &Var) -> GradResult<Var> {
        let squares = x.square()?.sum(&[-1], true)?;
        let mean = exchanged(OP, squares, &self.comm, SUMS)?.mul_scalar(1.0 / self.features as f64)?;
        mean.add_scalar(self.eps)?.rsqrt()
    }
}

/// The dtype that values of `dtype` are computed in.
fn wide_of(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The node of [`Norm::apply`].
struct Normed {
    x: SavedVariable,
    weight: SavedVariable,
    /// `[.., 1]`
    scale: Tensor,
    norm: Norm,
}

impl Backward for Normed {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        let saved = cx.get(&self.x)?;
        let (x, dy) = (saved.to(self.scale.dtype())?, cx.dy().to(self.scale.dtype())?);
        let scale = if cx.create_graph() { self.norm.scale(&x)? } else { Var::new(self.scale.clone()) };
        let normed = x.mul(&scale)?;
        let mut grads = Grads::from_elem(None, 2);
        let pending = match cx.needs(0) {
            true => {
                let slope = dy.mul(&cx.get(&self.weight)?.to(x.dtype())?)?;
                let along = slope.mul(&normed)?.sum(&[-1], true)?;
                let along = BackwardExchange::new(along, &self.norm.comm, SUMS, cx.create_graph())?;
                Some((slope, along))
            }
            false => None,
        };
        if cx.needs(1) {
            let dw = dy.mul(&normed)?.flatten(0, -2)?.sum(&[0], false)?;
            grads[1] = Some(dw.to(saved.dtype())?);
        }
        if let Some((slope, along)) = pending {
            let along = along.finish()?.mul_scalar(1.0 / self.norm.features as f64)?;
            let dx = slope.sub(&normed.mul(&along)?)?.mul(&scale)?;
            grads[0] = Some(dx.to(saved.dtype())?);
        }
        Ok(grads)
    }
}
