//! Causal self-attention of language models: [`GroupedQueryAttention`], the attention between its linear layers, which GPT's block uses
//! too ([`CausalAttention`]), its cache ([`KvCache`]) and packed rows ([`Documents`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_autograd::{Attention, Rope, Var, checkpoint};
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};

use super::Dropout;
use crate::layer_factory::{LinearSpec, activation_window};
use crate::mode::{Mode, modes};
use crate::{
    Error, Init, LayerFactory, Module, OneDevice, Parameter, Parameters, Result, Scope, WrappedUnit,
    parameters,
};

/// `o_proj(attention(rope(q_proj(x)), rope(k_proj(x)), v_proj(x)))` for `x` of shape `[B, T, width]`. Several query heads share a key
/// head, and query i attends to the keys up to i.
/// Source: Ainslie et al.: GQA (2023).
pub struct GroupedQueryAttention<L: LayerFactory = OneDevice> {
    qkv: WrappedUnit<QueriesKeysValues<L::Column>>,
    o_proj: WrappedUnit<L::Row>,
    attend: CausalAttention,
    dtype: DType,
    layers: Arc<L>,
    mode: Mode,
}

modes!([L: LayerFactory] GroupedQueryAttention<L>);
parameters!([L: LayerFactory] GroupedQueryAttention<L> { qkv = "", o_proj });

struct QueriesKeysValues<C> {
    q_proj: C,
    k_proj: C,
    v_proj: C,
}

