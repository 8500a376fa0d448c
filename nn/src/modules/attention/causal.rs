//! [`CausalAttention`]: attention between the linear layers: heads, rotary positions, cache, windows, dropout.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_autograd::{Attention, Var, checkpoint};
use phalanx_tensor::{DType, Device};

use super::rotary::{Rotary, RotaryPositions};
use super::{Documents, HeadsNorm, KvCache, RowPart};
use crate::layer_factory::activation_window;
use crate::modules::Dropout;
use crate::{Error, LayerFactory, Module, Result};

/// Causal attention of one layer, between the linear layers: heads, rotary positions, cache, dropout.
pub(crate) struct CausalAttention {
    core: Arc<Core>,
    /// This rank's key heads.
    key_heads: usize,
    /// The key head of each query head, if the query heads do not share the key heads evenly.
    key_of_query: Option<Vec<i64>>,
    rotary: Option<RotaryPositions>,
    /// Queries, keys and values are held between it and its negative.
    clip: Option<f64>,
    /// Whether the core's values are computed again in backward where it has dropout.
    recompute: AtomicBool,
}

/// What becomes of the scores.
#[derive(Clone, Copy, Default)]
pub(crate) struct Scores {
    /// What they are multiplied with; `1 / sqrt(dim)` if absent.
    pub(crate) scale: Option<f64>,
    /// They go through `cap tanh(score / cap)`.
    pub(crate) cap: Option<f64>,
    /// The number of keys that a query sees.
    pub(crate) window: Option<usize>,
}

/// From queries, keys and values of heads to the heads' results.
struct Core {
    /// This rank's query heads, out of `all`.
    heads: Range<usize>,
    all: usize,
    dim: usize,
    scores: Scores,
    dropout: Dropout,
}

