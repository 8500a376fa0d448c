//! [`Decoder`]: token embedding, blocks, final norm and head, or a pipeline [`DecoderStage`] of them.

mod extend;
mod routers;
mod stage;

pub use extend::RowTokens;
pub(crate) use routers::Routers;
pub use stage::DecoderStage;

use std::sync::{Arc, Mutex};

use phalanx_autograd::{CrossEntropy, Reduction, Var};
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Dims, Tensor};

use super::router_losses::RouterPass;
use super::{Documents, KvCache, RecomputeMode, RouterBias, RowPart};
use crate::layer_factory::{EmbeddingSpec, activation_window};
use crate::mode::{Mode, modes};
use crate::modules::{Dropout, Embedding, PreNorm};
use crate::scope::join;
use crate::{
    AnyUnit, Entry, Error, Head, LayerFactory, Module, OneDevice, Parameter, Parameters, Result, Scope,
    WrappedUnit, Wrapping,
};

/// A transformer block: `[B, T, width]` to the same.
pub trait Block: Module {
    /// The block's output for further positions of sequences whose earlier ones are in the cache.
    ///
    /// # Errors
    /// If the input does not fit or the cache is full.
    fn extend(&self, x: &Var, cache: &mut KvCache) -> Result<Var>;

    /// The block's output for further positions of rows that have a cache each, one row's after the other's in `x` of shape
    /// `[1, T, width]`.
    ///
    /// # Errors
    /// If the input does not fit.
    fn extend_rows<'a>(&self, x: &Var, rows: &'a mut [RowPart<'a>]) -> Result<Var>;

    /// The block's output for sequences of several documents each. A document does not attend to another one.
    ///
    /// # Errors
    /// If the input or the documents do not fit.
    fn packed(&self, x: &Var, documents: &Documents) -> Result<Var>;

    /// An empty cache for `batch` sequences of at most `capacity` positions.
    ///
    /// # Errors
    /// If it cannot be allocated.
    fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache>;

    /// The biases of its router, if they move with the loads.
    fn router_bias(&self) -> Option<&RouterBias> {
        None
    }

    /// Sets whether the values inside attention are computed again in backward from now on ([`RecomputeMode::Attention`]).
    fn set_recompute_attention(&self, recompute: bool);
}

/// The names of a model family's parts in Hugging Face files.
pub(crate) struct Names {
    pub(crate) embedding: &'static str,
    pub(crate) positions: &'static str,
    pub(crate) blocks: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) head: &'static str,
}

/// A decoder's parts outside the blocks.
pub(crate) struct DecoderSpec<'a> {
    pub(crate) names: &'static Names,
    pub(crate) table: EmbeddingSpec,
    /// What rows of the table are multiplied with.
    pub(crate) embedding_scale: Option<f64>,
    /// The table of learned positions.
    pub(crate) positions: Option<EmbeddingSpec>,
    pub(crate) dropout: f64,
    pub(crate) context: usize,
    /// As [`Decoder::turning_point`].
    pub(crate) turning_point: Option<usize>,
    pub(crate) blocks: usize,
    /// The dtype between the blocks.
    pub(crate) stream: DType,
    pub(crate) norm: &'a dyn Fn(&Scope) -> Result<Box<dyn PreNorm>>,
    /// Logits go through `cap tanh(logit / cap)`.
    pub(crate) logit_cap: Option<f64>,
    pub(crate) routers: Routers,
}

/// A language model, or a stage of one.
pub struct Decoder<L: LayerFactory = OneDevice> {
    names: &'static Names,
    stage: DecoderStage,
    /// Blocks of the whole model.
    blocks_of_all: usize,
    context: usize,
    /// Rotated positions do not end.
    learned_positions: Option<usize>,
    turning_point: Option<usize>,
    vocabulary: usize,
    layers: Arc<L>,
    /// The width (hidden size) of the residual stream, the activations between the blocks.
    width: usize,
    dtype: DType,
    embed: Option<WrappedUnit<InputEmbedding<L>>>,
    blocks: Vec<WrappedUnit<dyn Block>>,
    tail: Option<WrappedUnit<NormAndHead<L>>>,
    recompute: RecomputeMode,
    logits_max: usize,
    routers: Routers,
    /// The routers of the last forward pass with losses of routers, and its result, until the loss takes them.
    last_routers: Mutex<Option<(Tensor, Arc<RouterPass>)>>,
    mode: Mode,
}