parameters!([C: Parameters] QueriesKeysValues<C> { q_proj, k_proj, v_proj });

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
    /// Whether the linear layers have biases.
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
        let column = |name: &str, heads: usize, whole: bool| {
            let map = LinearSpec { inputs: width, outputs: &[heads * head_dim], bias, init, whole };
            layers.column(&scope.child(name), map)
        };
        let all_keys = layers.key_heads(heads, key_heads)?.len() == key_heads;
        let row = LinearSpec { inputs: inner, outputs: &[width], bias, init, whole: true };
        let heads = Heads { query: heads, key: key_heads, dim: head_dim };
        let dropout = Dropout::new(self.dropout, &scope.child("dropout"))?;
        Ok(GroupedQueryAttention {
            qkv: WrappedUnit::part(QueriesKeysValues {
                q_proj: column("q_proj", heads.query, false)?,
                k_proj: column("k_proj", heads.key, all_keys)?,
                v_proj: column("v_proj", heads.key, all_keys)?,
            }),
            o_proj: WrappedUnit::part(layers.row(&scope.child("o_proj"), row)?),
            attend: CausalAttention::new(&**layers, heads, self.rope_base, dropout)?,
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

    pub(crate) fn run(&self, x: &Var, rows: Positions<'_>) -> Result<Var> {
        let _mode = self.mode.enter();
        let heads = self.qkv.call_once(x.clone(), |maps, x| {
            let qkv = self.layers.columns(&[&maps.q_proj, &maps.k_proj, &maps.v_proj], &x)?;
            self.attend.run([&qkv[0], &qkv[1], &qkv[2]], rows)
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

/// Causal attention of one layer, between the linear layers: heads, rotary positions, cache, dropout.
pub(crate) struct CausalAttention {
    core: Arc<Core>,
    /// This rank's key heads.
    key_heads: usize,
    /// The key head of each query head, if the query heads do not share the key heads evenly.
    key_of_query: Option<Vec<i64>>,
    rope: Option<f64>,
    /// Whether the core's values are computed again in backward where it has dropout.
    recompute: AtomicBool,
}

/// From queries, keys and values of heads to the heads' results.
struct Core {
    /// This rank's query heads, out of `all`.
    heads: Range<usize>,
    all: usize,
    dim: usize,
    dropout: Dropout,
}

/// Which positions a call computes.
pub(crate) enum Positions<'a> {
    /// Whole sequences.
    Whole,
    /// Further positions of sequences whose earlier positions are in the cache.
    Continued(&'a mut KvCache),
    /// Whole sequences of several documents, each of which attends to itself only.
    Packed(&'a Documents),
}

impl<'a> From<Option<&'a mut KvCache>> for Positions<'a> {
    fn from(cache: Option<&'a mut KvCache>) -> Positions<'a> {
        cache.map_or(Positions::Whole, Positions::Continued)
    }
}

/// The numbers of heads of the whole model, and the features of a head.
pub(crate) struct Heads {
    pub(crate) query: usize,
    pub(crate) key: usize,
    pub(crate) dim: usize,
}

impl CausalAttention {
    /// Attention of this rank's heads, as `layers` says; `rope` is the base of rotary positions.
    pub(crate) fn new(
        layers: &impl LayerFactory,
        heads: Heads,
        rope: Option<f64>,
        dropout: Dropout,
    ) -> Result<CausalAttention> {
        let here = layers.heads(heads.query)?;
        let keys = layers.key_heads(heads.query, heads.key)?;
        let keys_here: Vec<usize> = here.clone().map(|i| i * heads.key / heads.query - keys.start).collect();
        let even = |(i, &key): (usize, &usize)| key == i * keys.len() / here.len();
        let evenly = here.len().is_multiple_of(keys.len()) && keys_here.iter().enumerate().all(even);
        let key_of_query = (!evenly).then(|| keys_here.into_iter().map(|key| key as i64).collect());
        let core = Core { heads: here, all: heads.query, dim: heads.dim, dropout };
        let recompute = AtomicBool::new(false);
        Ok(CausalAttention { core: Arc::new(core), key_heads: keys.len(), key_of_query, rope, recompute })
    }

    pub(crate) fn set_recompute(&self, recompute: bool) {
        self.recompute.store(recompute, Ordering::Relaxed);
    }

    /// An empty cache for `batch` sequences of at most `capacity` positions.
    pub(crate) fn cache(
        &self,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: Device,
    ) -> Result<KvCache> {
        KvCache::new(batch, self.key_heads, capacity, self.core.dim, dtype, device)
    }

    /// Queries `[B, T, heads dim]`, keys and values `[B, T, key heads dim]` to the heads' results, in the shape of the queries.
    pub(crate) fn run(&self, [q, k, v]: [&Var; 3], rows: Positions<'_>) -> Result<Var> {
        if let Some(odd) = [q, k, v].into_iter().find(|x| x.rank() != 3) {
            let why = format!("got {:?} after the first map, wanted [B, T, features]", odd.shape());
            return Err(Error::invalid("attention", why));
        }
        let (cache, documents) = match rows {
            Positions::Whole => (None, None),
            Positions::Continued(cache) => (Some(cache), None),
            Positions::Packed(documents) => (None, Some(documents)),
        };
        documents.map_or(Ok(()), |documents| documents.check(q.shape()[0], q.shape()[1]))?;
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let (heads, dim) = (self.core.heads.len(), self.core.dim);
        let split = |x: &Var, heads: usize| -> Result<Var> {
            let shape = [x.shape()[0], x.shape()[1], heads, dim];
            Ok(x.reshape_to(&shape)?.transpose(1, 2)?)
        };
        let rotated = |x: Var| -> Result<Var> {
            let Some(base) = self.rope else { return Ok(x) };
            Ok(x.rope(documents.map(Documents::positions), &Rope { base, offset: before as i64 })?)
        };
        let (q, k) = (rotated(split(q, heads)?)?, rotated(split(k, self.key_heads)?)?);
        let v = split(v, self.key_heads)?;
        let (k, v) = match cache {
            Some(cache) => cache.append(&k, &v)?,
            None => (k, v),
        };
        let (k, v) = (self.key_heads_by_query(k)?, self.key_heads_by_query(v)?);
        let y = match (self.core.dropout.is_active(), self.recompute.load(Ordering::Relaxed)) {
            (false, _) => self.core.fused(&q, &k, &v, before, documents)?,
            (true, false) => self.core.with_dropout([&q, &k, &v], before, documents)?,
            (true, true) => {
                let (core, documents) = (self.core.clone(), documents.cloned());
                let again = move |v: &[Var]| {
                    Ok(core.with_dropout([&v[0], &v[1], &v[2]], before, documents.as_ref())?)
                };
                checkpoint(again, &[&q, &k, &v])?
            }
        };
        let (batch, positions) = (y.shape()[0], y.shape()[2]);
        Ok(y.transpose(1, 2)?.reshape_to(&[batch, positions, heads * dim])?)
    }

    /// Keys or values with a head for each query head, unless the heads are shared evenly.
    fn key_heads_by_query(&self, x: Var) -> Result<Var> {
        let Some(key_of_query) = &self.key_of_query else { return Ok(x) };
        Ok(x.index_select(1, &Var::from_slice(key_of_query, &[key_of_query.len()], x.device())?)?)
    }
}

impl Core {
    fn fused(&self, q: &Var, k: &Var, v: &Var, before: usize, documents: Option<&Documents>) -> Result<Var> {
        let positions = q.shape()[2];
        let config = Attention {
            is_causal: before == 0,
            enable_gqa: k.shape()[1] != self.heads.len(),
            ..Attention::default()
        };
        let mask = match before > 0 && positions > 1 {
            true => Some(causal_mask(positions, before, q.device())?),
            false => documents.map(|documents| documents.first_keys().clone()),
        };
        Ok(q.scaled_dot_product_attention(k, v, mask.as_ref(), &config)?)
    }

    /// Attention with dropout on the probabilities, which are therefore computed and kept.
    fn with_dropout(
        &self,
        [q, k, v]: [&Var; 3],
        before: usize,
        documents: Option<&Documents>,
    ) -> Result<Var> {
        let (queries, keys) = (q.shape()[2], k.shape()[2]);
        let (k, v) = (self.repeated(k)?, self.repeated(v)?);
        let scores = q.matmul(&k.transpose(2, 3)?)?.mul_scalar((self.dim as f64).sqrt().recip())?;
        let hidden = causal_mask(queries, before, q.device())?.eq_scalar(false)?;
        let mut scores = scores.masked_fill(&hidden, f64::NEG_INFINITY)?;
        if let Some(documents) = documents {
            let numbers = Var::arange(0, keys as i64, 1, DType::I64, q.device())?;
            scores = scores.masked_fill(&numbers.lt(documents.first_keys())?, f64::NEG_INFINITY)?;
        }
        let p = scores.softmax(-1)?;
        let window =
            activation_window(p.shape(), &[(1, self.heads.start, self.all), (2, before, before + queries)])?;
        debug_assert_eq!(keys, before + queries);
        Ok(self.dropout.forward_in(&p, &window)?.matmul(&v)?)
    }

    /// Keys or values repeated for the query heads that share them.
    fn repeated(&self, x: &Var) -> Result<Var> {
        let group = self.heads.len() / x.shape()[1];
        if group == 1 {
            return Ok(x.clone());
        }
        let [batch, heads, positions, dim] = [x.shape()[0], x.shape()[1], x.shape()[2], x.shape()[3]];
        let repeated = x.unsqueeze(2)?.broadcast_to(&[batch, heads, group, positions, dim])?;
        Ok(repeated.reshape_to(&[batch, heads * group, positions, dim])?)
    }
}

/// `[queries, before + queries]`: true where the key is not later than the query.
fn causal_mask(queries: usize, before: usize, device: Device) -> Result<Var> {
    let keys = before + queries;
    let seen: Vec<bool> = (0..queries).flat_map(|q| (0..keys).map(move |k| k <= before + q)).collect();
    Ok(Var::from_slice(&seen, &[queries, keys], device)?)
}

/// One layer's keys and values of earlier positions, kept for generation: `[batch, heads, capacity, dim]`, of which the first
/// [`KvCache::len`] positions are filled.
#[derive(Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
    len: usize,
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn new(
        batch: usize,
        heads: usize,
        capacity: usize,
        dim: usize,
        dtype: DType,
        device: Device,
    ) -> Result<KvCache> {
        let zeros = || Tensor::zeros(&[batch, heads, capacity, dim], dtype, device);
        Ok(KvCache { keys: zeros()?, values: zeros()?, len: 0 })
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.keys.shape()[0]
    }

    /// Positions filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The largest number of positions.
    pub fn capacity(&self) -> usize {
        self.keys.shape()[2]
    }

    /// Removes all positions.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds positions, and returns the keys and values of all positions.
    ///
    /// # Errors
    /// If there is no room.
    pub fn append(&mut self, keys: &Var, values: &Var) -> Result<(Var, Var)> {
        let (new, capacity) = (keys.shape()[2], self.capacity());
        if self.len + new > capacity {
            let why = format!("{} positions and {new} more, room for {capacity}", self.len);
            return Err(Error::invalid("cache", why));
        }
        for (kept, more) in [(&self.keys, keys), (&self.values, values)] {
            kernels::copy_(&mut kept.narrow(2, self.len, new)?, more.tensor())?;
        }
        self.len += new;
        let filled = |kept: &Tensor| Ok::<_, Error>(Var::new(kept.narrow(2, 0, self.len)?));
        Ok((filled(&self.keys)?, filled(&self.values)?))
    }
}

/// Where documents begin in rows of tokens that hold several. Attention stays inside a document, and each document's positions begin at
/// 0, as with Megatron's `--reset-attention-mask` and `--reset-position-ids`. So a document has the stream that it has in a row of its
/// own.
#[derive(Clone, Debug)]
pub struct Documents {
    starts: Var,
    positions: Var,
    first_keys: Var,
}

impl Documents {
    /// `starts` `[B, T]` (i64) has for each position the position in its row at which its document begins. Starts must not decrease
    /// along a row, and must be from 0 to the position itself. Attention refuses others, on a GPU when its result is read.
    ///
    /// # Errors
    /// If `starts` is no matrix of i64.
    pub fn new(starts: &Var) -> Result<Documents> {
        let (&[rows, length], DType::I64) = (starts.shape(), starts.dtype()) else {
            let got = format!("got starts of documents {:?} {}", starts.shape(), starts.dtype());
            return Err(Error::invalid("Documents", format!("{got}, wanted [B, T] i64")));
        };
        let positions = Var::arange(0, length as i64, 1, DType::I64, starts.device())?.sub(starts)?;
        let first_keys = starts.reshape_to(&[rows, 1, length, 1])?;
        Ok(Documents { starts: starts.clone(), positions, first_keys })
    }

    /// The position at which each position's document begins, `[B, T]`.
    pub fn starts(&self) -> &Var {
        &self.starts
    }

    /// Each position's number in its document, `[B, T]`.
    pub fn positions(&self) -> &Var {
        &self.positions
    }

    /// The starts as a mask of attention, `[B, 1, T, 1]`.
    pub(crate) fn first_keys(&self) -> &Var {
        &self.first_keys
    }

    /// Refuses rows of other sizes.
    pub(crate) fn check(&self, rows: usize, length: usize) -> Result<()> {
        if self.starts.shape() == [rows, length] {
            return Ok(());
        }
        let got = format!("got starts of documents {:?}", self.starts.shape());
        Err(Error::invalid("Documents", format!("{got}, wanted those of the tokens, [{rows}, {length}]")))
    }
}
