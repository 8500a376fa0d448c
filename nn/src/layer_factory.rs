//! [`LayerFactory`]: makes the linear layers, embeddings and heads of a model, so that one model runs on one device and on a
//! tensor-parallel mesh.
//!
//! A mesh shards a *column* linear layer by its outputs, the *row* layer after it by its inputs, attention by
//! heads, the embedding and the head by the vocabulary, and with sequence parallelism the residual stream (the
//! activations between the blocks) by positions. [`OneDevice`] shards nothing.

use std::ops::Range;
use std::sync::Arc;

use phalanx_autograd::{CrossEntropy, Gelu, Reduction, Var};
use phalanx_tensor::{Context, Device, Dims, Tensor, Window};

use crate::modules::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNormConfig};
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// Gives the name in a model's files of what has this name in the model.
pub type FileNames = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// A linear layer to be made.
#[derive(Clone, Copy, Debug)]
pub struct LinearSpec<'a> {
    /// Features in.
    pub inputs: usize,
    /// Features out, in sections that are sharded one by one: the queries, keys and values of a joint layer.
    pub outputs: &'a [usize],
    /// Whether there is a bias. Its initial value is 0.
    pub bias: bool,
    /// The initial weights.
    pub init: Init,
    /// Whether every rank needs the whole output.
    pub whole: bool,
}

/// A norm over the features of all heads to be made, of heads that ranks may divide.
#[derive(Clone, Copy, Debug)]
pub struct HeadsNormSpec {
    /// Features of all heads together.
    pub features: usize,
    /// Added to mean squares.
    pub eps: f64,
    /// Whether the weight is 1 more than the parameter.
    pub plus_one: bool,
}

/// An embedding table to be made.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingSpec {
    /// Rows.
    pub count: usize,
    /// Features.
    pub width: usize,
    /// The initial values.
    pub init: Init,
    /// Whether the head shares the table.
    pub tied: bool,
    /// The row of padding, if there is one: it is 0 at first, and looking it up gives it no gradient.
    pub padding: Option<usize>,
}

impl EmbeddingSpec {
    /// The table of a head, which has a row of padding if it is the embedding's.
    pub(crate) fn of_head(self) -> EmbeddingSpec {
        EmbeddingSpec { padding: self.padding.filter(|_| self.tied), ..self }
    }
}

/// A linear map `y = x Wᵀ + b` that a [`LayerFactory`] has made. A rank may have a part of it.
pub trait LinearMap: Module {
    /// The weight `[out, in]`, or this rank's rows or columns of it.
    fn weight(&self) -> &Parameter;

    /// The bias `[out]`, if there is one, or what this rank has of it.
    fn bias(&self) -> Option<&Parameter>;
}

impl LinearMap for Linear {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }
}