modes!([L: LayerFactory] Decoder<L>);

/// Token and position embedding.
struct InputEmbedding<L: LayerFactory> {
    layers: Arc<L>,
    table: L::Embedding,
    scale: Option<f64>,
    positions: Option<Embedding>,
    dropout: Dropout,
    stream: DType,
    names: &'static Names,
}

/// Final norm and output head (logits).
struct NormAndHead<L: LayerFactory> {
    norm: Box<dyn PreNorm>,
    head: L::Head,
    logit_cap: Option<f64>,
    /// The dtype of the head.
    matrix: DType,
    /// What the head's table is called here; nothing if the embedding of this stage has it.
    head_name: Option<&'static str>,
    names: &'static Names,
}

impl<L: LayerFactory> Decoder<L> {
    /// Builds a stage. `first` is the first stage of the same model, if this rank has that too: a tied head shares its table. `block` makes
    /// block i in its scope.
    pub(crate) fn build(
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        first: Option<&Decoder<L>>,
        mut spec: DecoderSpec<'_>,
        block: impl Fn(usize, &Scope) -> Result<Arc<dyn Block>>,
    ) -> Result<Decoder<L>> {
        if stage.layers.end > spec.blocks || stage.layers.start > stage.layers.end {
            let why = format!("got blocks {:?}, wanted a range inside 0..{}", stage.layers, spec.blocks);
            return Err(Error::invalid("stage", why));
        }
        let names = spec.names;
        spec.table.tied = spec.table.tied && !layers.unties(names.embedding)?;
        let embed = if stage.first { Some(InputEmbedding::new(layers, scope, &spec)?) } else { None };
        let of_first = first.and_then(|first| first.embed.as_ref()).map(WrappedUnit::module);
        let blocks = scope.child(names.blocks);
        let blocks = stage
            .layers
            .clone()
            .map(|i| Ok(WrappedUnit::new(block(i, &blocks.child(i))?)))
            .collect::<Result<_>>()?;
        let table = embed.as_ref().or(of_first);
        let tail = if stage.last { Some(NormAndHead::new(&**layers, scope, &spec, table)?) } else { None };
        let decoder = Decoder {
            names,
            stage,
            blocks_of_all: spec.blocks,
            context: spec.context,
            learned_positions: spec.positions.map(|table| table.count),
            turning_point: spec.turning_point,
            vocabulary: spec.table.count,
            layers: layers.clone(),
            width: spec.table.width,
            dtype: spec.stream,
            embed: embed.map(|e| WrappedUnit::new(Arc::new(e))),
            blocks,
            tail: tail.map(|t| WrappedUnit::new(Arc::new(t))),
            recompute: RecomputeMode::Never,
            logits_max: usize::MAX,
            routers: spec.routers,
            last_routers: Mutex::default(),
            mode: Mode::default(),
        };
        layers.built(&decoder.parameters())?;
        Ok(decoder)
    }

    /// Sets how many logits a rank holds at a time when it computes the loss and its gradient (all, unless set). The bits are the same on a
    /// CPU; the product of the logits is computed twice if they do not fit. See [`Var::linear_cross_entropy`].
    pub fn set_logits_max(&mut self, logits_max: usize) {
        self.logits_max = logits_max;
    }

    /// Sets which blocks, or which part of them, recompute their activations from now on.
    pub fn set_recompute(&mut self, mode: RecomputeMode) {
        self.recompute = mode;
        let attention = mode == RecomputeMode::Attention;
        self.blocks.iter().for_each(|block| block.module().set_recompute_attention(attention));
    }

