//! Encoders over [`LayerFactory`]: the blocks of BERT and ViT, on one device or split over ranks, and what they have in common ([`Encoder`]).
//!
//! ```text
//! after        x = norm1(x + attention(x)),      x = norm2(x + linear2(act(linear1(x))))
//! before       x += attention(norm1(x)),         x += linear2(act(linear1(norm2(x))))
//! ```
//! Parameters have the names of [`TransformerEncoderLayer`](crate::TransformerEncoderLayer)'s.
//! Sources: Vaswani et al.: Attention is all you need (2017); Devlin et al.: BERT (2019); Dosovitskiy et al.: ViT (2020).

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use phalanx_autograd::{Attention, Var};
use phalanx_tensor::{DType, Dims};

use super::hugging_face::{check_elements, load_tensors};
use super::pretrained::ByNames;
use super::{Activation, DecoderStage, Pretrained, RecomputeMode};
use crate::layer_factory::LinearSpec;
use crate::modules::{Dropout, LayerNorm, LayerNormConfig};
use crate::scope::join;
use crate::{
    AnyUnit, Batch, Entry, Error, Init, LayerFactory, LoadOptions, Module, Parameters, Result, Scope,
    WrappedUnit, parameters,
};

/// An encoder with a head, or a pipeline stage of one: [`Bert`](super::Bert), [`Vit`](super::Vit).
pub trait Encoder: Parameters + Send + Sync + 'static {
    /// Which part of the model this is.
    fn stage(&self) -> &DecoderStage;

    /// Sets which blocks recompute their activations from now on. Attention keeps no scores, so there is nothing to free under
    /// [`RecomputeMode::Attention`].
    fn set_recompute(&mut self, mode: RecomputeMode);

    /// Shape and dtype of what one stage sends to the next for the rows of a batch; `None` if the batch is not one of this model.
    fn stream(&self, batch: &Batch) -> Option<(Dims, DType)>;

    /// What the next stage gets, or on the last stage the sum of the losses of all rows or tokens that count, times `scale`. `input` is what
    /// the stage before gives; the first stage has none. Every stage has the whole batch.
    ///
    /// # Errors
    /// If the input is not that of this stage, or the batch does not fit.
    fn run(&self, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var>;
}

/// The config of an [`Encoder`].
pub trait EncoderConfig: Pretrained + Clone + Send + Sync + 'static {
    /// The model, made of layers of any kind.
    type Of<L: LayerFactory>: Encoder;

    /// Blocks.
    fn blocks(&self) -> usize;

    /// A stage of the model, with the first stage of the same model if this rank has that too. A tied head then shares its table.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be cut or allocated.
    fn init_stage_beside<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        first: Option<&Self::Of<L>>,
    ) -> Result<Self::Of<L>>;

    /// Fills a model, or this rank's part of one, from a folder's weights.
    ///
    /// # Errors
    /// If a file cannot be read, or tensors are missing, unknown or of another shape. Then no parameter is changed.
    fn load_part<L: LayerFactory>(&self, model: &Self::Of<L>, folder: impl AsRef<Path>) -> Result<()> {
        check_elements(self.matrix_elements(), folder.as_ref())?;
        let is_whole = *model.stage() == DecoderStage::whole(self.blocks());
        load_tensors(model, &ByNames(self), folder.as_ref(), is_whole, LoadOptions::default()).map(drop)
    }
}

/// How blocks are made.
#[derive(Clone, Copy)]
pub(super) struct BlockConfig {
    pub(super) width: usize,
    pub(super) heads: usize,
    pub(super) inner: usize,
    pub(super) dropout: f64,
    pub(super) attention_dropout: f64,
    pub(super) activation: Activation,
    pub(super) eps: f64,
    /// Whether norms come before attention and the perceptron, not after the sums.
    pub(super) norm_first: bool,
    pub(super) qkv_bias: bool,
    pub(super) init: Init,
}

/// The blocks of a stage.
pub(super) struct Blocks<L: LayerFactory> {
    stage: DecoderStage,
    of_all: usize,
    width: usize,
    dtype: DType,
    here: Vec<WrappedUnit<EncoderBlock<L>>>,
    recompute: RecomputeMode,
    layers: Arc<L>,
}