/// Makes the layers of a model.
pub trait LayerFactory: Send + Sync + 'static {
    /// A linear layer whose output may be sharded.
    type Column: LinearMap + 'static;
    /// A linear layer whose input may be sharded and whose output is whole.
    type Row: LinearMap + 'static;
    /// An embedding table.
    type Embedding: Module + 'static;
    /// The linear layer to the vocabulary, with the loss.
    type Head: Head + 'static;

    /// A linear layer from the residual stream to a sharded output.
    ///
    /// # Errors
    /// If it cannot be cut or allocated.
    fn column(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Self::Column>;

    /// A linear layer from a sharded input to the residual stream.
    ///
    /// # Errors
    /// If it cannot be cut or allocated.
    fn row(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Self::Row>;

    /// The outputs of several column layers for one input. If ranks have to exchange the input, they do so once for all layers.
    ///
    /// # Errors
    /// If the input does not fit.
    fn columns(&self, layers: &[&Self::Column], x: &Var) -> Result<Vec<Var>> {
        layers.iter().map(|layer| layer.forward(x)).collect()
    }

    /// An RMS norm `[.., features here]` to the same, over the features of all heads, of which this rank has those that
    /// [`LayerFactory::heads`] says, as a column layer gives them. If ranks divide the heads, they add their sums of squares.
    ///
    /// # Errors
    /// If it cannot be cut or allocated.
    fn heads_norm(&self, scope: &Scope, spec: HeadsNormSpec) -> Result<Box<dyn Module>>;

    /// What is added to the logits of the gate of this scope, which every rank has as a whole: nothing, unless gates have adapters.
    ///
    /// # Errors
    /// If it cannot be allocated.
    fn beside_gate(&self, _scope: &Scope, _spec: LinearSpec<'_>) -> Result<Option<Box<dyn Module>>> {
        Ok(None)
    }

    /// A column layer's output after gelu (by tanh), in one pass where the layer can.
    ///
    /// # Errors
    /// If the input does not fit.
    fn column_gelu(&self, layer: &Self::Column, x: Var) -> Result<Var> {
        gelu_after(layer, x)
    }

    /// A row layer's output, and its bias if that is still to be added: by [`Dropout::bias_dropout_add`](crate::Dropout::bias_dropout_add),
    /// in one pass with what follows. `None` if the layer has no bias, or added it to the product at no cost.
    ///
    /// # Errors
    /// If the input does not fit.
    fn row_and_bias(&self, layer: &Self::Row, x: &Var) -> Result<(Var, Option<Var>)> {
        Ok((layer.forward(x)?, None))
    }

    /// An embedding from indices to the residual stream.
    ///
    /// # Errors
    /// If it cannot be cut or allocated.
    fn embedding(&self, scope: &Scope, spec: EmbeddingSpec) -> Result<Self::Embedding>;

    /// The head: with the table of `tied`, or with a table of its own.
    ///
    /// # Errors
    /// If it cannot be cut or allocated.
    fn head(&self, scope: &Scope, spec: EmbeddingSpec, tied: Option<&Self::Embedding>) -> Result<Self::Head>;

    /// A bias `[vocabulary]` for the scores of a head, of which this rank has those of its scores. Its initial value is 0.
    ///
    /// # Errors
    /// If it cannot be cut or allocated.
    fn head_bias(&self, scope: &Scope, vocabulary: usize) -> Result<Parameter>;

    /// Which of `heads` attention heads this rank has.
    ///
    /// # Errors
    /// If they cannot be cut.
    fn heads(&self, heads: usize) -> Result<Range<usize>>;

    /// Which of `keys` key heads this rank has, which `queries` query heads share evenly: those that its query heads use, or all if
    /// the key heads cannot be cut as the query heads are.
    ///
    /// # Errors
    /// If the query heads cannot be cut.
    fn key_heads(&self, queries: usize, keys: usize) -> Result<Range<usize>>;

    /// Which of the `features` features of a column layer's only section this rank has.
    ///
    /// # Errors
    /// If they cannot be cut.
    fn features(&self, features: usize) -> Result<Range<usize>>;

    /// Which of the `positions` positions of the residual stream this rank has.
    ///
    /// # Errors
    /// If they cannot be cut.
    fn stream(&self, positions: usize) -> Result<Range<usize>>;

    /// Keeps the residual stream whole on every rank from now on, or no longer. Passes with caches of keys and values want it whole, since
    /// one new position cannot be cut. No graph is recorded meanwhile. Layers that never cut the stream leave it as it is.
    fn set_whole_stream(&self, _whole: bool) {}

    /// Runs `work` on all positions of a part of the residual stream `x` `[B, T, ..]`, and returns this rank's part of its result
    /// `[B, T, ..]`. Where ranks have parts of the stream, the layers that `work` calls exchange nothing: each rank's result is what its own
    /// part of each layer adds, and the ranks' results are added. So are the gradients of what every rank has whole, of which each then
    /// computes a part. A value whose gradient every rank knows whole must have it on one rank alone, such as that of the position
    /// ([`LayerFactory::stream`]).
    ///
    /// # Errors
    /// Those of `work`; if the positions cannot be cut, or a rank does not take part.
    fn on_whole_stream(&self, x: &Var, work: &mut dyn FnMut(&Var) -> Result<Var>) -> Result<Var> {
        work(x)
    }

    /// The sum of `x` over the ranks that have the parts of a layer, in order of the ranks; `x` itself if layers are not cut. No gradient
    /// passes through it.
    ///
    /// # Errors
    /// If a rank does not take part.
    fn sum_over_ranks(&self, x: Tensor) -> Result<Tensor> {
        Ok(x)
    }

    /// How ranks that divide the experts of a mixture exchange tokens; `None` if this rank has all experts.
    fn experts(&self) -> Option<&dyn ExpertExchange> {
        None
    }

    /// Is called with parameters that every rank has whole and uses for its part of the heads, so that their gradients are added over the
    /// ranks.
    ///
    /// # Errors
    /// If they do not fit these layers.
    fn partial(&self, _parameters: &[Parameter]) -> Result<()> {
        Ok(())
    }

    /// Is called before the layers of a decoder are made, with its files' names of parameters, and whether it has all blocks of its model.
    fn begins(&self, _names: FileNames, _whole: bool) {}

    /// Whether a head that a model ties to the embedding of this name has a table of its own with these layers.
    ///
    /// # Errors
    /// If that cannot be said.
    fn unties(&self, _embedding: &str) -> Result<bool> {
        Ok(false)
    }

    /// Is called with the parameters of a model, or of a stage, once it is complete.
    ///
    /// # Errors
    /// If they do not fit these layers.
    fn built(&self, _parameters: &[Parameter]) -> Result<()> {
        Ok(())
    }

    /// Is called with these parameters again when weights were read into them from files.
    ///
    /// # Errors
    /// If they do not fit these layers.
    fn loaded(&self, _parameters: &[Parameter]) -> Result<()> {
        Ok(())
    }
}

/// How ranks that divide the experts of a mixture among themselves exchange tokens. Each has tokens of its own, of another replica of the
/// batch. All of them call the same methods in the same order.
pub trait ExpertExchange: Send + Sync {
    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Which of `experts` experts this rank has.
    ///
    /// # Errors
    /// If they cannot be divided evenly.
    fn own(&self, experts: usize) -> Result<Range<usize>>;

    /// From how many of this rank's tokens each of all experts takes: how many tokens of each rank each of this rank's experts takes, rank by
    /// rank. `device` is that of the tokens.
    ///
    /// # Errors
    /// If a rank does not take part.
    fn counts(&self, counts: &[usize], device: Device) -> Result<Vec<usize>>;

    /// Sends `sent[i]` rows of `x` `[rows, width]` to rank `i`, one rank's after the other's. The result has `wanted[j]` rows of rank `j`, in
    /// order of the ranks. Gradients go the way back.
    ///
    /// # Errors
    /// If the numbers are not those of the rows, or a rank does not take part.
    fn exchange(&self, x: &Var, sent: &[usize], wanted: &[usize]) -> Result<Var>;
}

/// The end of a language model: the linear map to scores of the vocabulary, of which a rank may have a part, and what follows.
pub trait Head: LinearMap + Send + Sync {
    /// This rank's scores, `[.., width]` to `[.., its part of the vocabulary]`, with a bias of [`LayerFactory::head_bias`] if there is one.
    ///
    /// # Errors
    /// If the inputs do not fit.
    fn scores(&self, x: &Var, bias: Option<&Parameter>) -> Result<Var>;

    /// All ranks' scores, `[.., vocabulary]`, of this rank's.
    ///
    /// # Errors
    /// If the input does not fit.
    fn gathered(&self, scores: Var) -> Result<Var>;

    /// The cross entropies of `targets` (i64, -100 is ignored), of this rank's scores, added and multiplied by `scale`; in f32 for bf16
    /// and f16.
    ///
    /// # Errors
    /// If the inputs do not fit.
    fn loss_of(&self, scores: &Var, targets: &Var, scale: f64) -> Result<Var>;

    /// Both in one: the loss of what goes into the head. At most `logits_max` logits are held at a time; see
    /// [`Var::linear_cross_entropy`].
    ///
    /// # Errors
    /// If the inputs do not fit.
    fn loss(&self, x: &Var, targets: &Var, scale: f64, logits_max: usize) -> Result<Var>;

    /// Scores of the whole vocabulary, with a bias of [`LayerFactory::head_bias`] if there is one.
    ///
    /// # Errors
    /// If the inputs do not fit.
    fn logits(&self, x: &Var, bias: Option<&Parameter>) -> Result<Var> {
        self.gathered(self.scores(x, bias)?)
    }
}

/// Makes layers for one device, which shard nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneDevice;

impl LayerFactory for OneDevice {
    type Column = Linear;
    type Row = Linear;
    type Embedding = Embedding;
    type Head = LinearHead;

    fn column(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Linear> {
        let config = LinearConfig::new(spec.inputs, spec.outputs.iter().sum());
        config.with_bias(spec.bias).with_init(spec.init).init(scope)
    }

    fn row(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Linear> {
        self.column(scope, spec)
    }

    fn columns(&self, layers: &[&Linear], x: &Var) -> Result<Vec<Var>> {
        // Others one by one: the floats of an int8 weight are there only while it is used.
        if !layers.iter().all(|layer| layer.weight.is_packed()) {
            return layers.iter().map(|layer| layer.forward(x)).collect();
        }
        let map = |layer: &&Linear| (layer.weight.var(), layer.bias.as_ref().map(Parameter::var));
        Ok(x.linear_each(&layers.iter().map(map).collect::<Vec<_>>())?)
    }

    fn column_gelu(&self, layer: &Linear, x: Var) -> Result<Var> {
        if !x.device().is_cuda() {
            return gelu_after(layer, x);
        }
        let bias = layer.bias.as_ref().map(Parameter::var);
        Ok(x.linear_gelu(&layer.weight.var(), bias.as_ref(), Gelu::Tanh)?)
    }

    fn heads_norm(&self, scope: &Scope, spec: HeadsNormSpec) -> Result<Box<dyn Module>> {
        let HeadsNormSpec { features, eps, plus_one } = spec;
        Ok(Box::new(RmsNormConfig::new(&[features]).with_eps(eps).with_plus_one(plus_one).init(scope)?))
    }

    fn embedding(&self, scope: &Scope, spec: EmbeddingSpec) -> Result<Embedding> {
        let config = EmbeddingConfig::new(spec.count, spec.width).with_init(spec.init);
        let config = spec.padding.map_or(config, |row| config.with_padding(row as isize));
        config.with_tied_head(spec.tied).init(scope)
    }

    fn head(&self, scope: &Scope, spec: EmbeddingSpec, tied: Option<&Embedding>) -> Result<LinearHead> {
        let weight = match tied {
            Some(embedding) => embedding.weight.clone(),
            // The embedding's site is on another stage, which sends its chain of gradients.
            None => {
                let weight = scope.parameter("weight", &[spec.count, spec.width], spec.init)?;
                let weight = match spec.padding {
                    Some(row) => weight.with_zero_row(row)?,
                    None => weight,
                };
                weight.with_sites(1 + usize::from(spec.tied))?
            }
        };
        Ok(LinearHead { weight: weight.as_weight() })
    }

    fn head_bias(&self, scope: &Scope, vocabulary: usize) -> Result<Parameter> {
        scope.parameter("bias", &[vocabulary], Init::ZEROS)
    }

    fn heads(&self, heads: usize) -> Result<Range<usize>> {
        Ok(0..heads)
    }

    fn key_heads(&self, _queries: usize, keys: usize) -> Result<Range<usize>> {
        Ok(0..keys)
    }

    fn features(&self, features: usize) -> Result<Range<usize>> {
        Ok(0..features)
    }

    fn stream(&self, positions: usize) -> Result<Range<usize>> {
        Ok(0..positions)
    }
}

/// Two operations. The input is free before the second one takes memory.
fn gelu_after(layer: &impl Module, x: Var) -> Result<Var> {
    let y = layer.forward(&x)?;
    drop(x);
    Ok(y.gelu(Gelu::Tanh)?)
}

/// The head of a model on one device.
pub struct LinearHead {
    /// `[vocabulary, width]`
    pub weight: Parameter,
}

parameters!(LinearHead { weight });

impl Module for LinearHead {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.scores(x, None)
    }
}

impl LinearMap for LinearHead {
    fn weight(&self) -> &Parameter {
        &self.weight
    }

    fn bias(&self) -> Option<&Parameter> {
        None
    }
}

impl Head for LinearHead {
    fn scores(&self, x: &Var, bias: Option<&Parameter>) -> Result<Var> {
        Ok(x.linear(&self.weight.var(), bias.map(Parameter::var).as_ref())?)
    }

    fn gathered(&self, scores: Var) -> Result<Var> {
        Ok(scores)
    }

    fn loss_of(&self, scores: &Var, targets: &Var, scale: f64) -> Result<Var> {
        Ok(scores.flatten(0, -2)?.cross_entropy(&targets.flatten(0, -1)?, &summed(scale))?)
    }

    fn loss(&self, x: &Var, targets: &Var, scale: f64, logits_max: usize) -> Result<Var> {
        let (x, targets) = (x.flatten(0, -2)?, targets.flatten(0, -1)?);
        Ok(x.linear_cross_entropy(&self.weight.var(), &targets, &summed(scale), logits_max)?)
    }
}

/// Cross entropies that are added and multiplied by `scale`.
fn summed(scale: f64) -> CrossEntropy {
    CrossEntropy { reduction: Reduction::Sum, scale, wide: true, ..CrossEntropy::default() }
}

/// The window in the global batch of a random draw over activations of `shape`, whose first dimension is the batch. `cut` has further
/// dimensions that are sharded: the dimension, this rank's offset and the whole size.
///
/// # Errors
/// If there is no batch, or no such further dimension.
pub fn activation_window(shape: &[usize], cut: &[(usize, usize, usize)]) -> Result<Window> {
    if shape.is_empty() || cut.iter().any(|&(dim, ..)| dim >= shape.len()) {
        let dims: Vec<usize> = cut.iter().map(|&(dim, ..)| dim).collect();
        let why = format!("got shape {shape:?}, wanted a batch and dimensions {dims:?}");
        return Err(Error::invalid("activation_window", why));
    }
    let mut window = Window { global: Dims::from_slice(shape), offset: Dims::from_elem(0, shape.len()) };
    window.offset[0] = Context::current().batch_offset as usize;
    window.global[0] += window.offset[0];
    for &(dim, offset, whole) in cut {
        (window.offset[dim], window.global[dim]) = (offset, whole);
    }
    Ok(window)
}

#[cfg(test)]
mod tests {
    use super::activation_window;

    #[test]
    fn windows_of_absent_dimensions_are_refused() {
        let refused = activation_window(&[], &[]).err().unwrap().to_string();
        assert!(refused.contains("got shape [], wanted a batch"), "{refused}");
        let refused = activation_window(&[2, 3], &[(2, 0, 4)]).err().unwrap().to_string();
        assert!(refused.contains("got shape [2, 3], wanted a batch and dimensions [2]"), "{refused}");
        assert_eq!(activation_window(&[2, 3], &[(1, 1, 4)]).unwrap().global[1], 4);
    }
}
