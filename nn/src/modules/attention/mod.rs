//! Causal self-attention of language models.
//!
//! ```text
//! mod        GroupedQueryAttention: the linear layers, and attention between them
//! causal     attention between the linear layers, which GPT's block uses too
//! rotary     rotary positions, and how they are changed for longer contexts
//! positions  the cache of earlier positions, parts of rows, and rows of several documents
//! ```

mod causal;
mod positions;
mod rotary;

use std::sync::Arc;

use phalanx_autograd::Var;
use phalanx_tensor::DType;

pub(crate) use causal::{CausalAttention, Heads, Positions, Scores};
pub use positions::{Documents, KvCache, RowPart};
pub use rotary::{RopeScaling, Rotary};

use super::{Dropout, RmsNorm, RmsNormConfig};
use crate::layer_factory::{HeadsNormSpec, LinearSpec};
use crate::mode::{Mode, modes};
use crate::{
    Entry, Error, Init, LayerFactory, Module, OneDevice, Parameter, Parameters, Result, Scope, WrappedUnit,
    parameters,
};

/// `o_proj(attention(rope(q_proj(x)), rope(k_proj(x)), v_proj(x)))` for `x` of shape `[B, T, width]`. Several query heads share a key
/// head, and query i attends to the keys up to i.
/// Source: Ainslie et al.: GQA (2023).
pub struct GroupedQueryAttention<L: LayerFactory = OneDevice> {
    qkv: WrappedUnit<QueriesKeysValues<L::Column>>,
    q_norm: Option<HeadsNorm>,
    k_norm: Option<HeadsNorm>,
    o_proj: WrappedUnit<L::Row>,
    attend: CausalAttention,
    dtype: DType,
    layers: Arc<L>,
    mode: Mode,
}

modes!([L: LayerFactory] GroupedQueryAttention<L>);
parameters!([L: LayerFactory] GroupedQueryAttention<L> { qkv = "", q_norm, k_norm, o_proj });

struct QueriesKeysValues<C> {
    q_proj: C,
    k_proj: C,
    v_proj: C,
}

parameters!([C: Parameters] QueriesKeysValues<C> { q_proj, k_proj, v_proj });

/// A norm of queries or keys.
pub(crate) enum HeadsNorm {
    /// Of each head by itself: `[.., dim]`.
    Each(RmsNorm),
    /// Of the features of all heads: `[.., this rank's heads * dim]`.
    All(Box<dyn Module>),
}

impl Parameters for HeadsNorm {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        match self {
            HeadsNorm::Each(norm) => norm.visit(path, visitor),
            HeadsNorm::All(norm) => norm.visit(path, visitor),
        }
    }
}

/// How a [`GroupedQueryAttention`] is made.
#[derive(Clone, Debug)]
pub struct GroupedQueryAttentionConfig {
    /// Features of the stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, of which `heads` is a multiple.
    pub key_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Whether the linear layers to queries, keys and values have biases.
    pub bias: bool,
    /// Whether the linear layer after the heads has a bias.
    pub output_bias: bool,
    /// The base of rotary positions; none if absent.
    pub rope_base: Option<f64>,
    /// How many of a head's first features are rotated; all if absent.
    pub rope_features: Option<usize>,
    /// How the rotary frequencies are changed.
    pub rope_scaling: RopeScaling,
    /// What scores are multiplied with; `1 / sqrt(head_dim)` if absent.
    pub score_scale: Option<f64>,
    /// If present, scores go through `cap tanh(score / cap)`. Source: Gemma Team: Gemma 2 (2024).
    pub score_cap: Option<f64>,
    /// The number of keys that a query sees, its own included; all earlier ones if absent. Source: Beltagy et al.: Longformer (2020).
    pub window: Option<usize>,
    /// Whether queries and keys are normalised before they are rotated.
    pub query_key_norm: Option<QueryKeyNorm>,
    /// If present, queries, keys and values are held between it and its negative, queries and keys behind their norms. Source: MosaicML NLP
    /// Team: Introducing MPT-7B (2023).
    pub qkv_clip: Option<f64>,
    /// Dropout of the probabilities.
    pub dropout: f64,
    /// The initial weights.
    pub init: Init,
}

/// How queries and keys are normalised, by an RMS norm with a weight. Source: Henry et al.: Query-key normalization (2020).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryKeyNorm {
    /// Over each head by itself; otherwise over the features of all heads together.
    pub each_head: bool,
    /// Whether the weight is 1 more than the parameter.
    pub plus_one: bool,
    /// Added to mean squares.
    pub eps: f64,
}

impl GroupedQueryAttentionConfig {
    /// With heads that share the width evenly, without biases, with rotary positions of base 10000.
    pub fn new(width: usize, heads: usize, key_heads: usize) -> GroupedQueryAttentionConfig {
        GroupedQueryAttentionConfig {
            width,
            heads,
            key_heads,
            head_dim: width / heads.max(1),
            bias: false,
            output_bias: false,
            rope_base: Some(10000.0),
            rope_features: None,
            rope_scaling: RopeScaling::None,
            score_scale: None,
            score_cap: None,
            window: None,
            query_key_norm: None,
            qkv_clip: None,
            dropout: 0.0,
            init: Init::layer(width),
        }
    }

