//! Transformers of today: one decoder, whose parts a [`TransformerConfig`] chooses.
//!
//! ```text
//! mod      the config, and the decoder that it makes
//! block    a block: attention, a perceptron or a mixture of experts, and norms before or after them
//! mixture  a mixture of experts, of which each token takes some
//! family   Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-NeoX, SmolLM, Mixtral: their settings
//! parse    the config of a `config.json`; json: the way back
//! files    the names of their parameters in files, some of which join several
//! ```

mod block;
#[cfg(test)]
mod config_tests;
mod family;
mod files;
mod json;
mod mixture;
mod parse;

use std::sync::Arc;

use phalanx_tensor::DType;

use super::check::{check_layers, check_numbers, check_sizes};
use super::decoder::{DecoderSpec, Names, Routers};
use super::{Activation, Block, Decoder, DecoderStage, RouterLosses};
use crate::layer_factory::EmbeddingSpec;
use crate::modules::{PreNorm, QueryKeyNorm, RopeScaling, Rotary};
use crate::{Error, Init, LayerFactory, OneDevice, Result, Scope};

use block::{Norm, TransformerBlock};
pub use family::Family;

/// A transformer's sizes and settings. [`ModelConfig`](super::ModelConfig) reads it from a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct TransformerConfig {
    /// How files name its settings and its parameters.
    pub family: Family,
    /// The number of tokens.
    pub vocabulary: usize,
    /// Positions of the sequences that it is for ([`Decoder::context`]).
    pub context: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, each shared by `heads / key_heads` query heads.
    pub key_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of the stream.
    pub width: usize,
    /// Features inside the perceptron.
    pub inner: usize,
    /// Experts in place of a perceptron, if there are any.
    pub experts: Option<Experts>,
    /// What attention of each block sees. There are as many blocks.
    pub layers: Vec<AttentionKind>,
    /// Where the norms of a block are.
    pub norms: NormPlaces,
    /// The kind of the norms.
    pub norm: NormKind,
    /// Added to mean squares or variances in norms.
    pub eps: f64,
    /// Whether the linear layers to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the linear layer after the heads has a bias.
    pub output_bias: bool,
    /// Whether the perceptron's linear layers have biases.
    pub mlp_bias: bool,
    /// How queries and keys are normalised, if they are.
    pub query_key_norm: Option<QueryKeyNorm>,
    /// If present, queries, keys and values are held between it and its negative.
    pub qkv_clip: Option<f64>,
    /// What scores are multiplied with; `1 / sqrt(head_dim)` if absent.
    pub score_scale: Option<f64>,
    /// If present, scores go through `cap tanh(score / cap)`.
    pub score_cap: Option<f64>,
    /// If present, logits go through `cap tanh(logit / cap)`. Then all logits are held at a time for the loss.
    pub logit_cap: Option<f64>,
    /// What embeddings are multiplied with, rounded to their dtype; nothing if absent.
    pub embedding_scale: Option<f64>,
    /// The perceptron's nonlinearity.
    pub activation: Activation,
    /// Whether the perceptron is `down(activation(gate(x)) * up(x))`, not `down(activation(up(x)))`.
    pub gated: bool,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// The token of padding, whose embedding gets no gradient where it is looked up; none if absent.
    pub padding: Option<usize>,
    /// Dropout of attention's probabilities.
    pub dropout: f64,
    /// Standard deviation of initial weights.
    pub init_std: f64,
    /// The dtype of the residual stream and of norms; the matrices' dtype if absent.
    pub stream: Option<DType>,
}

/// A mixture of experts: perceptrons of which each token takes some. No token is dropped.
/// Sources: Shazeer et al.: Outrageously large neural networks (2017); Jiang et al.: Mixtral of experts (2024).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// The number of experts.
    pub count: usize,
    /// How many of them a token takes: those of the largest probabilities.
    pub chosen: usize,
    /// Features inside an expert.
    pub inner: usize,
    /// Whether the probabilities of those that a token takes are made to add up to 1.
    pub normalized: bool,
    /// The blocks that have a perceptron all the same.
    pub dense: Vec<usize>,
    /// What is added to the loss, so that experts are evenly loaded.
    pub losses: RouterLosses,
    /// By how much a bias of each expert moves after each step ([`RouterBias`](super::RouterBias)); 0 for no biases.
    pub bias_step: f64,
}

/// What attention of a block sees.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionKind {
    /// The number of keys that a query sees, its own included; all earlier ones if absent.
    pub window: Option<usize>,
    /// Rotary positions; none if absent.
    pub rotary: Option<Rotary>,
}