impl<L: LayerFactory> Blocks<L> {
    /// The blocks of a stage of a model with `of_all`, block i in the scope's child `i`.
    pub(super) fn new(
        config: &BlockConfig,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        of_all: usize,
    ) -> Result<Blocks<L>> {
        let Range { start, end } = stage.layers;
        if start > end || end > of_all {
            let why = format!("got blocks {start}..{end}, wanted a range inside 0..{of_all}");
            return Err(Error::invalid("stage", why));
        }
        let block = |i: usize| Ok(WrappedUnit::of(EncoderBlock::new(config, layers, &scope.child(i))?));
        Ok(Blocks {
            of_all,
            width: config.width,
            dtype: scope.dtype(),
            here: (start..end).map(block).collect::<Result<_>>()?,
            stage,
            recompute: RecomputeMode::Never,
            layers: layers.clone(),
        })
    }

    pub(super) fn stage(&self) -> &DecoderStage {
        &self.stage
    }

    pub(super) fn set_recompute(&mut self, mode: RecomputeMode) {
        self.recompute = mode;
    }

    pub(super) fn stream(&self, rows: usize, positions: usize) -> (Dims, DType) {
        (Dims::from_slice(&[rows, positions, self.width]), self.dtype)
    }

    /// The stream of the stage before, of any number of rows and positions.
    pub(super) fn received(&self, input: Option<&Var>) -> Result<Var> {
        let got = match input {
            Some(x) if x.rank() == 3 && x.shape()[2] == self.width && !self.stage.first => {
                return Ok(x.clone());
            }
            Some(x) if self.stage.first => format!("a stream {:?} for the first stage", x.shape()),
            Some(x) => format!("a stream {:?}", x.shape()),
            None => "no stream for a stage without the embedding".into(),
        };
        let wanted = if self.stage.first { "none".into() } else { format!("[B, T, {}]", self.width) };
        Err(Error::invalid("encoder", format!("got {got}, wanted {wanted}")))
    }

    /// The stream `[B, T, width]` after the blocks. `visible` is a mask of keys, bool `[B, T]`; all are seen if it is absent.
    pub(super) fn run(&self, mut x: Var, visible: Option<&Var>) -> Result<Var> {
        let positions = x.shape()[1];
        if self.layers.stream(positions)?.len() != positions {
            let why = "got sequence parallelism, which would cut what attention and the head see as one; wanted it off";
            return Err(Error::invalid("encoder", why));
        }
        let visible = visible.map(|mask| mask.reshape_to(&[mask.shape()[0], 1, 1, positions])).transpose()?;
        for (i, block) in self.stage.layers.clone().zip(&self.here) {
            let (recompute, visible) = (i < self.recompute.recomputed(self.of_all), visible.clone());
            x = block.call(&x, recompute, move |block, x| block.run(x, visible.as_ref()))?;
        }
        Ok(x)
    }
}

/// Under their numbers among all blocks.
impl<L: LayerFactory> Parameters for Blocks<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        for (i, block) in self.stage.layers.clone().zip(&self.here) {
            block.visit(&join(path, i), visitor);
        }
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.here.visit_units(visitor);
    }
}

struct EncoderBlock<L: LayerFactory> {
    self_attn: SelfAttention<L>,
    linear1: L::Column,
    linear2: L::Row,
    norm1: LayerNorm,
    norm2: LayerNorm,
    dropouts: [Dropout; 2],
    activation: Activation,
    norm_first: bool,
    layers: Arc<L>,
}

parameters!([L: LayerFactory] EncoderBlock<L> { self_attn, linear1, linear2, norm1, norm2 });

impl<L: LayerFactory> EncoderBlock<L> {
    fn new(config: &BlockConfig, layers: &Arc<L>, scope: &Scope) -> Result<EncoderBlock<L>> {
        let BlockConfig { width, inner, dropout, eps, init, .. } = *config;
        let norm = |name: &str| LayerNormConfig::new(&[width]).with_eps(eps).init(&scope.child(name));
        let first = LinearSpec { inputs: width, outputs: &[inner], bias: true, init, whole: false };
        let second = LinearSpec { inputs: inner, outputs: &[width], bias: true, init, whole: true };
        Ok(EncoderBlock {
            self_attn: SelfAttention::new(config, layers, &scope.child("self_attn"))?,
            linear1: layers.column(&scope.child("linear1"), first)?,
            linear2: layers.row(&scope.child("linear2"), second)?,
            norm1: norm("norm1")?,
            norm2: norm("norm2")?,
            dropouts: [
                Dropout::new(dropout, &scope.child("dropout1"))?,
                Dropout::new(dropout, &scope.child("dropout2"))?,
            ],
            activation: config.activation,
            norm_first: config.norm_first,
            layers: layers.clone(),
        })
    }

