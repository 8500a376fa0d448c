//! GPT-2: learned positions, pre-norm blocks, one joint linear layer for queries, keys and values, a tied head.
//!
//! ```text
//! x += c_proj(attention(c_attn(ln_1(x))))
//! x += c_proj(gelu(c_fc(ln_2(x))))
//! ```
//! Source: Radford et al.: Language models are unsupervised multitask learners (2019).

use std::sync::Arc;

use phalanx_autograd::Var;
use phalanx_tensor::{DType, Window};

use super::check::{check_numbers, check_sizes};
use super::decoder::{DecoderSpec, Names, Routers};
use super::{Activation, Block, Decoder, DecoderStage, Documents, KvCache, RowPart};
use crate::layer_factory::{EmbeddingSpec, LinearSpec, activation_window};
use crate::modules::attention::{CausalAttention, Heads, Positions, Scores};
use crate::modules::{Dropout, LayerNorm, LayerNormConfig, PreNorm};
use crate::{
    Error, Init, LayerFactory, Module, OneDevice, Parameters, Result, Scope, WrappedUnit, parameters,
};

/// A GPT's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct GptConfig {
    /// The number of tokens.
    pub vocabulary: usize,
    /// The largest number of positions of a sequence.
    pub context: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features of the stream.
    pub width: usize,
    /// Features inside the MLP; 4 times the width in GPT-2.
    pub inner: usize,
    /// The MLP's nonlinearity.
    pub activation: Activation,
    /// Added to variances in norms.
    pub eps: f64,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Dropout of the embedding, of attention's probabilities, and of the branches' outputs.
    pub dropout: [f64; 3],
    /// Standard deviation of initial weights.
    pub init_std: f64,
    /// The dtype of the residual stream and of norms; the matrices' dtype if absent.
    pub stream: Option<DType>,
}

const NAMES: Names = Names { embedding: "wte", positions: "wpe", blocks: "h", norm: "ln_f", head: "lm_head" };

impl GptConfig {
    /// GPT-2's settings for a model of that size, without dropout.
    pub fn new(vocabulary: usize, context: usize, layers: usize, heads: usize, width: usize) -> GptConfig {
        GptConfig {
            vocabulary,
            context,
            layers,
            heads,
            width,
            inner: width.saturating_mul(4),
            activation: Activation::GeluTanh,
            eps: 1e-5,
            tied: true,
            dropout: [0.0; 3],
            init_std: 0.02,
            stream: None,
        }
    }

    /// With this dropout everywhere.
    #[must_use]
    pub fn with_dropout(self, p: f64) -> GptConfig {
        GptConfig { dropout: [p; 3], ..self }
    }

    /// The whole model on one device.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init(&self, scope: &Scope) -> Result<Decoder> {
        self.init_stage(&Arc::new(OneDevice), scope, DecoderStage::whole(self.layers))
    }

    /// A stage of the model, of these layers.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init_stage<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
    ) -> Result<Decoder<L>> {
        self.init_stage_beside(layers, scope, stage, None)
    }

    /// [`GptConfig::init_stage`], with the first stage of the same model if this rank has that too. A tied head then shares its table.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init_stage_beside<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        first: Option<&Decoder<L>>,
    ) -> Result<Decoder<L>> {
        self.check().map_err(|why| Error::invalid("GPT", why))?;
        let names = |name: &str| format!("transformer.{name}");
        layers.begins(Arc::new(names), stage.layers.len() == self.layers);
        let init = Init::Normal { mean: 0.0, std: self.init_std };
        let table = |count, tied| EmbeddingSpec { count, width: self.width, init, tied, padding: None };
        let norm = |scope: &Scope| Ok(Box::new(self.norm(scope)?) as Box<dyn PreNorm>);
        let spec = DecoderSpec {
            names: &NAMES,
            table: table(self.vocabulary, self.tied),
            embedding_scale: None,
            positions: Some(table(self.context, false)),
            dropout: self.dropout[0],
            context: self.context,
            turning_point: None,
            blocks: self.layers,
            stream: self.stream.unwrap_or(scope.dtype()),
            norm: &norm,
            logit_cap: None,
            routers: Routers::default(),
        };
        let block = |_, scope: &Scope| Ok(Arc::new(GptBlock::new(self, layers, scope)?) as Arc<dyn Block>);
        Decoder::build(layers, scope, stage, first, spec, block)
    }

    fn norm(&self, scope: &Scope) -> Result<LayerNorm> {
        LayerNormConfig::new(&[self.width]).with_eps(self.eps).init(scope)
    }

    /// Refuses sizes that do not fit each other.
    pub(super) fn check(&self) -> Result<(), String> {
        check_sizes(&[
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("layers", self.layers),
            ("heads", self.heads),
            ("width", self.width),
            ("inner", self.inner),
        ])?;
        if !self.width.is_multiple_of(self.heads) {
            return Err(format!("{} heads do not divide the width {}", self.heads, self.width));
        }
        check_numbers(self.eps, self.init_std, &self.dropout)
    }
}

struct GptBlock<L: LayerFactory> {
    layers: Arc<L>,
    ln_1: LayerNorm,
    attn: WrappedUnit<Projections<L::Column, L::Row>>,
    ln_2: LayerNorm,
    mlp: WrappedUnit<Perceptron<L::Column, L::Row>>,
    attend: CausalAttention,
    activation: Activation,
    dropouts: [Dropout; 2],
    /// The dtype of the linear layers.
    matrix: DType,
}

parameters!([L: LayerFactory] GptBlock<L> { ln_1, attn, ln_2, mlp });

struct Projections<C, R> {
    c_attn: WrappedUnit<C>,
    c_proj: WrappedUnit<R>,
}