/// Where the norms of a block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlaces {
    /// Before attention and before the perceptron.
    Before,
    /// After each, on what it adds to the stream. Source: OLMo Team: 2 OLMo 2 Furious (2025).
    After,
    /// Both. Source: Gemma Team: Gemma 2 (2024).
    BeforeAndAfter,
    /// Before each, and both see the same stream. Source: Wang and Komatsuzaki: GPT-J (2021).
    Parallel,
}

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By the root mean square, with a weight.
    Rms,
    /// The same, with a factor that is 1 more than the weight.
    RmsPlusOne,
    /// By mean and variance, with weight and bias.
    Layer,
}

impl TransformerConfig {
    /// A model of a family and that size, with the family's settings, as many key heads as query heads, and full attention.
    pub fn new(
        family: Family,
        vocabulary: usize,
        context: usize,
        layers: usize,
        heads: usize,
        width: usize,
    ) -> TransformerConfig {
        let kind = AttentionKind { window: None, rotary: Some(Rotary::new(10000.0)) };
        let config = TransformerConfig {
            family,
            vocabulary,
            context,
            heads,
            key_heads: heads,
            head_dim: width / heads.max(1),
            width,
            inner: (width.saturating_mul(8) / 3).next_multiple_of(64),
            experts: None,
            layers: vec![kind; layers],
            norms: NormPlaces::Before,
            norm: NormKind::Rms,
            eps: 1e-6,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            query_key_norm: None,
            qkv_clip: None,
            score_scale: None,
            score_cap: None,
            logit_cap: None,
            embedding_scale: None,
            activation: Activation::Silu,
            gated: true,
            tied: false,
            padding: None,
            dropout: 0.0,
            init_std: 0.02,
            stream: None,
        };
        family.settings(config)
    }

    /// The whole model on one device.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    pub fn init(&self, scope: &Scope) -> Result<Decoder> {
        self.init_stage(&Arc::new(OneDevice), scope, DecoderStage::whole(self.layers.len()))
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