    /// Sets how finely the blocks are wrapped, before a wrapper is made; see also [`wrap_by_size`](crate::wrap_by_size).
    pub fn set_wrapping(&mut self, wrapping: Wrapping) {
        self.blocks.iter().for_each(|block| wrapping.apply(block));
    }

    /// What made its layers.
    pub(super) fn layers(&self) -> &L {
        &self.layers
    }

    /// Which part of the model this is.
    pub fn stage(&self) -> &DecoderStage {
        &self.stage
    }

    /// Positions of the sequences that the model is for. With learned positions a sequence has at most so many. Where positions are rotated
    /// it may have more, as in transformers; how good the scores are then depends on the model.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Positions for which there is a learned vector, if positions are learned: no sequence may have more.
    pub fn learned_positions(&self) -> Option<usize> {
        self.learned_positions
    }

    /// Tokens that there are.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Shape and dtype of the stream that one stage sends to the next, for `rows` sequences of `positions` positions:
    /// `[rows, positions of this rank, width]`.
    ///
    /// # Errors
    /// If the positions cannot be cut as the layers want.
    pub fn stream(&self, rows: usize, positions: usize) -> Result<(Dims, DType)> {
        let positions = self.layers.stream(positions)?.len();
        Ok((Dims::from_slice(&[rows, positions, self.width]), self.dtype))
    }

    /// The blocks, for hooks.
    pub fn blocks(&self) -> &[WrappedUnit<dyn Block>] {
        &self.blocks
    }

    /// Tokens `[B, T]` (i64) to the stream `[B, T, width]` after this stage's last block. The input of a stage without the embedding is
    /// the stream of the stage before.
    ///
    /// # Errors
    /// If the input does not fit.
    pub fn forward(&self, input: &Var) -> Result<Var> {
        self.run_whole(input, None)
    }

    /// [`Decoder::forward`] of rows that consist of several documents. A token attends to its own document only, and learned and rotary
    /// positions are counted from the document's first token. So a document's stream is the one that it has in a row of its own, on a
    /// CPU bit for bit, without dropout and without a cap on scores (Gemma 2, within rounding). Every stage takes the documents.
    ///
    /// # Errors
    /// If the input or the documents do not fit.
    pub fn forward_packed(&self, input: &Var, documents: &Documents) -> Result<Var> {
        self.run_whole(input, Some(documents))
    }

    fn run_whole(&self, input: &Var, documents: Option<&Documents>) -> Result<Var> {
        let (x, pass) = self.run(input, documents, None)?;
        self.end_router_pass(pass, &x)?;
        Ok(x)
    }

    /// The stream after this stage, and the record of its routers, whose sums follow those of the stages before.
    fn run(
        &self,
        input: &Var,
        documents: Option<&Documents>,
        sums: Option<&Var>,
    ) -> Result<(Var, Option<Arc<RouterPass>>)> {
        let _mode = self.mode.enter();
        let mut x = match &self.embed {
            Some(embed) => {
                self.check_tokens(input, 0)?;
                let numbers = documents.map(Documents::positions).cloned();
                documents.map_or(Ok(()), |documents| documents.check(input.shape()[0], input.shape()[1]))?;
                embed.call(input, false, move |embed, tokens| embed.run(tokens, 0, numbers.as_ref()))?
            }
            None => input.clone(),
        };
        let pass = self.new_router_pass(sums);
        for (i, block) in self.stage.layers.clone().zip(&self.blocks) {
            let pass = pass.clone();
            let recompute = match self.recompute {
                RecomputeMode::Never | RecomputeMode::Attention => false,
                RecomputeMode::ExceptLast => i + 1 < self.blocks_of_all,
                RecomputeMode::Always => true,
            };
            x = match documents.cloned() {
                None => block.call(&x, recompute, move |block, x| {
                    RouterPass::in_block(pass.as_ref(), i, || block.forward(x))
                })?,
                Some(documents) => block.call(&x, recompute, move |block, x| {
                    RouterPass::in_block(pass.as_ref(), i, || block.packed(x, &documents))
                })?,
            };
        }
        Ok((x, pass))
    }

