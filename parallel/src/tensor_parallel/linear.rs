//! [`ColumnParallelLinear`] and [`RowParallelLinear`]: affine maps split over ranks by their outputs or their inputs.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{
    Backward, Cx, Grads, Result as GradResult, SaveContext, SavedVariable, Var, begins, is_recording,
    linear_weight_grad, record_many,
};
use phalanx_nn::tensor::{Dims, Window};
use phalanx_nn::{
    Error, Init, LinearConfig, LinearMap, LinearSpec, Module, Parameter, Result, Scope, Shard, parameters,
};

use super::group::{BackwardExchange, TensorParallel};
use super::mappings::{Exchange, Split, exchanged};

/// `y = x Wᵀ + b` for activations `x` `[.., in]`. A rank computes some of the outputs, and holds those rows of `W` `[out, in]`
/// and of `b`. The outputs may come in sections of one size (queries, keys, values); a rank then has a part of each section. If
/// the ranks do not divide a size, parts differ by one.
///
/// If every rank needs all outputs ([`LinearSpec::whole`]), every rank holds all of `W`. The map is then applied outside the region, and
/// its result enters it.
pub struct ColumnParallelLinear {
    /// `[out / ranks, in]`
    pub weight: Parameter,
    /// `[out / ranks]`
    pub bias: Option<Parameter>,
    group: TensorParallel,
    /// How a section of the outputs is split; `None` if every rank has all outputs.
    split: Option<Split>,
    sections: usize,
    gathers: bool,
}

parameters!(ColumnParallelLinear { weight, bias });

impl ColumnParallelLinear {
    /// This rank's part of a linear map.
    ///
    /// # Errors
    /// If a section has fewer outputs than there are ranks, sections differ in size, or memory is short.
    pub fn new(group: &TensorParallel, scope: &Scope, map: LinearSpec<'_>) -> Result<ColumnParallelLinear> {
        let (group, sections) = (group.clone(), map.outputs.len());
        let total: usize = map.outputs.iter().sum();
        if map.whole {
            let config = LinearConfig::new(map.inputs, total).with_bias(map.bias).with_init(map.init);
            let phalanx_nn::Linear { weight, bias } = config.init(scope)?;
            return Ok(ColumnParallelLinear { weight, bias, group, split: None, sections, gathers: false });
        }
        let equal = map.outputs.first().filter(|size| map.outputs.iter().all(|other| other == *size));
        let size = *equal.ok_or_else(|| {
            let why = format!("got sections of {:?} outputs, wanted some of one size", map.outputs);
            Error::invalid(scope.path(), why)
        })?;
        let comm = group.comm();
        let what = format!("{}: outputs", scope.path());
        let split = Split::uneven(&what, 0, size, comm.size())?;
        let part = |inputs: &[usize]| section_part(sections, &split, comm.rank(), inputs);
        let held = sections * split.lengths[comm.rank()];
        let init = map.init.for_shape(&[total, map.inputs]);
        let weight = scope.shard("weight", &[held, map.inputs], part(&[map.inputs]), init)?.as_weight();
        let bias = map.bias.then(|| scope.shard("bias", &[held], part(&[]), Init::ZEROS)).transpose()?;
        Ok(ColumnParallelLinear { weight, bias, group, split: Some(split), sections, gathers: false })
    }

    /// Gathers the outputs: the result is those of all ranks side by side, the same on every rank.
    ///
    /// # Errors
    /// If there are several sections, since a rank's parts are then not contiguous.
    pub fn gather_output(self) -> Result<ColumnParallelLinear> {
        if self.sections != 1 {
            let why = format!("got {} sections to gather, wanted one", self.sections);
            return Err(Error::invalid(self.weight.name(), why));
        }
        Ok(ColumnParallelLinear { gathers: true, ..self })
    }

    /// The outputs of several maps for one input, which enters the region once for all of them.
    ///
    /// # Errors
    /// If the input does not fit.
    pub fn apply(maps: &[&ColumnParallelLinear], x: &Var) -> Result<Vec<Var>> {
        let split: Vec<&ColumnParallelLinear> =
            maps.iter().copied().filter(|map| map.split.is_some()).collect();
        let vars: Vec<WeightAndBias> = split.iter().map(|map| map.vars()).collect();
        let mut joint = match split.first() {
            Some(map) => columns(&map.group, x, &vars)?,
            None => Vec::new(),
        }
        .into_iter();
        let output = |map: &&ColumnParallelLinear| match &map.split {
            Some(split) => {
                let y = joint.next().ok_or_else(|| Error::invalid("columns", "an output is missing"))?;
                map.gathered(y, split)
            }
            None => map.everywhere(x),
        };
        maps.iter().map(output).collect()
    }

    fn vars(&self) -> WeightAndBias {
        (self.weight.var(), self.bias.as_ref().map(Parameter::var))
    }

    fn gathered(&self, y: Var, split: &Split) -> Result<Var> {
        if !self.gathers {
            return Ok(y);
        }
        let split = Split { dim: y.rank() - 1, ..split.clone() };
        let exchanges = [Exchange::Gather(split.clone()), Exchange::Part(split)];
        Ok(exchanged("gather_output", y, self.group.comm(), exchanges)?)
    }

