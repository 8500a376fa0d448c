//! Causal self-attention in which several query heads share a key head, with rotary positions.

use std::sync::Arc;

use phalanx_autograd::{Rope, Var};
use phalanx_tensor::DType;

use super::Dropout;
use crate::layers::Map;
use crate::mode::{Mode, modes};
use crate::models::attend::{Attend, Heads, Rows};
use crate::models::{Documents, KvCache};
use crate::{
    Entry, Error, Init, Layers, Module, OneDevice, Parameter, Parameters, Result, Scope, parameters,
};

/// `o_proj(attention(rope(q_proj(x)), rope(k_proj(x)), v_proj(x)))` for `x` of shape `[B, T, width]`; query i sees the
/// keys up to i.
/// Source: Ainslie et al.: GQA (2023).
pub struct GroupedQueryAttention<L: Layers = OneDevice> {
    q_proj: L::Column,
    k_proj: L::Column,
    v_proj: L::Column,
    o_proj: L::Row,
    attend: Attend,
    dtype: DType,
    layers: Arc<L>,
    mode: Mode,
}

modes!([L: Layers] GroupedQueryAttention<L>);
parameters!([L: Layers] GroupedQueryAttention<L> { q_proj, k_proj, v_proj, o_proj });

/// How a [`GroupedQueryAttention`] is made.
#[derive(Clone, Copy, Debug)]
pub struct GroupedQueryAttentionConfig {
    /// Features of the stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, of which `heads` is a multiple.
    pub key_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Whether the maps have biases.
    pub bias: bool,
    /// The base of rotary positions; none if absent.
    pub rope_base: Option<f64>,
    /// Dropout of the probabilities.
    pub dropout: f64,
    /// The initial weights.
    pub init: Init,
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
            rope_base: Some(10000.0),
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

    /// The layer, of these maps.
    ///
    /// # Errors
    /// If the key heads do not divide the heads, or it cannot be cut or allocated.
    pub fn init_on<L: Layers>(self, layers: &Arc<L>, scope: &Scope) -> Result<GroupedQueryAttention<L>> {
        let GroupedQueryAttentionConfig { width, heads, key_heads, head_dim, bias, init, .. } = self;
        let sound = heads > 0 && key_heads > 0 && heads.is_multiple_of(key_heads);
        let Some(inner) = heads.checked_mul(head_dim).filter(|_| sound) else {
            let why = format!("got {heads} heads of {head_dim} features for {key_heads} key heads");
            let wanted = "wanted at least one, a multiple, and features that can be counted";
            return Err(Error::invalid("GroupedQueryAttention", format!("{why}, {wanted}")));
        };
        let column = |name: &str, heads: usize, whole: bool| {
            let map = Map { inputs: width, outputs: &[heads * head_dim], bias, init, whole };
            layers.column(&scope.child(name), map)
        };
        let all_keys = layers.key_heads(heads, key_heads)?.len() == key_heads;
        let row = Map { inputs: inner, outputs: &[width], bias, init, whole: true };
        let heads = Heads { query: heads, key: key_heads, dim: head_dim };
        let dropout = Dropout::new(self.dropout, &scope.child("dropout"))?;
        Ok(GroupedQueryAttention {
            q_proj: column("q_proj", heads.query, false)?,
            k_proj: column("k_proj", heads.key, all_keys)?,
            v_proj: column("v_proj", heads.key, all_keys)?,
            o_proj: layers.row(&scope.child("o_proj"), row)?,
            attend: Attend::new(&**layers, heads, self.rope_base, dropout)?,
            dtype: scope.dtype(),
            layers: layers.clone(),
            mode: Mode::default(),
        })
    }
}

impl<L: Layers> GroupedQueryAttention<L> {
    /// The output for further positions of sequences whose earlier ones are in the cache, if there is one.
    ///
    /// # Errors
    /// If the input does not fit or the cache is full.
    pub fn extend(&self, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        self.run(x, cache.into())
    }

    /// The output for sequences of several documents each, which do not see each other; rotary positions begin anew with each.
    ///
    /// # Errors
    /// If the input or the documents do not fit.
    pub fn packed(&self, x: &Var, documents: &Documents) -> Result<Var> {
        self.run(x, Rows::Packed(documents))
    }

    pub(crate) fn run(&self, x: &Var, rows: Rows<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let qkv = self.layers.columns(&[&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        self.o_proj.forward(&self.attend.run([&qkv[0], &qkv[1], &qkv[2]], rows)?)
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

impl<L: Layers> Module for GroupedQueryAttention<L> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.extend(x, None)
    }
}

/// Rotates the halves of each row of `[.., T, D]` by its position.
/// Source: Su et al.: RoFormer (2021).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryEmbedding {
    /// The ratio of the slowest to the fastest wavelength, about.
    pub base: f64,
    /// The first position.
    pub offset: i64,
}

impl Default for RotaryEmbedding {
    fn default() -> RotaryEmbedding {
        RotaryEmbedding { base: 10000.0, offset: 0 }
    }
}

impl Parameters for RotaryEmbedding {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl Module for RotaryEmbedding {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.rope(None, &Rope { base: self.base, offset: self.offset })?)
    }
}