    /// Scores of the next token, `[B, T, vocabulary]`, from the stream after the last block. For a model's answers, call both inside
    /// [`nn::inference`](crate::inference), or call [`Decoder::eval`]: in training mode the config's dropout is active.
    ///
    /// # Errors
    /// If this stage has no head.
    pub fn logits(&self, x: &Var) -> Result<Var> {
        self.tail()?.call(x, false, |tail, x| tail.logits(x))
    }

    /// The cross entropies of the targets `[B, T]` (i64; -100 is ignored), added and multiplied by `scale`. With a scale of 1 / (the
    /// global batch's counted targets) the losses of the micro-batches add up to the mean. In training the losses of routers are added
    /// ([`RouterLosses`](super::RouterLosses)), once for each counted target.
    ///
    /// # Errors
    /// If this stage has no head, or the targets do not fit; with losses of routers, if `x` is not the result of the last forward pass.
    pub fn loss(&self, x: &Var, targets: &Var, scale: f64) -> Result<Var> {
        let (own, logits_max) = (targets.clone(), self.logits_max);
        let loss = self.tail()?.call(x, false, move |tail, x| tail.loss(x, &own, scale, logits_max))?;
        self.with_router_losses(loss, x, targets, scale)
    }

    fn tail(&self) -> Result<&WrappedUnit<NormAndHead<L>>> {
        self.tail.as_ref().ok_or_else(|| Error::invalid("model", "this stage has no head"))
    }

    fn check_tokens(&self, tokens: &Var, before: usize) -> Result<()> {
        let fits =
            tokens.rank() == 2 && tokens.shape()[1] > 0 && self.has_positions(before + tokens.shape()[1]);
        if fits && tokens.dtype() == DType::I64 {
            return Ok(());
        }
        let got = format!("got {:?} {} after {before} positions", tokens.shape(), tokens.dtype());
        let most =
            self.learned_positions.map(|most| format!(" with at most {most} positions")).unwrap_or_default();
        Err(Error::invalid("tokens", format!("{got}, wanted [B, T] i64{most}")))
    }
}

impl<L: LayerFactory> InputEmbedding<L> {
    fn new(layers: &Arc<L>, scope: &Scope, spec: &DecoderSpec<'_>) -> Result<InputEmbedding<L>> {
        let names = spec.names;
        // The table is small, and every rank looks up its own positions, so no layout shards it.
        let positions = |table: EmbeddingSpec| OneDevice.embedding(&scope.child(names.positions), table);
        Ok(InputEmbedding {
            table: layers.embedding(&scope.child(names.embedding), spec.table)?,
            scale: spec.embedding_scale.map(|scale| rounded(scale, scope.dtype())).transpose()?,
            positions: spec.positions.map(positions).transpose()?,
            dropout: Dropout::new(spec.dropout, &scope.child("drop"))?,
            layers: layers.clone(),
            stream: spec.stream,
            names,
        })
    }

    /// Tokens of positions from `before` on, or of these numbers.
    fn run(&self, tokens: &Var, before: usize, numbers: Option<&Var>) -> Result<Var> {
        let length = tokens.shape()[1];
        let here = self.layers.stream(length)?;
        let mut x = self.table.forward(tokens)?;
        if let Some(scale) = self.scale {
            x = x.mul_scalar(scale)?;
        }
        x = x.to(self.stream)?;
        if let Some(table) = &self.positions {
            let numbers = match numbers {
                Some(numbers) => numbers.narrow(1, here.start, here.len())?,
                None => {
                    let numbers: Vec<i64> = here.clone().map(|i| (before + i) as i64).collect();
                    Var::from_slice(&numbers, &[here.len()], tokens.device())?
                }
            };
            x = x.add(&table.forward(&numbers)?.to(self.stream)?)?;
        }
        if !self.dropout.is_active() {
            return Ok(x);
        }
        self.dropout.forward_in(&x, &activation_window(x.shape(), &[(1, here.start, length)])?)
    }
}

