//! Llama: rotary positions, RMS norms, grouped query attention, a gated MLP.
//!
//! ```text
//! x += o_proj(attention(rope(q_proj(n)), rope(k_proj(n)), v_proj(n)))      n = input_layernorm(x)
//! x += down_proj(silu(gate_proj(n)) * up_proj(n))                          n = post_attention_layernorm(x)
//! ```
//! Source: Touvron et al.: LLaMA (2023); Ainslie et al.: GQA (2023); Shazeer: GLU variants (2020).

use std::sync::Arc;

use phalanx_autograd::Var;
use phalanx_tensor::DType;

use super::decoder::{DecoderSpec, Names, check_numbers, check_sizes};
use super::{Block, Decoder, DecoderStage, Documents, KvCache};
use crate::layer_factory::{EmbeddingSpec, LinearSpec};
use crate::modules::attention::Positions;
use crate::modules::dropout::add_branch;
use crate::modules::{GroupedQueryAttention, GroupedQueryAttentionConfig, PreNorm, RmsNorm, RmsNormConfig};
use crate::{
    Error, Init, LayerFactory, Module, OneDevice, Parameters, Result, Scope, WrappedUnit, parameters,
};

/// A Llama's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The number of tokens.
    pub vocabulary: usize,
    /// The largest number of positions of a sequence.
    pub context: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, each shared by `heads / key_heads` query heads.
    pub key_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of the stream.
    pub width: usize,
    /// Features inside the MLP.
    pub inner: usize,
    /// Added to mean squares in norms.
    pub eps: f64,
    /// The base of rotary positions.
    pub rope_base: f64,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Whether attention's linear layers have a bias.
    pub attention_bias: bool,
    /// Whether the MLP's linear layers have a bias.
    pub mlp_bias: bool,
    /// Dropout of attention's probabilities.
    pub dropout: f64,
    /// Standard deviation of initial weights.
    pub init_std: f64,
    /// The dtype of the residual stream and of norms; the matrices' dtype if absent.
    pub stream: Option<DType>,
}

const NAMES: Names =
    Names { embedding: "embed_tokens", positions: "", blocks: "layers", norm: "norm", head: "lm_head" };

impl LlamaConfig {
    /// Llama's settings for a model of that size, with as many key heads as query heads.
    pub fn new(vocabulary: usize, context: usize, layers: usize, heads: usize, width: usize) -> LlamaConfig {
        LlamaConfig {
            vocabulary,
            context,
            layers,
            heads,
            key_heads: heads,
            head_dim: width / heads.max(1),
            width,
            inner: (width.saturating_mul(8) / 3).next_multiple_of(64),
            eps: 1e-5,
            rope_base: 10000.0,
            tied: false,
            attention_bias: false,
            mlp_bias: false,
            dropout: 0.0,
            init_std: 0.02,
            stream: None,
        }
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

    /// [`LlamaConfig::init_stage`], with the first stage of the same model if this rank has that too. A tied head then shares its table.
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
        self.check().map_err(|why| Error::invalid("Llama", why))?;
        let init = Init::Normal { mean: 0.0, std: self.init_std };
        let norm = |scope: &Scope| Ok(Box::new(self.norm(scope)?) as Box<dyn PreNorm>);
        let spec = DecoderSpec {
            names: &NAMES,
            table: EmbeddingSpec { count: self.vocabulary, width: self.width, init, tied: self.tied },
            positions: None,
            dropout: 0.0,
            context: self.context,
            blocks: self.layers,
            stream: self.stream.unwrap_or(scope.dtype()),
            norm: &norm,
        };
        let block = |_, place: &Scope| Ok(Arc::new(LlamaBlock::new(self, layers, place)?) as Arc<dyn Block>);
        Decoder::build(layers, scope, stage, first, spec, block)
    }

    fn norm(&self, scope: &Scope) -> Result<RmsNorm> {
        RmsNormConfig::new(&[self.width]).with_eps(self.eps).init(scope)
    }

    /// Refuses sizes that do not fit each other.
    pub(super) fn check(&self) -> Result<(), String> {
        check_sizes(&[
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("layers", self.layers),
            ("heads", self.heads),
            ("key_heads", self.key_heads),
            ("head_dim", self.head_dim),
            ("width", self.width),
            ("inner", self.inner),
        ])?;
        if !self.heads.is_multiple_of(self.key_heads) || !self.head_dim.is_multiple_of(2) {
            return Err(format!(
                "{} query heads for {} key heads of {} features, wanted a multiple and an even number",
                self.heads, self.key_heads, self.head_dim
            ));
        }
        if !self.rope_base.is_finite() || self.rope_base <= 0.0 {
            return Err(format!("the base of the positions is {}, wanted a number above 0", self.rope_base));
        }
        check_numbers(self.eps, self.init_std, &[self.dropout])
    }
}