    /// `[B, T, width]` to the same; `visible` `[B, 1, 1, T]`.
    fn run(&self, x: &Var, visible: Option<&Var>) -> Result<Var> {
        if self.norm_first {
            let x = self.add_attention(x, &self.norm1.forward(x)?, visible)?;
            return self.add_perceptron(&x, &self.norm2.forward(&x)?);
        }
        let x = self.norm1.forward(&self.add_attention(x, x, visible)?)?;
        self.norm2.forward(&self.add_perceptron(&x, &x)?)
    }

    /// `residual + dropout(attention(x))`.
    fn add_attention(&self, residual: &Var, x: &Var, visible: Option<&Var>) -> Result<Var> {
        let heads = self.self_attn.run(x, visible)?;
        let (y, bias) = self.layers.row_and_bias(&self.self_attn.out_proj, &heads)?;
        self.dropouts[0].bias_dropout_add(&y, bias.as_ref(), residual, None)
    }

    /// `residual + dropout(perceptron(x))`.
    fn add_perceptron(&self, residual: &Var, x: &Var) -> Result<Var> {
        let inner = self.activation.apply(&self.linear1.forward(x)?)?;
        let (y, bias) = self.layers.row_and_bias(&self.linear2, &inner)?;
        self.dropouts[1].bias_dropout_add(&y, bias.as_ref(), residual, None)
    }
}

/// Attention of this rank's heads to all visible positions.
struct SelfAttention<L: LayerFactory> {
    in_proj: L::Column,
    out_proj: L::Row,
    /// This rank's heads, out of `all`.
    heads: Range<usize>,
    all: usize,
    dim: usize,
    dropout: Dropout,
}

/// What the names of the joint map of queries, keys and values have in front of them.
const IN_PROJ: &str = "in_proj_";

impl<L: LayerFactory> SelfAttention<L> {
    fn new(config: &BlockConfig, layers: &Arc<L>, scope: &Scope) -> Result<SelfAttention<L>> {
        let BlockConfig { width, heads, init, .. } = *config;
        if heads == 0 || width == 0 || !width.is_multiple_of(heads) {
            let why = format!("got {heads} heads of a width of {width}, wanted a multiple of the heads");
            return Err(Error::invalid("attention", why));
        }
        let joint =
            LinearSpec { inputs: width, outputs: &[width; 3], bias: config.qkv_bias, init, whole: false };
        let out = LinearSpec { inputs: width, outputs: &[width], bias: true, init, whole: true };
        Ok(SelfAttention {
            in_proj: layers.column(&scope.prefix(IN_PROJ), joint)?,
            out_proj: layers.row(&scope.child("out_proj"), out)?,
            heads: layers.heads(heads)?,
            all: heads,
            dim: width / heads,
            dropout: Dropout::new(config.attention_dropout, &scope.child("dropout"))?,
        })
    }

    /// The results of this rank's heads, `[B, T, heads dim]`.
    fn run(&self, x: &Var, visible: Option<&Var>) -> Result<Var> {
        let (batch, positions, width) = (x.shape()[0], x.shape()[1], self.heads.len() * self.dim);
        let qkv = self.in_proj.forward(x)?.split(width, -1)?;
        let by_heads = |x: &Var| -> Result<Var> {
            let shape = [batch, positions, self.heads.len(), self.dim];
            Ok(x.reshape_to(&shape)?.transpose(1, 2)?)
        };
        let (q, k, v) = (by_heads(&qkv[0])?, by_heads(&qkv[1])?, by_heads(&qkv[2])?);
        let dropout = self.dropout.of_attention([self.all, self.heads.start]);
        let config = Attention { dropout, ..Attention::default() };
        let y = q.scaled_dot_product_attention(&k, &v, visible, &config)?;
        Ok(y.transpose(1, 2)?.reshape_to(&[batch, positions, width])?)
    }
}

impl<L: LayerFactory> Parameters for SelfAttention<L> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        let front = join(path, IN_PROJ);
        self.in_proj.visit("", &mut |name, entry| visitor(&format!("{front}{name}"), entry));
        self.out_proj.visit(&join(path, "out_proj"), visitor);
    }
}