impl<L: LayerFactory> Parameters for InputEmbedding<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.table.visit(&join(path, self.names.embedding), visitor);
        self.positions.visit(&join(path, self.names.positions), visitor);
    }
}

impl<L: LayerFactory> NormAndHead<L> {
    fn new(
        layers: &L,
        scope: &Scope,
        spec: &DecoderSpec<'_>,
        embed: Option<&InputEmbedding<L>>,
    ) -> Result<NormAndHead<L>> {
        let names = spec.names;
        let name = if spec.table.tied { names.embedding } else { names.head };
        let tied = embed.filter(|_| spec.table.tied).map(|embed| &embed.table);
        Ok(NormAndHead {
            norm: (spec.norm)(&scope.child(names.norm).with_dtype(spec.stream))?,
            head: layers.head(&scope.child(name), spec.table.of_head(), tied)?,
            logit_cap: spec.logit_cap,
            matrix: scope.dtype(),
            head_name: tied.is_none().then_some(name),
            names,
        })
    }

    fn normed(&self, x: &Var) -> Result<Var> {
        Ok(self.norm.pre_forward(x, self.matrix)?.1)
    }

    fn logits(&self, x: &Var) -> Result<Var> {
        let logits = self.head.logits(&self.normed(x)?, None)?;
        let Some(cap) = self.logit_cap else { return Ok(logits) };
        Ok(logits.mul_scalar(cap.recip())?.tanh()?.mul_scalar(cap)?)
    }

    fn loss(&self, x: &Var, targets: &Var, scale: f64, logits_max: usize) -> Result<Var> {
        if self.logit_cap.is_none() {
            return self.head.loss(&self.normed(x)?, targets, scale, logits_max);
        }
        let config = CrossEntropy { reduction: Reduction::Sum, scale, wide: true, ..CrossEntropy::default() };
        Ok(self.logits(x)?.flatten(0, -2)?.cross_entropy(&targets.flatten(0, -1)?, &config)?)
    }
}

impl<L: LayerFactory> Parameters for NormAndHead<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.norm.visit(&join(path, self.names.norm), visitor);
        if let Some(name) = self.head_name {
            self.head.visit(&join(path, name), visitor);
        }
    }

    fn borrowed(&self) -> Vec<Parameter> {
        if self.head_name.is_none() { self.head.parameters() } else { Vec::new() }
    }
}

impl<L: LayerFactory> Parameters for Decoder<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.embed.visit(path, visitor);
        let blocks = join(path, self.names.blocks);
        for (i, block) in self.stage.layers.clone().zip(&self.blocks) {
            block.visit(&join(&blocks, i), visitor);
        }
        self.tail.visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.embed.visit_units(visitor);
        self.blocks.visit_units(visitor);
        self.tail.visit_units(visitor);
    }
}

/// Labels `[B, T]` shifted so that position t predicts label t + 1; the last position's target is -100. Also returns the number of
/// targets that are not -100.
///
/// # Errors
/// If the labels are not a matrix of i64 with elements.
pub fn next_token_targets(labels: &Tensor) -> Result<(Tensor, usize)> {
    let (&[_, length], DType::I64) = (labels.shape(), labels.dtype()) else {
        let got = format!("got {:?} {}, wanted [B, T] i64", labels.shape(), labels.dtype());
        return Err(Error::invalid("labels", got));
    };
    let all = labels.to_vec::<i64>()?;
    let rows = all.chunks(length.max(1));
    let moved: Vec<i64> = rows.flat_map(|row| row[1..].iter().copied().chain([-100])).collect();
    let counted = moved.iter().filter(|&&target| target != -100).count();
    Ok((Tensor::from_vec(moved, labels.shape(), labels.device())?, counted))
}

/// A number as a dtype has it.
fn rounded(number: f64, dtype: DType) -> Result<f64> {
    let number = Tensor::from_slice(&[number], &[], Device::CPU)?;
    Ok(kernels::cast(&kernels::cast(&number, dtype)?, DType::F64)?.item()?)
}