    fn everywhere(&self, x: &Var) -> Result<Var> {
        let (weight, bias) = self.vars();
        Ok(self.group.enter(&x.linear(&weight, bias.as_ref())?)?)
    }
}

impl LinearMap for ColumnParallelLinear {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(ColumnParallelLinear::apply(&[self], x)?.swap_remove(0))
    }
}

/// A rank's rows of a matrix with rows in sections. With one section the shape has no dimension for sections.
fn section_part(sections: usize, split: &Split, rank: usize, inputs: &[usize]) -> Shard {
    let lead: &[usize] = if sections == 1 { &[] } else { &[sections] };
    let range = split.range(rank);
    let shape = |rows: usize| Dims::from_slice(&[lead, &[rows], inputs].concat());
    let mut offset = Dims::from_elem(0, lead.len() + 1 + inputs.len());
    offset[lead.len()] = range.start;
    Shard { window: Window { global: shape(split.total()), offset }, extent: shape(range.len()) }
}

/// `y = x Wᵀ + b` for inputs that are split over the ranks. A rank holds the columns of `W` `[out, in]` of its inputs. Its
/// product is a partial sum, and the sum over the ranks leaves the region. All ranks hold the bias, which is added once, after
/// the sum.
pub struct RowParallelLinear {
    /// `[out, in / ranks]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    group: TensorParallel,
    /// How the inputs are split.
    split: Split,
    scatters: bool,
}

parameters!(RowParallelLinear { weight, bias });

impl RowParallelLinear {
    /// This rank's part of a linear map.
    ///
    /// # Errors
    /// If there are fewer inputs than ranks, or memory is short.
    pub fn new(group: &TensorParallel, scope: &Scope, map: LinearSpec<'_>) -> Result<RowParallelLinear> {
        let comm = group.comm();
        let out = map.outputs.iter().sum();
        let split = Split::uneven(&format!("{}: inputs", scope.path()), 1, map.inputs, comm.size())?;
        let range = split.range(comm.rank());
        let window = Window {
            global: Dims::from_slice(&[out, map.inputs]),
            offset: Dims::from_slice(&[0, range.start]),
        };
        let held = [out, range.len()];
        let part = Shard { window, extent: Dims::from_slice(&held) };
        Ok(RowParallelLinear {
            weight: scope.shard("weight", &held, part, map.init)?.as_weight(),
            bias: map.bias.then(|| scope.parameter("bias", &[out], Init::ZEROS)).transpose()?,
            group: group.clone(),
            split,
            scatters: false,
        })
    }

    /// For inputs that every rank has whole: it takes its part of them.
    #[must_use]
    pub fn scatter_input(self) -> RowParallelLinear {
        RowParallelLinear { scatters: true, ..self }
    }

    /// The sum of the ranks' products, and the bias, which is still to be added.
    pub(super) fn forward_and_bias(&self, x: &Var) -> Result<(Var, Option<Var>)> {
        let part = match self.scatters {
            true => {
                let split = Split { dim: x.rank().saturating_sub(1), ..self.split.clone() };
                let exchanges = [Exchange::Part(split.clone()), Exchange::Gather(split)];
                exchanged("scatter_input", x.clone(), self.group.comm(), exchanges)?
            }
            false => x.clone(),
        };
        self.group.check_linear(self.bias.as_ref())?;
        let y = self.group.leave(part.linear(&self.weight.var(), None)?)?;
        Ok((y, self.bias.as_ref().map(Parameter::var)))
    }
}

impl LinearMap for RowParallelLinear {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Var) -> Result<Var> {
        let (y, bias) = self.forward_and_bias(x)?;
        Ok(match bias {
            Some(bias) => y.add(&bias)?,
            None => y,
        })
    }
}

/// A weight `[out, in]` and its bias.
type WeightAndBias = (Var, Option<Var>);