    /// [`TransformerConfig::init_stage`], with the first stage of the same model if this rank has that too. A tied head then shares its
    /// table.
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
        self.check().map_err(|why| Error::invalid(self.family.name(), why))?;
        let files = self.clone();
        let names = move |name: &str| files.stored(name).names.concat();
        layers.begins(Arc::new(names), stage.layers.len() == self.layers.len());
        let init = Init::Normal { mean: 0.0, std: self.init_std };
        let norm = |scope: &Scope| Ok(Box::new(Norm::new(self, scope)?) as Box<dyn PreNorm>);
        let spec = DecoderSpec {
            names: &NAMES,
            table: EmbeddingSpec {
                count: self.vocabulary,
                width: self.width,
                init,
                tied: self.tied,
                padding: self.padding,
            },
            embedding_scale: self.embedding_scale,
            positions: None,
            dropout: 0.0,
            context: self.context,
            turning_point: self.turning_points().next(),
            blocks: self.layers.len(),
            stream: self.stream.unwrap_or(scope.dtype()),
            norm: &norm,
            logit_cap: self.logit_cap,
            routers: self.experts.as_ref().map_or_else(Routers::default, |experts| Routers {
                losses: experts.losses,
                blocks: (0..self.layers.len()).filter(|i| !experts.dense.contains(i)).collect(),
                experts: experts.count,
                chosen: experts.chosen,
            }),
        };
        let block = |i: usize, place: &Scope| {
            Ok(Arc::new(TransformerBlock::new(self, i, layers, place)?) as Arc<dyn Block>)
        };
        Decoder::build(layers, scope, stage, first, spec, block)
    }

    /// How the rotary frequencies of blocks with positions are changed.
    fn scalings(&self) -> impl Iterator<Item = &RopeScaling> {
        self.layers.iter().filter_map(|kind| kind.rotary.as_ref()).map(|rotary| &rotary.scaling)
    }

    /// The former contexts of blocks with long rope.
    fn turning_points(&self) -> impl Iterator<Item = usize> {
        self.scalings().filter_map(RopeScaling::turning_point)
    }

    /// Elements of the matrices.
    pub(super) fn matrix_elements(&self) -> f64 {
        self.elements(|experts| experts.count)
    }

    /// Elements of the matrices that a token is multiplied by.
    pub(super) fn active_elements(&self) -> f64 {
        self.elements(|experts| experts.chosen)
    }

    fn elements(&self, experts: impl Fn(&Experts) -> usize) -> f64 {
        let f = |n: usize| n as f64;
        let attention = 2.0 * (f(self.heads) + f(self.key_heads)) * f(self.head_dim);
        let blocks = f(self.layers.len()) * attention + self.mlp_features(experts);
        (blocks + f(self.vocabulary)) * f(self.width)
    }

    /// Rows and columns of all blocks' perceptrons, or so many experts and the gate, beside the width.
    pub(super) fn mlp_features(&self, experts: impl Fn(&Experts) -> usize) -> f64 {
        let f = |n: usize| n as f64;
        let maps = if self.gated { 3.0 } else { 2.0 };
        let Some(mixture) = &self.experts else { return f(self.layers.len()) * maps * f(self.inner) };
        let dense = mixture.dense.iter().filter(|i| **i < self.layers.len()).count();
        let sparse = maps * f(mixture.inner) * f(experts(mixture)) + f(mixture.count);
        f(dense) * maps * f(self.inner) + f(self.layers.len() - dense) * sparse
    }

    /// Refuses sizes and settings that do not fit each other.
    pub(super) fn check(&self) -> Result<(), String> {
        check_sizes(&[
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("heads", self.heads),
            ("key_heads", self.key_heads),
            ("head_dim", self.head_dim),
            ("width", self.width),
            ("inner", self.inner),
        ])?;
        check_layers(self.layers.len())?;
        let features = |rotary: &Rotary| rotary.features.unwrap_or(self.head_dim);
        let rotated = |kind: &AttentionKind| kind.rotary.as_ref().map(features);
        let does_not_fit = |n: &usize| *n == 0 || n.next_multiple_of(2) > self.head_dim;
        let odd = self.layers.iter().filter_map(rotated).find(does_not_fit);
        if !self.heads.is_multiple_of(self.key_heads) || odd.is_some() {
            return Err(format!(
                "{} query heads for {} key heads of {} features, {} of them rotated, wanted a multiple and whole pairs",
                self.heads,
                self.key_heads,
                self.head_dim,
                odd.or(self.layers.iter().find_map(rotated)).unwrap_or(0)
            ));
        }
        let turning_point = self.turning_points().next();
        if let Some(other) = self.turning_points().find(|other| Some(*other) != turning_point) {
            let former = turning_point.unwrap_or(0);
            return Err(format!(
                "long rope with former contexts {former} and {other}, wanted one for all blocks"
            ));
        }
        for kind in &self.layers {
            if let Some(rotary) = &kind.rotary {
                rotary.scaling.check(features(rotary))?;
            }
            let base = kind.rotary.as_ref().map_or(1.0, |rotary| rotary.base);
            if !base.is_finite() || base <= 0.0 {
                return Err(format!("the base of the positions is {base}, wanted a number above 0"));
            }
            if kind.window == Some(0) {
                return Err("a window of 0 keys, wanted at least 1".into());
            }
        }
        if let Some(Experts { count, chosen, inner, losses, bias_step, .. }) = &self.experts {
            check_sizes(&[
                ("experts", *count),
                ("experts of a token", *chosen),
                ("inner features of an expert", *inner),
            ])?;
            check_layers(*count)?;
            if chosen > count {
                return Err(format!("{chosen} of {count} experts for a token, wanted at most all"));
            }
            let numbers = [
                ("the factor of the balancing loss", losses.balance),
                ("the factor of the z-loss", losses.z),
                ("the step of the routers' biases", *bias_step),
            ];
            for (name, number) in numbers {
                if !(0.0..f64::INFINITY).contains(&number) {
                    return Err(format!("{name} is {number}, wanted a number from 0 up"));
                }
            }
        }
        if let Some(token) = self.padding.filter(|token| *token >= self.vocabulary) {
            return Err(format!("the padding token is {token}, wanted one of {} tokens", self.vocabulary));
        }
        let caps = [
            ("score_cap", self.score_cap),
            ("logit_cap", self.logit_cap),
            ("the clip of queries, keys and values", self.qkv_clip),
        ];
        if let Some((name, Some(cap))) =
            caps.into_iter().find(|(_, cap)| cap.is_some_and(|cap| cap.is_nan() || cap <= 0.0))
        {
            return Err(format!("{name} is {cap}, wanted a number above 0"));
        }
        check_numbers(self.eps, self.init_std, &[self.dropout])
    }
}

const NAMES: Names =
    Names { embedding: "embed_tokens", positions: "", blocks: "layers", norm: "norm", head: "lm_head" };