struct LlamaBlock<L: LayerFactory> {
    input_layernorm: RmsNorm,
    self_attn: WrappedUnit<GroupedQueryAttention<L>>,
    post_attention_layernorm: RmsNorm,
    mlp: WrappedUnit<Gated<L::Column, L::Row>>,
    matrix: DType,
    layers: Arc<L>,
}

parameters!([L: LayerFactory] LlamaBlock<L> { self_attn, mlp, input_layernorm, post_attention_layernorm });

struct Gated<C, R> {
    gate_and_up: WrappedUnit<GateAndUp<C>>,
    down_proj: WrappedUnit<R>,
}

parameters!([C: Module + 'static, R: Module + 'static] Gated<C, R> { gate_and_up = "", down_proj });

struct GateAndUp<C> {
    gate_proj: C,
    up_proj: C,
}

parameters!([C: Parameters] GateAndUp<C> { gate_proj, up_proj });

impl<L: LayerFactory> LlamaBlock<L> {
    fn new(config: &LlamaConfig, layers: &Arc<L>, scope: &Scope) -> Result<LlamaBlock<L>> {
        let LlamaConfig { width, inner, attention_bias, mlp_bias, .. } = *config;
        let init = Init::Normal { mean: 0.0, std: config.init_std };
        let column = |scope: Scope, out: usize, bias: bool| {
            layers.column(&scope, LinearSpec { inputs: width, outputs: &[out], bias, init, whole: false })
        };
        let row = |scope: Scope, inputs: usize, bias: bool| {
            layers.row(&scope, LinearSpec { inputs, outputs: &[width], bias, init, whole: true })
        };
        let mlp = scope.child("mlp");
        let stream = scope.with_dtype(config.stream.unwrap_or(scope.dtype()));
        let attention = GroupedQueryAttentionConfig {
            head_dim: config.head_dim,
            bias: attention_bias,
            rope_base: Some(config.rope_base),
            dropout: config.dropout,
            init,
            ..GroupedQueryAttentionConfig::new(width, config.heads, config.key_heads)
        };
        Ok(LlamaBlock {
            input_layernorm: config.norm(&stream.child("input_layernorm"))?,
            self_attn: WrappedUnit::part(attention.init_on(layers, &scope.child("self_attn"))?),
            post_attention_layernorm: config.norm(&stream.child("post_attention_layernorm"))?,
            mlp: WrappedUnit::part(Gated {
                gate_and_up: WrappedUnit::part(GateAndUp {
                    gate_proj: column(mlp.child("gate_proj"), inner, mlp_bias)?,
                    up_proj: column(mlp.child("up_proj"), inner, mlp_bias)?,
                }),
                down_proj: WrappedUnit::part(row(mlp.child("down_proj"), inner, mlp_bias)?),
            }),
            matrix: scope.dtype(),
            layers: layers.clone(),
        })
    }

    fn run(&self, x: &Var, rows: Positions<'_>) -> Result<Var> {
        let (x, n) = self.input_layernorm.pre_forward(x, self.matrix)?;
        let y = self.self_attn.call_once(n, |attention, n| attention.run(&n, rows))?;
        let (x, n) = self.post_attention_layernorm.add_forward(&x, &y)?;
        let y = self.mlp.call_once(n, |mlp, n| {
            let gated = mlp.gate_and_up.call_once(n, |maps, n| {
                let inner = self.layers.columns(&[&maps.gate_proj, &maps.up_proj], &n)?;
                Ok(inner[0].silu()?.mul(&inner[1])?)
            })?;
            mlp.down_proj.forward(&gated)
        })?;
        add_branch(&x, &y)
    }
}

impl<L: LayerFactory> Module for LlamaBlock<L> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.run(x, Positions::Whole)
    }
}

impl<L: LayerFactory> Block for LlamaBlock<L> {
    fn extend(&self, x: &Var, cache: &mut KvCache) -> Result<Var> {
        self.run(x, Positions::Continued(cache))
    }

    fn packed(&self, x: &Var, documents: &Documents) -> Result<Var> {
        self.run(x, Positions::Packed(documents))
    }

    fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.self_attn.module().cache(batch, capacity)
    }

    fn set_recompute_attention(&self, recompute: bool) {
        self.self_attn.module().set_recompute(recompute);
    }
}
