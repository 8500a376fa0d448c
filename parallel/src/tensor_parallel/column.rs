//! [`ColumnParallelLinear`]: an affine map cut by its outputs.

use phalanx_nn::autograd::Var;
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{Error, Init, LinearConfig, Map, Module, Parameter, Result, Scope, Shard, parameters};

use super::TensorParallel;
use super::columns::{self, columns};
use super::cut::Cut;
use super::exchange::Exchange;
use super::regions::exchanged;

/// `y = x Wᵀ + b` for a stream `x` `[.., in]`, of which this rank makes some of the outputs: it holds those rows of `W`
/// `[out, in]` and of `b`. The outputs may come in sections of one size, of each of which a rank has a part. Sizes that do
/// not divide by the ranks give parts that differ by one.
///
/// Where all outputs are wanted everywhere ([`Map::whole`]), every rank holds all of `W`: the map is applied to the stream,
/// and its result enters the region.
pub struct ColumnParallelLinear {
    /// `[out / ranks, in]`
    pub weight: Parameter,
    /// `[out / ranks]`
    pub bias: Option<Parameter>,
    group: TensorParallel,
    /// How a section of the outputs is cut; not at all if absent.
    cut: Option<Cut>,
    sections: usize,
    gathers: bool,
}

parameters!(ColumnParallelLinear { weight, bias });

impl ColumnParallelLinear {
    /// This rank's part of a map.
    ///
    /// # Errors
    /// If a section has fewer outputs than there are ranks, sections differ in size, or memory is short.
    pub fn new(group: &TensorParallel, scope: &Scope, map: Map<'_>) -> Result<ColumnParallelLinear> {
        let (group, sections) = (group.clone(), map.outputs.len());
        let total: usize = map.outputs.iter().sum();
        if map.whole {
            let config = LinearConfig::new(map.inputs, total).with_bias(map.bias).with_init(map.init);
            let phalanx_nn::Linear { weight, bias } = config.init(scope)?;
            return Ok(ColumnParallelLinear { weight, bias, group, cut: None, sections, gathers: false });
        }
        let equal = map.outputs.first().filter(|size| map.outputs.iter().all(|other| other == *size));
        let size = *equal.ok_or_else(|| {
            let why = format!("got sections of {:?} outputs, wanted some of one size", map.outputs);
            Error::invalid(scope.path(), why)
        })?;
        let comm = group.comm();
        let what = format!("{}: outputs", scope.path());
        let cut = Cut::shares(&what, 0, size, comm.size())?;
        let part = |inputs: &[usize]| section_part(sections, &cut, comm.rank(), inputs);
        let held = sections * cut.lengths[comm.rank()];
        let init = map.init.for_shape(&[total, map.inputs]);
        let weight = scope.shard("weight", &[held, map.inputs], part(&[map.inputs]), init)?;
        let bias = map.bias.then(|| scope.shard("bias", &[held], part(&[]), Init::ZEROS)).transpose()?;
        Ok(ColumnParallelLinear { weight, bias, group, cut: Some(cut), sections, gathers: false })
    }

    /// With the outputs of all ranks side by side as the result, the same on every rank.
    ///
    /// # Errors
    /// If there are several sections, whose parts do not lie side by side.
    pub fn gather_output(self) -> Result<ColumnParallelLinear> {
        if self.sections != 1 {
            let why = format!("got {} sections to gather, wanted one", self.sections);
            return Err(Error::invalid(self.weight.name(), why));
        }
        Ok(ColumnParallelLinear { gathers: true, ..self })
    }

    /// What several maps make of one input, which enters the region once for all.
    ///
    /// # Errors
    /// If the input does not fit.
    pub fn apply(maps: &[&ColumnParallelLinear], x: &Var) -> Result<Vec<Var>> {
        let cut: Vec<&ColumnParallelLinear> = maps.iter().copied().filter(|map| map.cut.is_some()).collect();
        let vars: Vec<columns::Map> = cut.iter().map(|map| map.vars()).collect();
        let mut joint = match cut.first() {
            Some(map) => columns(&map.group, x, &vars)?,
            None => Vec::new(),
        }
        .into_iter();
        let output = |map: &&ColumnParallelLinear| match &map.cut {
            Some(cut) => {
                let y = joint.next().ok_or_else(|| Error::invalid("columns", "an output is missing"))?;
                map.gathered(y, cut)
            }
            None => map.everywhere(x),
        };
        maps.iter().map(output).collect()
    }

    fn vars(&self) -> columns::Map {
        (self.weight.var(), self.bias.as_ref().map(Parameter::var))
    }

    fn gathered(&self, y: Var, cut: &Cut) -> Result<Var> {
        if !self.gathers {
            return Ok(y);
        }
        let cut = Cut { dim: y.rank() - 1, ..cut.clone() };
        let exchanges = [Exchange::Gather(cut.clone()), Exchange::Part(cut)];
        Ok(exchanged("gather_output", y, self.group.comm(), exchanges)?)
    }

    fn everywhere(&self, x: &Var) -> Result<Var> {
        let (weight, bias) = self.vars();
        Ok(self.group.enter(&x.linear(&weight, bias.as_ref())?)?)
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(ColumnParallelLinear::apply(&[self], x)?.swap_remove(0))
    }
}

/// A rank's rows of a matrix whose rows come in sections; of one section without a dimension for them.
fn section_part(sections: usize, cut: &Cut, rank: usize, inputs: &[usize]) -> Shard {
    let lead: &[usize] = if sections == 1 { &[] } else { &[sections] };
    let range = cut.range(rank);
    let shape = |rows: usize| Dims::from_slice(&[lead, &[rows], inputs].concat());
    let mut offset = Dims::from_elem(0, lead.len() + 1 + inputs.len());
    offset[lead.len()] = range.start;
    Shard { window: Window { global: shape(cut.whole()), offset }, extent: shape(range.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_its_part_of_every_section() {
        let cut = Cut::shares("outputs", 0, 8, 3).unwrap();
        let part = section_part(3, &cut, 1, &[5]);
        assert_eq!(&part.window.global[..], [3, 8, 5]);
        assert_eq!((&part.window.offset[..], &part.extent[..]), (&[0, 3, 0][..], &[3, 3, 5][..]));
        let bias = section_part(1, &cut, 2, &[]);
        assert_eq!((&bias.window.global[..], &bias.window.offset[..]), (&[8][..], &[6][..]));
        assert_eq!(&bias.extent[..], [2]);
    }
}
