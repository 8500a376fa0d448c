//! [`RowParallelLinear`]: an affine map cut by its inputs.

use phalanx_nn::autograd::Var;
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{Init, Map, Module, Parameter, Result, Scope, Shard, parameters};

use super::TensorParallel;
use super::cut::Cut;
use super::exchange::Exchange;
use super::regions::exchanged;

/// `y = x Wᵀ + b`, of which this rank has a part of the inputs and those columns of `W` `[out, in]`: its product is a part
/// of the sum, which leaves the region for the stream. All ranks hold the bias, which is added once, after the sum.
pub struct RowParallelLinear {
    /// `[out, in / ranks]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    group: TensorParallel,
    /// How the inputs are cut.
    cut: Cut,
    scatters: bool,
}

parameters!(RowParallelLinear { weight, bias });

impl RowParallelLinear {
    /// This rank's part of a map.
    ///
    /// # Errors
    /// If there are fewer inputs than ranks, or memory is short.
    pub fn new(group: &TensorParallel, scope: &Scope, map: Map<'_>) -> Result<RowParallelLinear> {
        let comm = group.comm();
        let out = map.outputs.iter().sum();
        let cut = Cut::shares(&format!("{}: inputs", scope.path()), 1, map.inputs, comm.size())?;
        let range = cut.range(comm.rank());
        let window = Window {
            global: Dims::from_slice(&[out, map.inputs]),
            offset: Dims::from_slice(&[0, range.start]),
        };
        let held = [out, range.len()];
        let part = Shard { window, extent: Dims::from_slice(&held) };
        Ok(RowParallelLinear {
            weight: scope.shard("weight", &held, part, map.init)?,
            bias: map.bias.then(|| scope.parameter("bias", &[out], Init::ZEROS)).transpose()?,
            group: group.clone(),
            cut,
            scatters: false,
        })
    }

    /// For inputs that every rank has whole, of which it takes its part.
    #[must_use]
    pub fn scatter_input(self) -> RowParallelLinear {
        RowParallelLinear { scatters: true, ..self }
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Var) -> Result<Var> {
        let part = match self.scatters {
            true => {
                let cut = Cut { dim: x.rank().saturating_sub(1), ..self.cut.clone() };
                let exchanges = [Exchange::Part(cut.clone()), Exchange::Gather(cut)];
                exchanged("scatter_input", x.clone(), self.group.comm(), exchanges)?
            }
            false => x.clone(),
        };
        let y = self.group.leave(part.linear(&self.weight.var(), None)?)?;
        Ok(match &self.bias {
            Some(bias) => y.add(&bias.var())?,
            None => y,
        })
    }
}
