//! Llama: rotary positions, RMS norms, grouped query attention, a gated MLP.
//!
//! ```text
//! x += o_proj(attention(rope(q_proj(n)), rope(k_proj(n)), v_proj(n)))      n = input_layernorm(x)
//! x += down_proj(silu(gate_proj(n)) * up_proj(n))                          n = post_attention_layernorm(x)
//! ```
//! Source: Touvron et al.: LLaMA (2023); Ainslie et al.: GQA (2023); Shazeer: GLU variants (2020).

use std::sync::Arc;

use phalanx_tensor::DType;

use super::{AttentionKind, Decoder, DecoderStage, Family, TransformerConfig};
use crate::{LayerFactory, OneDevice, Result, RopeScaling, Rotary, Scope};

/// A Llama's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The number of tokens.
    pub vocabulary: usize,
    /// Positions of the sequences that it is for ([`Decoder::context`]).
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
    /// How the rotary frequencies are changed.
    pub rope_scaling: RopeScaling,
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
            rope_scaling: RopeScaling::None,
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
        self.transformer().init_stage_beside(layers, scope, stage, first)
    }

    /// The same model as a [`TransformerConfig`].
    pub fn transformer(&self) -> TransformerConfig {
        let rotary = Rotary { base: self.rope_base, features: None, scaling: self.rope_scaling.clone() };
        TransformerConfig {
            key_heads: self.key_heads,
            head_dim: self.head_dim,
            inner: self.inner,
            layers: vec![AttentionKind { window: None, rotary: Some(rotary) }; self.layers],
            eps: self.eps,
            tied: self.tied,
            qkv_bias: self.attention_bias,
            output_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            dropout: self.dropout,
            init_std: self.init_std,
            stream: self.stream,
            ..TransformerConfig::new(
                Family::Llama,
                self.vocabulary,
                self.context,
                self.layers,
                self.heads,
                self.width,
            )
        }
    }
}