/// Linear maps of one input whose outputs are split, `y_i = f(x) W_iᵀ + b_i`, as one operation.
///
/// Derivative: `dx` is the backward exchange of `f` applied to the sum of `dy_i W_i`; `dW_i = dy_iᵀ f(x)`; `db_i` is the sum of
/// `dy_i`'s rows. The exchange of `dx` runs while the weights' gradients are computed. With sequence parallelism `x` is gathered again while `dy W` is computed:
///
/// ```text
/// this thread   start gather | dy W | start sum | (gather done) dyᵀ x, db | (sum done)
/// exchange            [ gather x ]        [ sum of dx            ]
/// ```
/// Saves the weights, and `x` before it enters, which with sequence parallelism is the rank's positions alone. `dW_i` is added
/// to the weight's gradient buffer directly, if there is one.
///
/// Source: Korthikanti et al. (2022), section 4.2.2; Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`.
pub(super) fn columns(group: &TensorParallel, x: &Var, maps: &[WeightAndBias]) -> GradResult<Vec<Var>> {
    if is_recording(&[x]) && maps.iter().any(|(weight, _)| weight.panels().is_some()) {
        let unpacked = |(weight, bias): &WeightAndBias| Ok((weight.unpacked()?.into_owned(), bias.clone()));
        return columns(group, x, &maps.iter().map(unpacked).collect::<GradResult<Vec<_>>>()?);
    }
    begins();
    let exchanges = group.entering(x)?;
    let entered = exchanges[0].run(group.comm(), x.tensor(), false)?;
    let outputs = Var::multiply_as_weights(&entered, maps)?;
    drop(entered);
    let weights = maps.iter().map(|(weight, _)| weight);
    let biases = maps.iter().filter_map(|(_, bias)| bias.as_ref());
    let inputs: Vec<&Var> = [x].into_iter().chain(weights).chain(biases).collect();
    let save = |s: &SaveContext<'_>| {
        let trains = (1..=maps.len()).any(|i| s.needs(i));
        let weights = (1..=maps.len()).map(|i| s.needs(0).then(|| s.input(i)).transpose());
        Ok(Columns {
            group: group.clone(),
            exchanges,
            x: trains.then(|| s.input(0)).transpose()?,
            weights: weights.collect::<GradResult<_>>()?,
            biased: maps.iter().map(|(_, bias)| bias.is_some()).collect(),
        })
    };
    Ok(record_many("column_parallel", &inputs, outputs.into(), save)?.into_vec())
}

/// The node of [`columns`].
struct Columns {
    group: TensorParallel,
    /// Of `x` when it enters the region, and of its gradient when that leaves it.
    exchanges: [Exchange; 2],
    x: Option<SavedVariable>,
    weights: Vec<Option<SavedVariable>>,
    biased: Vec<bool>,
}

impl Backward for Columns {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        let count = self.weights.len();
        let dys = (0..count).map(|i| cx.dy_at(i).map(|dy| dy.flatten(0, -2)).transpose());
        let dys: Vec<Option<Var>> = dys.collect::<GradResult<_>>()?;
        let [enter, leave] = self.exchanges.clone();
        let begin =
            |x: Var, exchanges| BackwardExchange::new(x, self.group.comm(), exchanges, cx.create_graph());
        let x = self.x.as_ref().filter(|_| (1..=count).any(|i| cx.needs(i)));
        let x = x.map(|x| begin(cx.get(x)?, [enter.clone(), leave.clone()])).transpose()?;
        let dx = self.partial(cx, &dys)?.map(|dx| begin(dx, [leave, enter])).transpose()?;
        let x = x.map(|x| x.finish()?.flatten(0, -2)).transpose()?;
        let mut grads = Grads::from_elem(None, 1 + count);
        for (i, dy) in dys.iter().enumerate() {
            if let (Some(dy), Some(x), true) = (dy, &x, cx.needs(1 + i)) {
                grads[1 + i] = linear_weight_grad(cx, 1 + i, dy, x)?;
            }
        }
        for dy in dys.iter().zip(&self.biased).filter_map(|(dy, &biased)| biased.then_some(dy)) {
            let dy = dy.as_ref().filter(|_| cx.needs(grads.len()));
            grads.push(dy.map(|dy| dy.sum(&[0], false)).transpose()?);
        }
        grads[0] = dx.map(BackwardExchange::finish).transpose()?;
        Ok(grads)
    }
}

impl Columns {
    /// This rank's partial sum of `dx`, the sum of `dy_i W_i`; `None` if `dx` is not needed.
    fn partial(&self, cx: &Cx<'_>, dys: &[Option<Var>]) -> GradResult<Option<Var>> {
        let mut sum: Option<Var> = None;
        for (dy, weight) in dys.iter().zip(&self.weights) {
            let (Some(dy), Some(weight), true) = (dy, weight, cx.needs(0)) else { continue };
            let weight = cx.get(weight)?;
            sum = Some(match sum {
                None => dy.matmul(&weight)?,
                Some(sum) if cx.create_graph() => sum.add(&dy.matmul(&weight)?)?,
                Some(sum) => {
                    let mut sum = sum.into_tensor();
                    kernels::matmul_accumulate_(&mut sum, dy.tensor(), weight.tensor())?;
                    Var::new(sum)
                }
            });
        }
        let lead =
            (0..dys.len()).find_map(|i| cx.dy_at(i)).map_or(&[][..], |dy| &dy.shape()[..dy.rank() - 1]);
        let shaped = |dx: Var| dx.reshape_to(&[lead, &dx.shape()[1..]].concat());
        sum.map(shaped).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_its_part_of_every_section() {
        let split = Split::uneven("outputs", 0, 8, 3).unwrap();
        let part = section_part(3, &split, 1, &[5]);
        assert_eq!(&part.window.global[..], [3, 8, 5]);
        assert_eq!((&part.window.offset[..], &part.extent[..]), (&[0, 3, 0][..], &[3, 3, 5][..]));
        let bias = section_part(1, &split, 2, &[]);
        assert_eq!((&bias.window.global[..], &bias.window.offset[..]), (&[8][..], &[6][..]));
        assert_eq!(&bias.extent[..], [2]);
    }
}