/// Which positions a call computes.
pub(crate) enum Positions<'a> {
    /// Whole sequences.
    Whole,
    /// Further positions of sequences whose earlier positions are in the cache.
    Continued(&'a mut KvCache),
    /// Further positions of rows that have a cache each, one row's after the other's.
    Rows(&'a mut [RowPart<'a>]),
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
    /// Attention of this rank's heads, as `layers` says.
    pub(crate) fn new(
        layers: &impl LayerFactory,
        heads: Heads,
        rotary: Option<Rotary>,
        scores: Scores,
        dropout: Dropout,
    ) -> Result<CausalAttention> {
        let here = layers.heads(heads.query)?;
        let keys = layers.key_heads(heads.query, heads.key)?;
        let keys_here: Vec<usize> = here.clone().map(|i| i * heads.key / heads.query - keys.start).collect();
        let even = |(i, &key): (usize, &usize)| key == i * keys.len() / here.len();
        let evenly = here.len().is_multiple_of(keys.len()) && keys_here.iter().enumerate().all(even);
        let key_of_query = (!evenly).then(|| keys_here.into_iter().map(|key| key as i64).collect());
        let core = Core { heads: here, all: heads.query, dim: heads.dim, scores, dropout };
        let rotary = rotary.map(|rotary| RotaryPositions::new(rotary, heads.dim));
        let recompute = AtomicBool::new(false);
        let (core, key_heads) = (Arc::new(core), keys.len());
        Ok(CausalAttention { core, key_heads, key_of_query, rotary, clip: None, recompute })
    }

    /// With queries, keys and values between -`clip` and `clip`, behind norms and before they are rotated.
    pub(crate) fn with_clip(self, clip: Option<f64>) -> CausalAttention {
        CausalAttention { clip, ..self }
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
        let cache = KvCache::new(batch, self.key_heads, capacity, self.core.dim, dtype, device)?;
        Ok(cache.with_window(self.core.scores.window))
    }

    /// Queries `[B, T, heads dim]`, keys and values `[B, T, key heads dim]` to the heads' results, in the shape of the queries.
    pub(crate) fn run(&self, qkv: [&Var; 3], rows: Positions<'_>) -> Result<Var> {
        self.run_normed(qkv, [&None, &None], rows)
    }

    /// [`CausalAttention::run`] with norms of the queries and the keys before they are rotated.
    pub(crate) fn run_normed(
        &self,
        [q, k, v]: [&Var; 3],
        norms: [&Option<HeadsNorm>; 2],
        rows: Positions<'_>,
    ) -> Result<Var> {
        if let Some(odd) = [q, k, v].into_iter().find(|x| x.rank() != 3) {
            let why = format!("got {:?} after the first map, wanted [B, T, features]", odd.shape());
            return Err(Error::invalid("attention", why));
        }
        match rows {
            Positions::Whole => self.run_rows([q, k, v], norms, None, None),
            Positions::Continued(cache) => self.run_rows([q, k, v], norms, Some(cache), None),
            Positions::Packed(documents) => self.run_rows([q, k, v], norms, None, Some(documents)),
            Positions::Rows(parts) => {
                let all: usize = parts.iter().map(|part| part.count).sum();
                if all == 0 || q.shape()[..2] != [1, all] {
                    let why = format!(
                        "got {:?} for rows of {all} positions, wanted [1, {all}, features]",
                        q.shape()
                    );
                    return Err(Error::invalid("attention", why));
                }
                if let [RowPart { cache, .. }] = parts {
                    return self.run_rows([q, k, v], norms, Some(cache), None);
                }
                let mut at = 0;
                let mut results = Vec::with_capacity(parts.len());
                for RowPart { cache, count } in parts {
                    let [q, k, v] = [q, k, v].map(|x| x.narrow(1, at, *count));
                    results.push(self.run_rows([&q?, &k?, &v?], norms, Some(cache), None)?);
                    at += *count;
                }
                Ok(Var::cat(&results.iter().collect::<Vec<_>>(), 1)?)
            }
        }
    }

    /// Attention in rows of one length.
    fn run_rows(
        &self,
        [q, k, v]: [&Var; 3],
        [q_norm, k_norm]: [&Option<HeadsNorm>; 2],
        mut cache: Option<&mut KvCache>,
        documents: Option<&Documents>,
    ) -> Result<Var> {
        documents.map_or(Ok(()), |documents| documents.check(q.shape()[0], q.shape()[1]))?;
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let turning_point = self.rotary.as_ref().and_then(RotaryPositions::turning_point);
        let length = match &mut cache {
            Some(cache) => cache.length_with(q.shape()[1], turning_point)?,
            None => q.shape()[1],
        };
        let (heads, dim) = (self.core.heads.len(), self.core.dim);
        let split = |x: &Var, heads: usize| -> Result<Var> {
            let shape = [x.shape()[0], x.shape()[1], heads, dim];
            Ok(x.reshape_to(&shape)?.transpose(1, 2)?)
        };
        let clipped = |x: Var| -> Result<Var> {
            let Some(clip) = self.clip else { return Ok(x) };
            Ok(x.clamp(Some((-clip).into()), Some(clip.into()))?)
        };
        let rotated = |x: &Var, heads: usize, norm: &Option<HeadsNorm>| -> Result<Var> {
            let x = clipped(match norm {
                Some(HeadsNorm::Each(norm)) => norm.forward(&split(x, heads)?)?,
                Some(HeadsNorm::All(norm)) => split(&norm.forward(x)?, heads)?,
                None => split(x, heads)?,
            })?;
            let Some(rotary) = &self.rotary else { return Ok(x) };
            rotary.rotate(&x, documents, before, length)
        };
        let (q, k) = (rotated(q, heads, q_norm)?, rotated(k, self.key_heads, k_norm)?);
        let v = clipped(split(v, self.key_heads)?)?;
        let (k, v) = match cache {
            Some(cache) => cache.append(&k, &v)?,
            None => (k, v),
        };
        let (k, v) = (self.key_heads_by_query(k)?, self.key_heads_by_query(v)?);
        let is_composed = self.core.dropout.is_active() || self.core.scores.cap.is_some();
        let y = match (is_composed, self.recompute.load(Ordering::Relaxed)) {
            (false, _) => self.core.fused(&q, &k, &v, before, documents)?,
            (true, false) => self.core.composed([&q, &k, &v], before, documents)?,
            (true, true) => {
                let (core, documents) = (self.core.clone(), documents.cloned());
                let again =
                    move |v: &[Var]| Ok(core.composed([&v[0], &v[1], &v[2]], before, documents.as_ref())?);
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
            scale: self.scores.scale,
            ..Attention::default()
        };
        let window = self.scores.window.filter(|window| *window < before + positions);
        let mask = match (before, window) {
            // The last position sees the last keys.
            (1.., Some(window)) if positions == 1 => {
                let last = |x: &Var| x.narrow(2, x.shape()[2] - window, window);
                return Ok(q.scaled_dot_product_attention(&last(k)?, &last(v)?, None, &config)?);
            }
            (1.., _) if positions == 1 => None,
            (1.., _) => Some(seen(positions, before, k.shape()[2], window, q.device())?),
            (0, None) => documents.map(|documents| documents.first_keys().clone()),
            (0, Some(window)) => Some(first_keys(positions, window, documents, q.device())?),
        };
        Ok(q.scaled_dot_product_attention(k, v, mask.as_ref(), &config)?)
    }

    /// Attention with dropout on the probabilities or a cap on the scores, which are therefore computed and kept.
    fn composed(&self, [q, k, v]: [&Var; 3], before: usize, documents: Option<&Documents>) -> Result<Var> {
        let (queries, keys) = (q.shape()[2], k.shape()[2]);
        let (k, v) = (self.repeated(k)?, self.repeated(v)?);
        let Scores { scale, cap, window } = self.scores;
        let scale = scale.unwrap_or_else(|| (self.dim as f64).sqrt().recip());
        let mut scores = q.matmul(&k.transpose(2, 3)?)?.mul_scalar(scale)?;
        if let Some(cap) = cap {
            scores = scores.mul_scalar(cap.recip())?.tanh()?.mul_scalar(cap)?;
        }
        let hidden = seen(queries, before, keys, window, q.device())?.eq_scalar(false)?;
        let mut scores = scores.masked_fill(&hidden, f64::NEG_INFINITY)?;
        if let Some(documents) = documents {
            let numbers = Var::arange(0, keys as i64, 1, DType::I64, q.device())?;
            scores = scores.masked_fill(&numbers.lt(documents.first_keys())?, f64::NEG_INFINITY)?;
        }
        let p = scores.softmax(-1)?;
        if !self.dropout.is_active() {
            return Ok(p.matmul(&v)?);
        }
        let all = before + queries;
        let places = [(1, self.heads.start, self.all), (2, before, all), (3, all - keys, all)];
        let window = activation_window(p.shape(), &places)?;
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

/// `[queries, keys]` of the last keys: true where the key is not later than the query, nor before its window.
fn seen(queries: usize, before: usize, keys: usize, window: Option<usize>, device: Device) -> Result<Var> {
    let (all, window) = (before + queries, window.unwrap_or(usize::MAX));
    let sees = |q: usize| (all - keys..all).map(move |k| k <= before + q && before + q - k < window);
    let seen: Vec<bool> = (0..queries).flat_map(sees).collect();
    Ok(Var::from_slice(&seen, &[queries, keys], device)?)
}

/// The first key that each query of whole rows sees, as a mask of attention: `[1 or B, 1, T, 1]`.
fn first_keys(queries: usize, window: usize, documents: Option<&Documents>, device: Device) -> Result<Var> {
    let first: Vec<i64> = (0..queries).map(|q| (q + 1).saturating_sub(window) as i64).collect();
    let first = Var::from_slice(&first, &[1, 1, queries, 1], device)?;
    match documents {
        Some(documents) => Ok(first.maximum(documents.first_keys())?),
        None => Ok(first),
    }
}