    /// The layer on one device.
    ///
    /// # Errors
    /// If the key heads do not divide the heads, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<GroupedQueryAttention> {
        self.init_on(&Arc::new(OneDevice), scope)
    }

    /// The layer, with linear layers made by `layers`.
    ///
    /// # Errors
    /// If the key heads do not divide the heads, or it cannot be cut or allocated.
    pub fn init_on<L: LayerFactory>(
        self,
        layers: &Arc<L>,
        scope: &Scope,
    ) -> Result<GroupedQueryAttention<L>> {
        let GroupedQueryAttentionConfig { width, heads, key_heads, head_dim, bias, init, .. } = self;
        let sound = heads > 0 && key_heads > 0 && heads.is_multiple_of(key_heads);
        let Some(inner) = heads.checked_mul(head_dim).filter(|_| sound) else {
            let why = format!("got {heads} heads of {head_dim} features for {key_heads} key heads");
            let wanted = "wanted at least one, a multiple, and features that can be counted";
            return Err(Error::invalid("GroupedQueryAttention", format!("{why}, {wanted}")));
        };
        let checked = self.rope_scaling.check(self.rope_features.unwrap_or(head_dim));
        checked.map_err(|why| Error::invalid("GroupedQueryAttention", why))?;
        let column = |name: &str, heads: usize, whole: bool| {
            let map = LinearSpec { inputs: width, outputs: &[heads * head_dim], bias, init, whole };
            layers.column(&scope.child(name), map)
        };
        let scores = Scores { scale: self.score_scale, cap: self.score_cap, window: self.window };
        let all_keys = layers.key_heads(heads, key_heads)?.len() == key_heads;
        let all_queries = layers.heads(heads)?.len() == heads;
        let norm = |name: &str, heads: usize, all: bool| {
            let Some(QueryKeyNorm { each_head, plus_one, eps }) = self.query_key_norm else {
                return Ok(None);
            };
            let (scope, features) = (scope.child(name), if each_head { head_dim } else { heads * head_dim });
            if !each_head && !all {
                let spec = HeadsNormSpec { features, eps, plus_one };
                return Ok(Some(HeadsNorm::All(layers.heads_norm(&scope, spec)?)));
            }
            let norm = RmsNormConfig::new(&[features]).with_eps(eps).with_plus_one(plus_one).init(&scope)?;
            layers.partial(&norm.parameters())?;
            Ok::<_, Error>(Some(if each_head {
                HeadsNorm::Each(norm)
            } else {
                HeadsNorm::All(Box::new(norm))
            }))
        };
        let (q_norm, k_norm) = (norm("q_norm", heads, all_queries)?, norm("k_norm", key_heads, all_keys)?);
        let bias = self.output_bias;
        let row = LinearSpec { inputs: inner, outputs: &[width], bias, init, whole: true };
        let heads = Heads { query: heads, key: key_heads, dim: head_dim };
        let dropout = Dropout::new(self.dropout, &scope.child("dropout"))?;
        let (features, scaling) = (self.rope_features, self.rope_scaling);
        let rotary = self.rope_base.map(|base| Rotary { base, features, scaling });
        Ok(GroupedQueryAttention {
            qkv: WrappedUnit::part(QueriesKeysValues {
                q_proj: column("q_proj", heads.query, false)?,
                k_proj: column("k_proj", heads.key, all_keys)?,
                v_proj: column("v_proj", heads.key, all_keys)?,
            }),
            q_norm,
            k_norm,
            o_proj: WrappedUnit::part(layers.row(&scope.child("o_proj"), row)?),
            attend: CausalAttention::new(&**layers, heads, rotary, scores, dropout)?.with_clip(self.qkv_clip),
            dtype: scope.dtype(),
            layers: layers.clone(),
            mode: Mode::default(),
        })
    }
}

impl<L: LayerFactory> GroupedQueryAttention<L> {
    /// The output for further positions of sequences whose earlier ones are in the cache, if there is one.
    ///
    /// # Errors
    /// If the input does not fit or the cache is full.
    pub fn extend(&self, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        self.run(x, cache.into())
    }

    /// The output for sequences of several documents each. A document does not attend to another one, and its rotary positions begin at 0.
    ///
    /// # Errors
    /// If the input or the documents do not fit.
    pub fn packed(&self, x: &Var, documents: &Documents) -> Result<Var> {
        self.run(x, Positions::Packed(documents))
    }

    /// The output for further positions of rows that have a cache each, one row's after the other's in `x` of shape `[1, T, width]`.
    ///
    /// # Errors
    /// If the input does not fit.
    pub fn extend_rows<'a>(&self, x: &Var, rows: &'a mut [RowPart<'a>]) -> Result<Var> {
        self.run(x, Positions::Rows(rows))
    }

    pub(crate) fn run(&self, x: &Var, rows: Positions<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let heads = self.qkv.call_once(x.clone(), |maps, x| {
            let qkv = self.layers.columns(&[&maps.q_proj, &maps.k_proj, &maps.v_proj], &x)?;
            self.attend.run_normed([&qkv[0], &qkv[1], &qkv[2]], [&self.q_norm, &self.k_norm], rows)
        })?;
        self.o_proj.forward(&heads)
    }

    /// Sets whether backward computes the probabilities and their dropout again, from now on, instead of keeping them.
    pub fn set_recompute(&self, recompute: bool) {
        self.attend.set_recompute(recompute);
    }

    /// An empty cache for `batch` sequences of at most `capacity` positions.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        let device = self.parameters().first().map(Parameter::device).unwrap_or_default();
        self.attend.cache(batch, capacity, self.dtype, device)
    }
}

impl<L: LayerFactory> Module for GroupedQueryAttention<L> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.extend(x, None)
    }
}