parameters!([C: Module + 'static, R: Module + 'static] Projections<C, R> { c_attn, c_proj });

struct Perceptron<C, R> {
    c_fc: WrappedUnit<C>,
    c_proj: WrappedUnit<R>,
}

parameters!([C: Module + 'static, R: Module + 'static] Perceptron<C, R> { c_fc, c_proj });

impl<L: LayerFactory> GptBlock<L> {
    fn new(config: &GptConfig, layers: &Arc<L>, scope: &Scope) -> Result<GptBlock<L>> {
        let GptConfig { width, inner, heads, dropout, .. } = *config;
        let init = |std: f64| Init::Normal { mean: 0.0, std };
        // The branches' outputs are scaled down, so that the stream's variance does not grow with the depth.
        let residual = config.init_std / (2.0 * config.layers as f64).sqrt();
        let column = |scope: &Scope, outputs: &[usize]| {
            let init = init(config.init_std);
            let spec = LinearSpec { inputs: width, outputs, bias: true, init, whole: false };
            Ok::<_, Error>(WrappedUnit::part(layers.column(scope, spec)?))
        };
        let row = |scope: &Scope, inputs: usize| {
            let init = init(residual);
            let spec = LinearSpec { inputs, outputs: &[width], bias: true, init, whole: true };
            Ok::<_, Error>(WrappedUnit::part(layers.row(scope, spec)?))
        };
        let stream = scope.with_dtype(config.stream.unwrap_or(scope.dtype()));
        let (attn, mlp) = (scope.child("attn"), scope.child("mlp"));
        let probabilities = Dropout::new(dropout[1], &attn.child("attn_dropout"))?;
        let all = Heads { query: heads, key: heads, dim: width / heads };
        Ok(GptBlock {
            ln_1: config.norm(&stream.child("ln_1"))?,
            attn: WrappedUnit::part(Projections {
                c_attn: column(&attn.child("c_attn"), &[width; 3])?,
                c_proj: row(&attn.child("c_proj"), width)?,
            }),
            ln_2: config.norm(&stream.child("ln_2"))?,
            mlp: WrappedUnit::part(Perceptron {
                c_fc: column(&mlp.child("c_fc"), &[inner])?,
                c_proj: row(&mlp.child("c_proj"), inner)?,
            }),
            attend: CausalAttention::new(&**layers, all, None, Scores::default(), probabilities)?,
            activation: config.activation,
            dropouts: [
                Dropout::new(dropout[2], &attn.child("resid_dropout"))?,
                Dropout::new(dropout[2], &mlp.child("dropout"))?,
            ],
            matrix: scope.dtype(),
            layers: layers.clone(),
        })
    }

    fn run(&self, x: &Var, rows: Positions<'_>) -> Result<Var> {
        let (x, n) = self.ln_1.pre_forward(x, self.matrix)?;
        let mut length = 0;
        let y = self.attn.call_once(n, |attn, n| {
            let joint = attn.c_attn.forward(&n)?;
            drop(n);
            let parts = joint.chunk(3, -1)?;
            let y = self.attend.run([&parts[0], &parts[1], &parts[2]], rows)?;
            drop((joint, parts));
            length = y.shape()[1];
            attn.c_proj.forward(&y)
        })?;
        let y = match self.dropouts[0].is_active() {
            true => self.dropouts[0].forward_in(&y, &self.window(&y, length)?)?,
            false => y,
        };
        let (x, n) = self.ln_2.add_forward(&x, &y)?;
        // The bias of a map that is gathered by itself is not here after the map.
        let in_unit = self.mlp.is_wrapped() || self.mlp.module().c_proj.is_wrapped();
        let (adds_bias_later, mut bias) = (self.matrix == x.dtype() && !in_unit, None);
        let y = self.mlp.call_once(n, |mlp, n| {
            let y = match self.activation {
                Activation::GeluTanh => mlp.c_fc.call_once(n, |fc, x| self.layers.column_gelu(fc, x))?,
                other => {
                    let y = mlp.c_fc.forward(&n)?;
                    drop(n);
                    other.apply(&y)?
                }
            };
            if !adds_bias_later {
                return mlp.c_proj.forward(&y);
            }
            let (y, own) = self.layers.row_and_bias(mlp.c_proj.module(), &y)?;
            bias = own;
            Ok(y)
        })?;
        let window = self.window(&y, length)?;
        self.dropouts[1].bias_dropout_add(&y, bias.as_ref(), &x, Some(&window))
    }

    /// Where this rank's positions are in the stream of whole sequences of that length.
    fn window(&self, y: &Var, length: usize) -> Result<Window> {
        activation_window(y.shape(), &[(1, self.layers.stream(length)?.start, length)])
    }
}

impl<L: LayerFactory> Module for GptBlock<L> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.run(x, Positions::Whole)
    }
}

impl<L: LayerFactory> Block for GptBlock<L> {
    fn extend(&self, x: &Var, cache: &mut KvCache) -> Result<Var> {
        self.run(x, Positions::Continued(cache))
    }

    fn extend_rows<'a>(&self, x: &Var, rows: &'a mut [RowPart<'a>]) -> Result<Var> {
        self.run(x, Positions::Rows(rows))
    }

    fn packed(&self, x: &Var, documents: &Documents) -> Result<Var> {
        self.run(x, Positions::Packed(documents))
    }

    fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        let device = self.parameters().first().map(crate::Parameter::device).unwrap_or_default();
        self.attend.cache(batch, capacity, self.matrix, device)
    }

    fn set_recompute_attention(&self, recompute: bool) {
        self.attend.set_recompute(recompute);
    }
}
